"""How large a perturbation is, and how large it must be to do as much as another."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from scipy.optimize import brentq
from torch import Tensor

TOLERANCE = 1e-3
"""Relative, of an effect that is matched."""
LARGEST = 2.0**10
"""A dose above this, or below its inverse, is not looked for."""


def relative_change(
    plain: Float[Tensor, "n D"], perturbed: Float[Tensor, "S n D"]
) -> Float[Tensor, " n"]:
    """Root mean square over masks of the change's norm, relative to the norm of what is changed.

    `sqrt(mean_s |r_s - r|^2) / |r|` at each position; 0 where nothing changes.
    """
    plain, perturbed = plain.double(), perturbed.double()
    size = (perturbed - plain).square().sum(-1).mean(0).sqrt()
    return torch.where(size > 0, size / plain.norm(dim=-1), 0.0)


def matching_dose(effect: Callable[[float], float], wanted: float, start: float) -> float | None:
    """The dose at which an effect is the wanted one, to `TOLERANCE`; None where there is none.

    The effect is taken to grow with the dose, as a divergence does near its square; doses are
    bracketed from `start` by doubling, and the crossing found by Brent's method in logarithms.

    Args:
        effect: of a dose above 0; at least 0.
        wanted: above 0.
        start: first dose tried.

    Raises:
        ValueError: nothing that is wanted.
    """
    if not wanted > 0:
        raise ValueError(f"the effect to be matched must be above 0, got {wanted}")
    known: dict[float, float] = {}

    def excess(log_dose: float) -> float:
        if log_dose not in known:
            found = effect(math.exp(log_dose))
            known[log_dose] = math.log(max(found, 1e-300) / wanted)
        return known[log_dose]

    def enough() -> float | None:
        best = min(known, key=lambda log_dose: abs(known[log_dose]))
        return math.exp(best) if abs(known[best]) <= TOLERANCE / 2 else None

    low = high = math.log(start)
    while excess(low) > 0 and enough() is None:
        low -= math.log(2)
        if low < -math.log(LARGEST):
            return None
    while excess(high) < 0 and enough() is None:
        high += math.log(2)
        if high > math.log(LARGEST):
            return None
    for tolerance in (1e-4, 1e-6, 1e-8):
        if (found := enough()) is not None:
            return found
        brentq(excess, low, high, xtol=tolerance, rtol=1e-14)
    return enough()
