"""Mask rate p and number of masks S from the number of heads H alone."""

import math
from functools import cache
from typing import NamedTuple

from scipy.stats import binom

GRID = 0.01


class OperatingPoint(NamedTuple):
    """A mask rate and the number of masks that goes with it."""

    mask_rate: float
    num_masks: int


def masks_for_coverage(num_heads: int, mask_rate: float, failure: float = 0.05) -> int:
    """Smallest S that masks every head at least once with probability >= 1 - `failure`.

    Union bound H (1 - p)^S <= failure. Source: equation "app-coverage" of the paper.
    """
    return math.ceil(math.log(num_heads / failure) / -math.log1p(-mask_rate))


@cache
def operating_point(
    num_heads: int, failure: float = 0.05, degradation: float = 0.05
) -> OperatingPoint:
    """Cheapest admissible (p, S): the largest p that keeps the model working, then S by coverage.

    p is taken on a grid of 0.01 such that, exactly, P(more than floor(H / 4) heads masked at once)
    <= `degradation`; S as in `masks_for_coverage`. 32 heads give (0.15, 40), the paper's point; 9
    give (0.09, 56), 4 give (0.09, 47). Source: appendix "Derivation of the Coverage-Fidelity
    Constraints", with the exact binomial where its equation "app-fidelity" uses a Gaussian.

    Raises:
        ValueError: fewer than 4 heads, where a quarter of the heads is less than one.
    """
    tolerated = num_heads // 4
    if tolerated < 1:
        raise ValueError(
            f"no mask rate satisfies the fidelity bound for {num_heads} heads (a quarter is less "
            "than one head): set mask_rate and num_masks yourself"
        )
    steps = range(1, round(1 / GRID))
    admissible = [
        step * GRID
        for step in steps
        if binom.cdf(tolerated, num_heads, step * GRID) >= 1 - degradation
    ]
    mask_rate = round(max(admissible), 2)
    return OperatingPoint(mask_rate, masks_for_coverage(num_heads, mask_rate, failure))
