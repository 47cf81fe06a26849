"""Tokens and heads of the causal probe, chosen only from a run's masks.

Source: paragraph "Causal probe" of the paper's appendix.
"""

import numpy as np
from numpy.typing import ArrayLike

COUNT = 200
"""Tokens of highest and of lowest MI, as in the paper."""
NUMBERS = (1, 2, 4, 8, 16)
"""Numbers of heads ablated together, as in the paper."""


def extremes(mi: ArrayLike, count: int = COUNT) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the tokens of highest and of lowest MI, most extreme first; ties in given order.

    Args:
        mi: (n,), NaN where undefined; these are never chosen.
        count: of each; with fewer than 2 x count tokens, half of them.
    """
    values = np.asarray(mi, dtype=float)
    known = np.flatnonzero(np.isfinite(values))
    count = min(count, len(known) // 2)
    high = known[np.argsort(-values[known], kind="stable")][:count]
    rest = np.setdiff1d(known, high)
    return high, rest[np.argsort(values[rest], kind="stable")][:count]


def critical_first(criticality: ArrayLike) -> np.ndarray:
    """(..., H) heads by decreasing criticality, of any sign; ties by index, unknown ones last."""
    return np.argsort(-np.asarray(criticality, dtype=float), axis=-1, kind="stable")


def ablations(order: ArrayLike, numbers: ArrayLike) -> np.ndarray:
    """(..., K, H) masks, 1 = kept, without the first k heads of an order (..., H); K numbers k."""
    rank = np.argsort(np.asarray(order), axis=-1)  # of each head
    return (rank[..., None, :] >= np.asarray(numbers)[:, None]).astype(float)
