"""Mask rate p and number of masks S from the number of heads H alone."""

import math
from functools import cache
from typing import NamedTuple

from scipy.stats import binom

GRID = 0.01


class OperatingPoint(NamedTuple):
    """A mask rate p and the number of masks S that goes with it."""

    mask_rate: float
    num_masks: int


def masks_for_coverage(num_heads: int, mask_rate: float, failure: float = 0.05) -> int:
    """Smallest S that masks every head at least once with probability >= 1 - `failure`.

    Union bound H (1 - p)^S <= failure. Source: equation "app-coverage" of the paper.
    """
    return math.ceil(math.log(num_heads / failure) / -math.log1p(-mask_rate))


@cache
def largest_mask_rate(num_heads: int, degradation: float = 0.05) -> float:
    """Largest p that keeps the model working: few heads masked at once, with high probability.

    On a grid of 0.01 such that, exactly, P(more than floor(H / 4) heads masked at once) <=
    `degradation`. Source: appendix "Derivation of the Coverage-Fidelity Constraints" of the paper,
    with the exact binomial where its equation "app-fidelity" uses a Gaussian.

    Raises:
        ValueError: fewer than 4 heads, where a quarter of the heads is less than one.
    """
    tolerated = num_heads // 4
    if tolerated < 1:
        raise ValueError(
            f"no mask rate satisfies the fidelity bound for {num_heads} heads (a quarter is less "
            "than one head): set mask_rate yourself"
        )
    grid = [step * GRID for step in range(1, round(1 / GRID))]
    admissible = [p for p in grid if binom.cdf(tolerated, num_heads, p) >= 1 - degradation]
    return round(max(admissible), 2)


def operating_point(
    num_heads: int, num_masks: int | None = None, mask_rate: float | None = None
) -> OperatingPoint:
    """Cheapest admissible (p, S) for H heads; what is given stays, what is None is derived.

    p is `largest_mask_rate`, S the fewest `masks_for_coverage` at that p. 32 heads give (0.15, 40),
    the paper's point; 9 give (0.09, 56), 4 give (0.09, 47).

    Raises:
        ValueError: p is to be derived for fewer than 4 heads.
    """
    rate = largest_mask_rate(num_heads) if mask_rate is None else mask_rate
    return OperatingPoint(rate, num_masks or masks_for_coverage(num_heads, rate))
