"""Probability mass of the top K tokens, in bands of the subnetworks' disagreement."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int, Num
from numpy.typing import ArrayLike

from lm_polygraph_asmi.analysis.clusters import (
    BAND_RESAMPLES,
    Clustered,
    finite,
    ordered,
    percentiles,
    tied_order,
)
from lm_polygraph_asmi.core.statistics import TOP_K

if TYPE_CHECKING:
    import pandas as pd

BANDS = {
    "low (bottom decile)": (0, 10),
    "mid (P45 to P55)": (45, 55),
    "high (top decile)": (90, 100),
}
"""Bands of MI_t, as percentiles of rank. Source: appendix "Top-K Coverage Analysis"."""


def tail_entropy_bound(missing: ArrayLike) -> Float[np.ndarray, "..."] | np.float64:
    """Upper bound, in nats, of the entropy that a tail of mass at most m adds as one token.

    It is -m ln m, where m is limited to [0, 1/e]: -m ln m is largest at 1/e, so a larger m does not
    lower the bound. `missing` is m, of any shape; NaN raises ValueError. Source: appendix "Top-K
    Coverage Analysis" of the paper (m = 0.045 gives 0.14).

    Example:
        >>> tail_entropy_bound([0.045, 1.0]).round(2).tolist()  # nats; never above 1/e
        [0.14, 0.37]
    """
    mass = np.clip(ordered(missing=missing), 0, 1 / np.e)
    return -mass * np.log(np.where(mass > 0, mass, 1))


def coverage_by_band(information: ArrayLike, coverage: ArrayLike) -> "pd.DataFrame":
    """Mean mass of the top K in three bands of MI_t, and the bound for the tail at K = 64.

    The table has a row for each band and one for all tokens. Its columns are n, each of `TOP_K`,
    and "tail entropy bound" (nats). Bands are cut by rank. If a cut falls between tokens of equal
    MI_t, their mean is used. So if many MI_t are zero, the low and the mid band are equal.

    Args:
        information: (N,) MI_t of all tokens, nats.
        coverage: (N, len(TOP_K)) mean over masks of the mass of the top K.

    Example:
        >>> table = coverage_by_band(list(range(10)), [[1.0] * 7] * 9 + [[0.9] * 7])
        >>> table[64].round(2).tolist()  # low, mid, high MI; all tokens
        [1.0, 1.0, 0.9, 0.99]
    """
    import pandas as pd  # scoring reads `TOP_K` without it

    information, coverage = np.asarray(information, dtype=float), np.asarray(coverage, dtype=float)
    if coverage.shape != (expected := (len(information), len(TOP_K))):
        raise ValueError(f"coverage must have shape {expected}, got {coverage.shape}")
    if not len(information) or not np.isfinite(information).all():
        raise ValueError("expected finite MI_t of at least one token")
    rows = _band_means(information, coverage, np.ones((1, len(information))))[0]
    table = pd.DataFrame(rows, index=[*BANDS, "all tokens"], columns=list(TOP_K))
    table.insert(0, "n", np.diff(_ranks(np.array([len(information)])))[:, 0, 0])
    table["tail entropy bound"] = tail_entropy_bound(1 - table[64])
    return table


def coverage_intervals(
    information: Sequence[np.ndarray],
    coverage: Sequence[np.ndarray],
    answers: Clustered,
) -> dict[str, Float[np.ndarray, "2 k"]]:
    """Pointwise 95 % intervals of `coverage_by_band` over clusters.

    Each resample cuts its own bands of tokens. Returns for each band the lower and upper ends (2,
    k), which are NaN with fewer than two clusters. Raises ValueError also if an answer has no
    token.

    Args:
        information: n arrays (T,) of MI_t, nats. T may vary.
        coverage: n arrays (T, k), mean over masks of the mass of the top K for k values of K.

    Example:
        >>> mi = [np.array([0.1, 0.2])] * 4  # two tokens an answer; the second loses 0.1 or 0.2
        >>> mass = [np.array([[1.0], [kept]]) for kept in (0.9, 0.8, 0.9, 0.8)]
        >>> bands = coverage_intervals(mi, mass, Clustered(list("abcd")))
        >>> bands["low (bottom decile)"].tolist(), bands["high (top decile)"].round(1).tolist()
        ([[1.0], [1.0]], [[0.8], [0.9]])
    """
    lengths = [len(tokens) for tokens in information]
    if not len(information) == len(coverage) == len(answers) or not all(lengths):
        raise ValueError(
            "expected tokens, coverage and a cluster key for every answer, got "
            f"{len(information)}, {len(coverage)} and {len(answers)}, "
            f"{sum(not length for length in lengths)} without a token"
        )
    mass = np.concatenate([np.asarray(answer_mass, dtype=float) for answer_mass in coverage])
    tokens = finite(information=np.concatenate(information))
    bands = [*BANDS, "all tokens"]
    if answers.n_clusters < 2:
        return {band: np.full((2, mass.shape[1]), np.nan) for band in bands}
    answer = np.repeat(np.arange(len(lengths)), lengths)
    drawn = [
        _band_means(tokens, mass, part.take(answer, axis=1))
        for counts in answers.draws(BAND_RESAMPLES)
        for part in np.array_split(counts, max(1, counts.shape[0] // 8))
    ]
    low, high = np.percentile(np.concatenate(drawn), percentiles(answers.n_clusters), axis=0)
    return {band: np.array([low[i], high[i]]) for i, band in enumerate(bands)}


def _ranks(totals: Num[np.ndarray, " b"]) -> Int[np.ndarray, "bands b 2"]:
    """(bands, b, 2) first rank of every band, and the rank after its last, for `totals` tokens."""
    low, high = np.array([*BANDS.values(), (0, 100)]).T[..., None]
    return np.stack([np.floor(low * totals / 100), np.ceil(high * totals / 100)], 2).astype(int)


def _band_means(
    information: Float[np.ndarray, " N"],
    coverage: Float[np.ndarray, "N k"],
    counts: Num[np.ndarray, "b N"],
) -> Float[np.ndarray, "b bands k"]:
    """(b, bands, k) mean coverage by band, with each token counted `counts` (b, N) times."""
    order, starts = tied_order(information)
    group = np.repeat(np.arange(len(starts)), np.diff(np.r_[starts, len(order)]))
    weights = counts.take(order, axis=1).astype(float)
    sizes = np.add.reduceat(weights, starts, axis=1)
    ends = sizes.cumsum(1)
    means = []
    for bounds in _ranks(ends[:, -1]):
        start, stop = bounds[:, :1], bounds[:, 1:]
        # For each group of ties, the share of its ranks that is inside the band.
        overlap = np.clip(np.minimum(ends, stop) - np.maximum(ends - sizes, start), 0, None)
        share = np.divide(overlap, sizes, out=np.zeros_like(overlap), where=sizes > 0)
        means.append((share[:, group] * weights) @ coverage[order] / (stop - start))
    return np.stack(means, 1)
