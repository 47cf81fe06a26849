"""Tokens and heads of the causal probe, chosen only from a run's masks.

Source: paragraph "Causal probe" of the paper's appendix, and controls that it lacks.
"""

import numpy as np
from numpy.typing import ArrayLike

COUNT = 200
"""Tokens of highest and of lowest MI, as in the paper."""
NUMBERS = (1, 2, 4, 8, 16)
"""Numbers of heads ablated together, as in the paper."""
CALIPER = 0.1
"""Largest difference in entropy of a pair of tokens, in nats."""
CONFIDENT = 0.9
"""Probability from which a token counts as confident."""


def extremes(
    mi: ArrayLike, count: int = COUNT, among: ArrayLike | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the tokens of highest and of lowest MI, most extreme first; ties in given order.

    Args:
        mi: (n,), NaN where undefined; these are never chosen.
        count: of each; with fewer than 2 x count tokens, half of them.
        among: (n,) whether a token may be chosen; None: all.
    """
    values = np.asarray(mi, dtype=float)
    allowed = np.isfinite(values) & (True if among is None else np.asarray(among, dtype=bool))
    known = np.flatnonzero(allowed)
    count = min(count, len(known) // 2)
    high = known[np.argsort(-values[known], kind="stable")][:count]
    rest = np.setdiff1d(known, high)
    return high, rest[np.argsort(values[rest], kind="stable")][:count]


def matched_pairs(
    mi: ArrayLike, entropy: ArrayLike, count: int = COUNT, caliper: float = CALIPER
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of a token of high and one of low MI with similar entropies.

    From the highest MI down, each token of the upper half is matched with the unmatched token of
    the lower half that is nearest in entropy, within the caliper; all in nats. Indices of at most
    `count` high ones, and of their partners.
    """
    values, entropies = np.asarray(mi, dtype=float), np.asarray(entropy, dtype=float)
    high, low = extremes(values, len(values), np.isfinite(entropies))
    unmatched = np.ones(len(low), dtype=bool)
    pairs: list[tuple[int, int]] = []
    for token in high:
        distance = np.where(unmatched, np.abs(entropies[low] - entropies[token]), np.inf)
        if len(pairs) == count or not len(distance):
            break
        nearest = int(distance.argmin())
        if distance[nearest] <= caliper:
            unmatched[nearest] = False
            pairs.append((int(token), int(low[nearest])))
    places = np.array(pairs, dtype=int).reshape(-1, 2)
    return places[:, 0], places[:, 1]


def critical_first(criticality: ArrayLike) -> np.ndarray:
    """(..., H) heads by decreasing criticality, of any sign; ties by index, unknown ones last."""
    return np.argsort(-np.asarray(criticality, dtype=float), axis=-1, kind="stable")


def critical_last(criticality: ArrayLike) -> np.ndarray:
    """(..., H) heads by increasing criticality; ties by index, unknown ones last."""
    return np.argsort(np.asarray(criticality, dtype=float), axis=-1, kind="stable")


def ablations(order: ArrayLike, numbers: ArrayLike) -> np.ndarray:
    """(..., K, H) masks, 1 = kept, without the first k heads of an order (..., H); K numbers k."""
    rank = np.argsort(np.asarray(order), axis=-1)  # of each head
    return (rank[..., None, :] >= np.asarray(numbers)[:, None]).astype(float)
