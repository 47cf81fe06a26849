"""How much a score depends on the random masks it was computed with."""

from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import spearmanr

from lm_polygraph_asmi.analysis.prr import normalised_prr


class Stability(NamedTuple):
    """PRR over redraws of the masks, and how alike the redraws rank the answers.

    Attributes:
        mean, sd, low, high: of the PRR.
        rank_correlation: mean Spearman correlation over pairs of redraws.
    """

    mean: float
    sd: float
    low: float
    high: float
    rank_correlation: float


def rank_correlation(first: ArrayLike, second: ArrayLike) -> float:
    """Spearman correlation of two scores of the same answers; NaN where one is constant."""
    return float(spearmanr(first, second).statistic)


def rank_correlations(scores: ArrayLike) -> np.ndarray:
    """Spearman correlation of every pair of rows of (R, n)."""
    return np.array([rank_correlation(*pair) for pair in combinations(np.asarray(scores), 2)])


def redraw_stability(scores: ArrayLike, quality: ArrayLike) -> Stability:
    """Stability of R redraws (R, n) of one score; source: the paper's stability table.

    Raises:
        ValueError: fewer than two redraws.
    """
    scores = np.asarray(scores, dtype=float)
    if scores.ndim != 2 or len(scores) < 2:
        raise ValueError(
            f"scores must have shape (R >= 2, n), a row per redraw, got {scores.shape}"
        )
    prr = np.array([normalised_prr(row, quality) for row in scores])
    return Stability(
        float(prr.mean()),
        float(prr.std(ddof=1)),
        float(prr.min()),
        float(prr.max()),
        float(rank_correlations(scores).mean()),
    )
