"""Which heads carry a token's disagreement, and is this more concentrated than noise?

Axes: S masks, T tokens, H query heads. Source: appendix "Head-Level Structural Analysis" of the
paper (criticality, its Herfindahl index, the permutation null).
"""

from typing import NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from numpy.typing import ArrayLike

SHUFFLES = 1000
"""Number of permutations of a token's divergences over its masks, as in the paper."""
FEWEST_MASKS = 100
"""Least number of masks. With fewer, a head's criticality is noise. The paper uses 300."""
ROUNDING = 1e-12
"""Differences of an index in [1/H, 1] below this count as zero."""


def head_criticality(kl: ArrayLike, masks: ArrayLike) -> Float[np.ndarray, "T H"]:
    """How much a head matters: how much further predictions are from the mean without it.

    (T, H) nats: for every token and head, the mean divergence from the ensemble mean over the masks
    that ablate the head, minus that over the masks that keep it. Positive: without the head, the
    prediction diverges more. NaN if all masks ablate the head, or all keep it. If masks are
    independent, this is an unbiased estimate of the head's marginal effect. Source: equation
    "criticality" of the paper.

    Args:
        kl: (S, T) divergence of each subnetwork from the ensemble mean, nats
            (`AnswerStatistics.kl`).
        masks: (S, H), 1 = kept. A mask that was drawn twice has two rows.

    Example:
        >>> masks = [[0, 1], [1, 0]]  # the first mask ablates head 0, the second head 1
        >>> head_criticality([[0.4], [0.1]], masks).round(2).tolist()  # nats of the one token
        [[0.3, -0.3]]
    """
    divergence, kept = _checked(kl, masks)
    return divergence.T @ _contrasts(kept)


def concentration(criticality: ArrayLike) -> np.ndarray:
    """Herfindahl index of the positive part of a profile over heads.

    The share of a head is max(b_h, 0), divided by the sum of these over heads. The index is the sum
    of the squared shares: an array (...) for criticality (..., H). It is 1/H if all heads are
    equal, 1 if only one head is positive, and NaN if none is. A head with NaN has no share.

    The inverse of the index is an effective number of heads. Always compare it with its null: noise
    has about ten effective heads for 32 heads and 300 masks.

    Example:
        >>> concentration([1.0, 1.0, 0.0, 0.0]).item()  # two of four heads carry all
        0.5
    """
    known = np.nan_to_num(np.asarray(criticality, dtype=float))
    # Divide by the largest: otherwise squares of tiny values underflow, and rounding errors count.
    largest = np.abs(known).max(-1, keepdims=True, initial=0)
    share = np.divide(known, largest, out=np.zeros_like(known), where=largest > 0)
    share[share < ROUNDING] = 0
    total, squares = share.sum(-1), (share**2).sum(-1)
    return np.divide(squares, total**2, out=np.full_like(total, np.nan), where=total > 0)


class PermutationNull(NamedTuple):
    """Observed concentration, and that of divergences which do not depend on the masks.

    All are arrays (T,), with NaN where undefined.

    Attributes:
        z: observed index minus mean of the null, divided by the null's standard deviation. Higher =
            fewer heads than noise. The null is skewed, so that z > 1.96 is no test at 5 %.
        effective_heads: 1 / observed index, see `concentration`.
        null_effective_heads: mean of 1 / index over the null.
    """

    z: Float[np.ndarray, " T"]
    effective_heads: Float[np.ndarray, " T"]
    null_effective_heads: Float[np.ndarray, " T"]


def permutation_null(kl: ArrayLike, masks: ArrayLike, seed: int) -> PermutationNull:
    """Concentration compared with a null that permutes a token's divergences over its masks.

    All tokens of an example share the permutations, since they share masks. So each head keeps its
    number of masks, and each token its divergences, including outliers.

    Args:
        kl, masks: as in `head_criticality`, of one example.
        seed: of the permutations. Use that of the example's masks (`AnswerStatistics.mask_seed`),
            so that results do not depend on the order of examples or on shards.

    Example:
        >>> masks = np.indices([2] * 8).reshape(8, -1).T  # all 256 masks of 8 heads
        >>> kl = 1.0 - masks[:, :1]  # 1 nat if head 0 is ablated
        >>> null = permutation_null(kl, masks, seed=0)
        >>> null.effective_heads.round(2).tolist(), bool(null.z[0] > 1)  # noise spreads over more
        ([1.0], True)
    """
    divergence, kept = _checked(kl, masks)
    contrasts = _contrasts(kept)
    unshuffled = np.tile(np.arange(len(kept)), (SHUFFLES, 1))
    order = np.random.default_rng(seed).permuted(unshuffled, axis=1)
    observed = concentration(divergence.T @ contrasts)
    # If one huge divergence falls on a mask that keeps all heads, no head is positive. The index of
    # that draw is NaN, which pandas leaves out.
    draws = (concentration(token[order] @ contrasts) for token in divergence.T)
    null = pd.DataFrame(dict(enumerate(draws)), index=range(SHUFFLES))
    spread = null.std().where(lambda sd: sd > ROUNDING)
    z = (observed - null.mean()) / spread
    return PermutationNull(z.to_numpy(), 1 / observed, (1 / null).mean().to_numpy())


def _checked(
    kl: ArrayLike, masks: ArrayLike
) -> tuple[Float[np.ndarray, "S T"], Bool[np.ndarray, "S H"]]:
    """Divergences minus the smallest one of their token, and which heads are kept.

    Adding a constant to a token's divergences does not change criticality. With the smallest one
    subtracted, a token with equal divergences has a criticality of exactly 0.
    """
    divergence, mask = np.asarray(kl, dtype=float), np.asarray(masks)
    shapes = f"got {divergence.shape} and {mask.shape}"
    if divergence.ndim != 2 or mask.ndim != 2 or len(divergence) != len(mask):
        raise ValueError(f"expected kl (S, T) and masks (S, H), a row per subnetwork, {shapes}")
    if not mask.size:
        raise ValueError(f"expected at least one mask and head, {shapes}")
    if not np.isfinite(divergence).all():
        raise ValueError("kl has values that are not finite: leave these tokens out")
    if not np.isin(mask, (0, 1)).all():
        raise ValueError("masks must contain only 0 (ablated) and 1 (kept)")
    return divergence - divergence.min(0), mask.astype(bool)


def _contrasts(kept: Bool[np.ndarray, "S H"]) -> Float[np.ndarray, "S H"]:
    """(S, H) weights: criticality is the weighted sum of the divergences. NaN where undefined."""
    times = kept.sum(0)
    others = len(kept) - times
    weights = np.where(kept, -1 / np.maximum(times, 1), 1 / np.maximum(others, 1))
    return np.where((times > 0) & (others > 0), weights, np.nan)
