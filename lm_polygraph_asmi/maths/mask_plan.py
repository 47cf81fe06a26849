"""Mask rate p and number of masks S, derived from the number of heads H."""

import math
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

from scipy.special import bdtr  # scipy.stats takes a second to import

GRID = 0.01


class OperatingPoint(NamedTuple):
    """A mask rate p and its number of masks S.

    Attributes:
        mask_rate: probability of masking a head, p.
        num_masks: number of masks, S.
    """

    mask_rate: float
    num_masks: int


def masks_for_coverage(num_heads: int, mask_rate: float, failure: float = 0.05) -> int:
    """Smallest S that masks every head at least once with probability >= 1 - `failure`.

    Union bound H (1 - p)^S <= failure. Source: equation "app-coverage" of the paper.

    Args:
        num_heads: query heads of the layer, H.
        mask_rate: probability of masking a head, p, in (0, 1).
        failure: largest probability that some head is never masked, in (0, 1).

    Example:
        >>> masks_for_coverage(32, 0.15)
        40
    """
    return math.ceil(math.log(num_heads / failure) / -math.log1p(-mask_rate))


def masks_for_pair_coverage(num_heads: int, mask_rate: float, failure: float = 0.05) -> int:
    """S that masks every pair of heads together at least once with probability >= 1 - `failure`.

    ln(H (H - 1) / 2 / failure) / p^2. Source: paragraph "Scope" of the paper's derivation, which
    gives no budget for it (about 410 masks for 32 heads at p = 0.15).

    Args:
        num_heads: query heads of the layer, H, at least 2.
        mask_rate: probability of masking a head, p, in (0, 1).
        failure: largest probability that some pair is never masked together, in (0, 1).

    Example:
        >>> masks_for_pair_coverage(32, 0.15), masks_for_coverage(32, 0.15)  # pairs, single heads
        (409, 40)
    """
    return math.ceil(math.log(math.comb(num_heads, 2) / failure) / mask_rate**2)


def never_masked_heads(num_heads: int, mask_rate: float, num_masks: int) -> float:
    """Expected number of heads that S masks never mask: H (1 - p)^S.

    Source: appendix "Derivation of the Coverage-Fidelity Constraints" of the paper.

    Args:
        num_heads: query heads of the layer, H.
        mask_rate: probability of masking a head, p, in (0, 1).
        num_masks: number of masks, S.

    Example:
        >>> round(never_masked_heads(32, 0.15, 40), 3), round(never_masked_heads(32, 0.15, 10), 1)
        (0.048, 6.3)
    """
    return num_heads * (1 - mask_rate) ** num_masks


def tolerated_heads(num_heads: int) -> int:
    """Number of heads that may be masked at once without breaking the model: floor(H / 4).

    Source: appendix "Derivation of the Coverage-Fidelity Constraints" of the paper, after studies
    of head pruning.

    Args:
        num_heads: query heads of the layer, H.

    Example:
        >>> tolerated_heads(32), tolerated_heads(9)
        (8, 2)
    """
    return num_heads // 4


def heads_masked_at_once(
    num_heads: int, mask_rate: float, degradation: float = 0.05, exact: bool = True
) -> float:
    """The 1 - `degradation` quantile of the number of heads that one mask masks.

    Of the binomial distribution if `exact`, else the Gaussian upper bound of equation
    "app-fidelity" of the paper.

    Args:
        num_heads: query heads of the layer, H.
        mask_rate: probability of masking a head, p, in (0, 1).
        degradation: probability of masking more heads, in (0, 1).
        exact: whether to use the binomial distribution.

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
    """The grid of mask rates: 0.01 ... 0.99.

    Example:
        >>> mask_rates()[:3], len(mask_rates())
        ([0.01, 0.02, 0.03], 99)
    """
    return [round(step * GRID, 2) for step in range(1, round(1 / GRID))]


@cache
def largest_mask_rate(num_heads: int, degradation: float = 0.05) -> float:
    """Largest p that keeps the model working, on a grid of 0.01.

    It satisfies P(more than floor(H / 4) heads masked at once) <= `degradation`. Source: appendix
    "Derivation of the Coverage-Fidelity Constraints" of the paper, with the exact binomial instead
    of the Gaussian in its equation "app-fidelity".

    Raises:
        ValueError: fewer than 4 heads, so that a quarter is less than one head.
    """
    tolerated = tolerated_heads(num_heads)
    if tolerated < 1:
        raise ValueError(
            f"expected at least 4 heads to derive mask_rate, got {num_heads} (the fidelity bound "
            "allows a quarter to be masked): set mask_rate yourself"
        )
    return max(p for p in mask_rates() if bdtr(tolerated, num_heads, p) >= 1 - degradation)


def operating_point(
    num_heads: int, num_masks: int | None = None, mask_rate: float | None = None
) -> OperatingPoint:
    """Cheapest admissible (p, S) for H heads; only values that are None are derived.

    p is the largest on a grid of 0.01 at which at most 5 % of masks mask more than
    `tolerated_heads`. S is `masks_for_coverage` at that p. 32 heads give (0.15, 40), the paper's
    values; 9 give (0.09, 56), 4 give (0.09, 47). Source: appendix "Derivation of the
    Coverage-Fidelity Constraints" of the paper.

    Args:
        num_heads: query heads of the layer, H.
        num_masks: S; None: derived.
        mask_rate: p in (0, 1); None: derived.

    Raises:
        ValueError: `mask_rate` is None for fewer than 4 heads.

    Example:
        >>> operating_point(32)
        OperatingPoint(mask_rate=0.15, num_masks=40)
    """
    rate = largest_mask_rate(num_heads) if mask_rate is None else mask_rate
    return OperatingPoint(rate, num_masks or masks_for_coverage(num_heads, rate))


def flops_ratio(num_layers: int, layer: int, num_masks: int) -> float:
    """Cost of scoring a response, in full forward passes: (prefix + S suffix) / L.

    The layers below the masked one run once, the masked one and those above it once per mask. All
    passes are assumed to attend to the prompt at the same cost. With scope "response", masked
    passes compute only the response and cost far less.

    Args:
        num_layers: number of layers, L.
        layer: index of the masked layer, from 0.
        num_masks: number of masks, S.

    Raises:
        ValueError: layer out of range, or no masks.

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
