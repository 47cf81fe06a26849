"""Mask rate p and number of masks S, derived from the number of query heads H of a layer.

Source of all of it: appendix "Derivation of the Coverage-Fidelity Constraints" of the paper.
"""

import math
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from scipy.special import bdtr  # scipy.stats takes a second to import

__all__ = [
    "OperatingPoint", "flops_ratio", "heads_masked_at_once", "masks_for_coverage",
    "operating_point", "tolerated_heads",
]  # fmt: skip
FAILURE = 0.05
"""Largest probability that some head is never masked."""
DEGRADATION = 0.05
"""Largest share of masks that may mask more heads at once than the model tolerates."""
MASK_RATES = tuple(round(0.01 * step, 2) for step in range(1, 100))
"""The grid on which the mask rate is chosen."""


class OperatingPoint(NamedTuple):
    """The probability p of masking a head, and the number S of masks."""

    mask_rate: float
    num_masks: int


def masks_for_coverage(num_heads: int, mask_rate: float) -> int:
    """Smallest S that masks every head at least once with probability >= 1 - `FAILURE`.

    Union bound H (1 - p)^S <= `FAILURE`, equation "app-coverage".

    Example:
        >>> masks_for_coverage(32, 0.15)
        40
    """
    return math.ceil(math.log(num_heads / FAILURE) / -math.log1p(-mask_rate))


def tolerated_heads(num_heads: int) -> int:
    """How many heads may be masked at once without breaking the model: floor(H / 4).

    Example:
        >>> tolerated_heads(32), tolerated_heads(9)
        (8, 2)
    """
    return num_heads // 4


def heads_masked_at_once(num_heads: int, mask_rate: float) -> tuple[int, float]:
    """How many heads one mask masks at most, in all but a share `DEGRADATION` of the masks.

    Returns:
        The quantile of the binomial distribution, which is at most `tolerated_heads` where
        `largest_mask_rate` admits p; and its Gaussian approximation, equation "app-fidelity" of the
        paper.

    Example:
        >>> exact, gaussian = heads_masked_at_once(32, 0.15)  # 4.8 heads on average
        >>> exact, round(gaussian, 2)  # more in at most 5 % of masks
        (8, 8.12)
    """
    below = bdtr(np.arange(num_heads + 1), num_heads, mask_rate)
    exact = int(np.searchsorted(below, 1 - DEGRADATION))
    spread = math.sqrt(num_heads * mask_rate * (1 - mask_rate))
    return exact, num_heads * mask_rate + NormalDist().inv_cdf(1 - DEGRADATION) * spread


@cache
def largest_mask_rate(num_heads: int) -> float:
    """Largest p at which at most `DEGRADATION` of the masks mask more than `tolerated_heads`.

    Exact by the binomial distribution, which the paper's equation "app-fidelity" approximates.

    Raises:
        ValueError: fewer than 4 heads, so that a quarter is less than one head.
    """
    tolerated = tolerated_heads(num_heads)
    if tolerated < 1:
        raise ValueError(
            f"expected at least 4 heads to derive mask_rate, got {num_heads} (the fidelity bound "
            "allows a quarter to be masked): set mask_rate yourself"
        )
    return max(p for p in MASK_RATES if bdtr(tolerated, num_heads, p) >= 1 - DEGRADATION)


def operating_point(
    num_heads: int, num_masks: int | None = None, mask_rate: float | None = None
) -> OperatingPoint:
    """Cheapest admissible (p, S): `largest_mask_rate`, and `masks_for_coverage` at that rate.

    A value that is given stays. 32 heads give the paper's values; 9 give (0.09, 56), 4 give
    (0.09, 47). ValueError: fewer than 4 heads without a `mask_rate`.

    Example:
        >>> operating_point(32)
        OperatingPoint(mask_rate=0.15, num_masks=40)
    """
    rate = largest_mask_rate(num_heads) if mask_rate is None else mask_rate
    # Disagreement takes at least two masks.
    return OperatingPoint(rate, num_masks or max(2, masks_for_coverage(num_heads, rate)))


def flops_ratio(num_layers: int, layer: int, num_masks: int) -> float:
    """Cost of scoring a response, in full forward passes: (prefix + S suffix) / L.

    The layers below the masked one (index `layer` of L, from 0) run once, the masked one and those
    above it once per mask, all over the prompt too. With scope "response", masked passes compute
    only the response and cost far less.

    Example:
        >>> flops_ratio(num_layers=36, layer=22, num_masks=40)  # Qwen3-4B at 60 %
        16.166666666666668
    """
    return (layer + num_masks * (num_layers - layer)) / num_layers
