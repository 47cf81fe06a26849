"""How much probability the top-K truncation keeps, by how much subnetworks disagree."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

BANDS = {
    "low (bottom decile)": (0, 10),
    "mid (P45 to P55)": (45, 55),
    "high (top decile)": (90, 100),
}
"""Percentiles of rank by MI_t, as in appendix "Top-K Coverage Analysis" of the paper."""
TOP_K = (1, 8, 16, 32, 64, 128, 256)
"""The K of the paper's analysis; runs save coverage at these (`saved.names.COVERAGE_AT`)."""


def tail_entropy_bound(missing: ArrayLike) -> np.ndarray:
    """-m ln m in nats: the entropy a tail of mass at most m contributes as one bucket.

    1/e from m = 1/e on, where the function has its maximum. Source: appendix "Top-K Coverage
    Analysis" of the paper (m = 0.045 gives 0.14).
    """
    mass = np.clip(missing, 0, 1 / np.e)
    return -mass * np.log(np.where(mass > 0, mass, 1))


def coverage_by_band(
    information: ArrayLike, coverage: ArrayLike, top_k: Sequence[int] = TOP_K
) -> pd.DataFrame:
    """Mean mass of the top K in three bands of MI_t, and the bound for the tail at K = 64.

    Bands are cut by rank, tokens of equal MI_t standing for one another: a band that cuts through
    them takes their mean. With many zeros, low and mid band are then alike, as they should be.

    Args:
        information: (N,) MI_t of all tokens, nats.
        coverage: (N, len(top_k)) mean over masks of the mass of the top K.
        top_k: the K, 64 among them.

    Returns:
        A row per band and one for all tokens; columns n, a K each, "tail entropy bound" (nats).

    Raises:
        ValueError: other shapes, no token, or MI_t that is not finite.
    """
    information, coverage = np.asarray(information, dtype=float), np.asarray(coverage, dtype=float)
    if coverage.shape != (len(information), len(top_k)):
        raise ValueError(
            f"coverage must have shape ({len(information)}, {len(top_k)}), got {coverage.shape}"
        )
    if not len(information) or not np.isfinite(information).all():
        raise ValueError("MI_t must be finite, of at least one token")
    total = len(information)
    _, group, sizes = np.unique(information, return_inverse=True, return_counts=True)
    ends = sizes.cumsum()
    rows = {}
    for band, (low, high) in {**BANDS, "all tokens": (0, 100)}.items():
        start, stop = math.floor(low * total / 100), math.ceil(high * total / 100)
        # Of each group of equals, the share of its ranks that lies in the band.
        inside = np.clip(np.minimum(ends, stop) - np.maximum(ends - sizes, start), 0, None) / sizes
        means = inside[group] @ coverage / (stop - start)
        rows[band] = {"n": stop - start} | dict(zip(top_k, means, strict=True))
    table = pd.DataFrame.from_dict(rows, orient="index")
    table["tail entropy bound"] = tail_entropy_bound(1 - table[64])
    return table
