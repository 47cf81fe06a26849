"""Mask rate p and number of masks S from the number of heads H alone."""

import math
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

from scipy.special import bdtr  # scipy.stats would take a second to import

GRID = 0.01


class OperatingPoint(NamedTuple):
    """A mask rate p and the number of masks S that goes with it."""

    mask_rate: float
    num_masks: int


def masks_for_coverage(num_heads: int, mask_rate: float, failure: float = 0.05) -> int:
    """Smallest S that masks every head at least once with probability >= 1 - `failure`.

    Union bound H (1 - p)^S <= failure. Source: equation "app-coverage" of the paper.

    Example:
        >>> masks_for_coverage(32, 0.15)
        40
    """
    return math.ceil(math.log(num_heads / failure) / -math.log1p(-mask_rate))


def masks_for_pair_coverage(num_heads: int, mask_rate: float, failure: float = 0.05) -> int:
    """S that masks every pair of heads together at least once, with probability >= 1 - `failure`.

    ln(H (H - 1) / 2 / failure) / p^2; source: paragraph "Scope" of the paper's derivation, which
    has no budget for it (about 410 masks for 32 heads at p = 0.15).

    Example:
        >>> masks_for_pair_coverage(32, 0.15), masks_for_coverage(32, 0.15)  # pairs, single heads
        (409, 40)
    """
    return math.ceil(math.log(math.comb(num_heads, 2) / failure) / mask_rate**2)


def never_masked_heads(num_heads: int, mask_rate: float, num_masks: int) -> float:
    """Expected number of heads that none of S masks takes away: H (1 - p)^S.

    Example:
        >>> round(never_masked_heads(32, 0.15, 40), 3), round(never_masked_heads(32, 0.15, 10), 1)
        (0.048, 6.3)
    """
    return num_heads * (1 - mask_rate) ** num_masks


def tolerated_heads(num_heads: int) -> int:
    """Heads that may be masked at once before the model breaks: a quarter of them, rounded down.

    Example:
        >>> tolerated_heads(32), tolerated_heads(9)
        (8, 2)
    """
    return num_heads // 4


def heads_masked_at_once(
    num_heads: int, mask_rate: float, degradation: float = 0.05, exact: bool = True
) -> float:
    """Number of heads that all but a share `degradation` of masks stay within.

    The quantile of the exact binomial distribution, or the Gaussian upper bound of equation
    "app-fidelity" of the paper.

    Example:
        >>> heads_masked_at_once(32, 0.15)  # 4.8 on average; more than 8 in at most 5 % of masks
        8.0
    """
    if exact:
        return float(
            next(
                heads
                for heads in range(num_heads + 1)
                if bdtr(heads, num_heads, mask_rate) >= 1 - degradation
            )
        )
    spread = math.sqrt(num_heads * mask_rate * (1 - mask_rate))
    return num_heads * mask_rate + NormalDist().inv_cdf(1 - degradation) * spread


def mask_rates() -> list[float]:
    """The grid of mask rates that are considered: 0.01 ... 0.99.

    Example:
        >>> mask_rates()[:3], len(mask_rates())
        ([0.01, 0.02, 0.03], 99)
    """
    return [round(step * GRID, 2) for step in range(1, round(1 / GRID))]


@cache
def largest_mask_rate(num_heads: int, degradation: float = 0.05) -> float:
    """Largest p that keeps the model working: few heads masked at once, with high probability.

    On a grid of 0.01 such that, exactly, P(more than floor(H / 4) heads masked at once) <=
    `degradation`. Source: appendix "Derivation of the Coverage-Fidelity Constraints" of the paper,
    with the exact binomial where its equation "app-fidelity" uses a Gaussian.

    Raises:
        ValueError: fewer than 4 heads, where a quarter of the heads is less than one.
    """
    tolerated = tolerated_heads(num_heads)
    if tolerated < 1:
        raise ValueError(
            f"no mask rate satisfies the fidelity bound for {num_heads} heads (a quarter is less "
            "than one head): set mask_rate yourself"
        )
    return max(p for p in mask_rates() if bdtr(tolerated, num_heads, p) >= 1 - degradation)


def operating_point(
    num_heads: int, num_masks: int | None = None, mask_rate: float | None = None
) -> OperatingPoint:
    """Cheapest admissible (p, S) for H heads; what is given stays, what is None is derived.

    p is `largest_mask_rate`, S the fewest `masks_for_coverage` at that p. 32 heads give (0.15, 40),
    the paper's point; 9 give (0.09, 56), 4 give (0.09, 47).

    Raises:
        ValueError: p is to be derived for fewer than 4 heads.

    Example:
        >>> operating_point(32)
        OperatingPoint(mask_rate=0.15, num_masks=40)
    """
    rate = largest_mask_rate(num_heads) if mask_rate is None else mask_rate
    return OperatingPoint(rate, num_masks or masks_for_coverage(num_heads, rate))


def flops_ratio(num_layers: int, layer: int, num_masks: int) -> float:
    """Passes through the whole model that scoring a response amounts to.

    (prefix + S suffix) / L: the layers below the masked one are passed through once, those from it
    on once per mask. Attention to the prompt is taken to cost the same in all of them; with the
    scope "response", masked passes see the response alone, and cost far less than this.

    Args:
        num_layers: L.
        layer: the masked one, from 0, which is the number of layers below it.
        num_masks: S.

    Raises:
        ValueError: no such layer, or no mask.

    Example:
        >>> flops_ratio(num_layers=36, layer=22, num_masks=40)  # Qwen3-4B at 60 %
        16.166666666666668
    """
    if not 0 <= layer < num_layers or num_masks < 1:
        raise ValueError(
            f"expected a layer in 0 ... {num_layers - 1} and at least one mask, got layer {layer} "
            f"and {num_masks} masks"
        )
    return (layer + num_masks * (num_layers - layer)) / num_layers
