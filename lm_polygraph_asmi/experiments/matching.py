"""Size of a perturbation, and the scale at which its effect equals another."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from scipy.optimize import brentq
from torch import Tensor

TOLERANCE = 1e-3
"""Relative tolerance of a matched effect."""
LARGEST = 2.0**10
"""Largest scale of the search; the smallest is its inverse."""
SECANTS = 6
"""Secant steps of the search, before bracketing."""


def relative_change(
    unperturbed: Float[Tensor, "n D"], perturbed: Float[Tensor, "S n D"]
) -> Float[Tensor, " n"]:
    """Root mean square over masks of the change's norm, relative to the unchanged norm.

    `sqrt(mean_s |r_s - r|^2) / |r|` at each position; 0 where nothing changes.

    Example:
        >>> unperturbed, perturbed = torch.tensor([[3.0, 4.0]]), torch.tensor([[[3.0, 4.5]]])
        >>> relative_change(unperturbed, perturbed).tolist()  # 0.5 of 5
        [0.1]
    """
    unperturbed, perturbed = unperturbed.double(), perturbed.double()
    size = (perturbed - unperturbed).square().sum(-1).mean(0).sqrt()
    return torch.where(size > 0, size / unperturbed.norm(dim=-1), 0.0)


def matching_scale(effect: Callable[[float], float], target: float, start: float) -> float | None:
    """The scale at which an effect equals `target`, to `TOLERANCE`; None if there is none.

    Assumes that the effect grows with the scale, nearly as a power of it (a divergence: as its
    square). So a few secant steps in logarithms usually suffice; otherwise the scale is bracketed
    by doubling and found by Brent's method.

    Args:
        effect: of a scale above 0; at least 0. Expensive, so computed once per scale.
        target: above 0.
        start: first scale tried.

    Example:
        >>> round(matching_scale(lambda scale: scale**2, target=4.0, start=0.1), 2)
        2.0
    """
    if not target > 0:
        raise ValueError(f"the effect to be matched must be above 0, got {target}")
    excesses: dict[float, float] = {}

    def excess(log_scale: float) -> float:
        """Above 0 for a scale that is too high; exactly 0 within the tolerance."""
        if log_scale not in excesses:
            log_ratio = math.log(max(effect(math.exp(log_scale)), 1e-300) / target)
            excesses[log_scale] = 0.0 if abs(log_ratio) <= TOLERANCE / 2 else log_ratio
        return excesses[log_scale]

    def solution() -> float | None:
        return next((math.exp(log_scale) for log_scale, gap in excesses.items() if not gap), None)

    low = high = current = math.log(start)
    previous, power = current, 2.0
    for _ in range(SECANTS):
        if not excess(current) or abs(excess(current)) > math.log(LARGEST):
            break
        if current != previous:
            power = (excess(current) - excess(previous)) / (current - previous)
        if not 0.2 < power < 5:  # not a power of the scale
            break
        previous, current = current, current - excess(current) / power
    while excess(low) > 0 and solution() is None:
        low -= math.log(2)
        if low < -math.log(LARGEST):
            return None
    while excess(high) < 0 and solution() is None:
        high += math.log(2)
        if high > math.log(LARGEST):
            return None
    for tolerance in (1e-4, 1e-6, 1e-8):
        if solution() is None:
            brentq(excess, low, high, xtol=tolerance, rtol=1e-14)
    return solution()
