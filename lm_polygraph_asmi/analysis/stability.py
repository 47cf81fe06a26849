"""Seed stability: how much a score depends on its random masks."""

from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import spearmanr

from lm_polygraph_asmi.analysis.clusters import ordered
from lm_polygraph_asmi.analysis.prr import normalised_prr


class Stability(NamedTuple):
    """PRR over seeds of the masks, and how similarly the seeds rank the answers.

    Attributes:
        mean, sd, low, high: mean, standard deviation, minimum and maximum of the PRR.
        rank_correlation: mean Spearman correlation over pairs of seeds.
    """

    mean: float
    sd: float
    low: float
    high: float
    rank_correlation: float


def rank_correlation(first: ArrayLike, second: ArrayLike) -> float:
    """Spearman correlation of two scores of the same answers; NaN if one is constant.

    A score may be infinite, but not NaN.

    Example:
        >>> round(rank_correlation([1, 2, 3], [0.1, 0.2, 9.0]), 2)  # only the order counts
        1.0
    """
    a, b = ordered(first=first), ordered(second=second)
    if a.shape != b.shape or not a.size:
        raise ValueError(
            f"expected two scores of each of at least one answer, got {a.shape} and {b.shape}"
        )
    if (a == a[0]).all() or (b == b[0]).all():
        return float("nan")
    return float(spearmanr(a, b).statistic)


def seed_stability(scores: ArrayLike, quality: ArrayLike) -> Stability:
    """PRR of one score over seeds of the masks, and how similarly the seeds rank the answers.

    `scores` (R, n) have one row for each of at least two seeds. They may be infinite, but not NaN.
    PRR is NaN if all answers are equally good. The rank correlation is NaN if a seed's scores are
    constant. Source: table "stability" of the paper.

    Example:
        >>> stability = seed_stability([[0.1, 0.2, 0.9], [0.9, 0.2, 0.1]], quality=[1.0, 1.0, 0.0])
        >>> stability.low < 0 < stability.high, round(stability.rank_correlation, 2)  # reversed
        (True, -1.0)
    """
    scores = ordered(scores=scores)
    if scores.ndim != 2 or len(scores) < 2:
        raise ValueError(f"scores must have shape (R >= 2, n), a row per seed, got {scores.shape}")
    prr = np.array([normalised_prr(row, quality) for row in scores])
    pairs = [rank_correlation(*pair) for pair in combinations(scores, 2)]
    return Stability(
        float(prr.mean()),
        float(prr.std(ddof=1)),
        float(prr.min()),
        float(prr.max()),
        float(np.mean(pairs)),
    )
