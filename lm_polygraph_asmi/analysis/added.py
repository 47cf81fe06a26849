"""Does a score add information on errors to its controls? A test of valid level.

The paper's linear residual (`analysis.distinct`) also "detects" noisy and skewed functions of the
controls; this test does not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy.special import expit, logit
from scipy.stats import rankdata
from scipy.stats import t as student
from sklearn.preprocessing import SplineTransformer

from lm_polygraph_asmi.analysis.clusters import control_table
from lm_polygraph_asmi.analysis.labelled import FOLDS, Labelled

PARTITIONS = 5
"""Into folds; their predictions are averaged, so that no single one decides."""
PENALTY, SLIGHT = 1.0, 0.01
"""Ridge penalties on standardised features: for models of errors, and of the score's rank."""
NOTHING_LEFT = 0.02
"""A residual with less than this share of the score's spread is an error of the fit."""
LEVEL = 0.05


@dataclass(frozen=True)
class AddedInformation:
    """Dependence of a score and errors given the controls.

    Attributes:
        statistic: studentised sum over clusters of residual products; about standard normal if the
            score adds nothing to the controls.
        p_value: two-sided.
        direction: +1 if wrong answers have higher scores than the controls explain, -1 if lower
            ones, 0 if nothing is left of the score.
        n, clusters, errors: rows, clusters, wrong answers.
        sums: residual products summed over each cluster, by its key.
    """

    statistic: float
    p_value: float
    direction: int
    n: int
    clusters: int
    errors: int
    sums: Mapping[str, float] = field(repr=False)

    @property
    def added(self) -> bool:
        """Whether the test rejects at 5 %, in either direction."""
        return self.p_value < LEVEL


def adds_information(scores: ArrayLike, controls: ArrayLike, answers: Labelled) -> AddedInformation:
    """Generalised covariance measure: are score and errors independent given the controls?

    The score's rank and the probability of an error are both predicted from smooth functions of the
    controls' ranks, out of fold; products of the residuals are summed by cluster. Skewed scores,
    outliers and a spread that grows with the controls do not change its level. It detects average
    dependence only, not a score that is higher for some errors and lower for as many others.
    Source: Shah and Peters (2020), The hardness of conditional independence testing.

    Args:
        scores: (n,), not constant.
        controls: (n, c), such as MSP, single-pass entropy and answer length.

    Raises:
        ValueError: also right or wrong answers in fewer than five clusters.

    Example:
        >>> wrong, length = [0, 1] * 50, [[n] for n in range(100)]
        >>> answers = Labelled(wrong, range(100))  # every answer is a cluster of its own
        >>> adds_information(wrong, length, answers).added  # a score that knows each error
        True
        >>> adds_information(range(100), length, answers).added  # a score that is its control
        False
    """
    score, table = answers.columns(scores=scores, controls=control_table(controls))
    if np.ptp(score) == 0:
        raise ValueError("the score is the same for all answers: there is nothing to test")
    answers.check_folds()
    errors, features, rank = answers.wrong.astype(float), smooth(table), mid_ranks(score)
    rows, rank_fit, p_error = np.arange(len(rank)), np.zeros(len(rank)), np.zeros(len(rank))
    keys, codes = np.unique(np.asarray(answers.clusters, dtype=str)), answers.codes
    rng = np.random.default_rng(answers.seed)
    for _ in range(PARTITIONS):
        folds = (rng.permutation(answers.n_clusters) % FOLDS)[codes]
        train = (folds != np.arange(FOLDS)[:, None]).astype(float)
        rank_fit += (_least_squares(features, rank, train) @ features.T)[folds, rows]
        p_error += expit(logistic(features, errors, train) @ features.T)[folds, rows]
    residual = rank - rank_fit / PARTITIONS
    # The residual of a function of the controls depends on them, and could covary too.
    if residual.std() < NOTHING_LEFT * rank.std():
        residual[:] = 0.0
    sums = np.bincount(codes, residual * (errors - p_error / PARTITIONS))
    spread = sums.std(ddof=1)
    statistic = float(np.sqrt(len(sums)) * sums.mean() / spread) if spread > 0 else 0.0
    by_key = dict(zip(keys.tolist(), sums.tolist(), strict=True))
    return _tested(statistic, by_key, len(rank), int(errors.sum()))


def _tested(statistic: float, sums: dict[str, float], n: int, errors: int) -> AddedInformation:
    # Student's t: the spread is estimated from one sum per cluster.
    p_value = float(2 * student.sf(abs(statistic), len(sums) - 1))
    direction = int(np.sign(statistic))
    return AddedInformation(statistic, p_value, direction, n, len(sums), errors, sums)


def adds_over_settings(settings: Sequence[AddedInformation]) -> AddedInformation:
    """The same test over several settings: Stouffer's sum of their statistics.

    Each setting, one result of `adds_information`, has the same weight, whatever its size. Clusters
    with the same key (a passage used with several models) are one cluster. The test allows for the
    correlation of their sums, so the same answers twice count once. Clusters with different keys
    are taken as independent. ValueError without a setting.

    Example:
        >>> wrong, length = [0, 1] * 50, [[n] for n in range(100)]
        >>> setting = adds_information(wrong, length, Labelled(wrong, range(100)))
        >>> adds_over_settings([setting, setting]).statistic == setting.statistic
        True
    """
    if not settings:
        raise ValueError("a test over settings needs at least one setting")
    # Settings x clusters, NaN if a setting lacks a cluster.
    sums = pd.DataFrame([setting.sums for setting in settings])
    centred = sums.sub(sums.mean(axis=1), axis=0)
    norm = np.sqrt(centred.pow(2).sum(axis=1))
    # One setting's spread is 1, or 0 if nothing is left of its score.
    spread = float(np.linalg.norm(centred.div(norm.where(norm > 0, 1.0), axis=0).sum()))
    statistic = sum(setting.statistic for setting in settings) / spread if spread > 0 else 0.0
    totals = {str(key): float(total) for key, total in sums.sum().items()}
    rows, errors = (sum(getattr(setting, name) for setting in settings) for name in ("n", "errors"))
    return _tested(float(statistic), totals, rows, errors)


def mid_ranks(values: np.ndarray) -> np.ndarray:
    """Mid-ranks in (0, 1), ties alike."""
    return (rankdata(values) - 0.5) / len(values)


def smooth(controls: np.ndarray) -> np.ndarray:
    """(n, m) a constant, cubic splines of every control's ranks, and products of two of them."""
    ranks = np.column_stack([mid_ranks(column) for column in controls.T])
    knots = np.repeat(np.linspace(0, 1, 3)[:, None], ranks.shape[1], axis=1)
    splines = SplineTransformer(degree=3, knots=knots, include_bias=False).fit_transform(ranks)
    first, second = np.triu_indices(ranks.shape[1], 1)
    products = (ranks[:, first] - 0.5) * (ranks[:, second] - 0.5)
    features = np.column_stack([splines, products])
    spread = features.std(0)
    known = spread > 1e-12
    standardised = (features - features.mean(0))[:, known] / spread[known]
    return np.column_stack([np.ones(len(features)), standardised])


def _products(features: np.ndarray, weight: float) -> tuple[np.ndarray, np.ndarray]:
    """(n, m²) products of two features, and (m, m) ridge penalties; the constant is free."""
    n, m = features.shape
    products = (features[:, :, None] * features[:, None, :]).reshape(n, -1)
    return products, np.diag([0.0] + [weight] * (m - 1))


def _least_squares(features: np.ndarray, target: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """(b, m) coefficients of b slightly penalised regressions, one a row of weights (b, n)."""
    squares, ridge = _products(features, SLIGHT)
    gram = (weights @ squares).reshape(-1, *ridge.shape) + ridge
    return np.linalg.solve(gram, ((weights * target) @ features)[..., None])[..., 0]


def logistic(features: np.ndarray, wrong: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """(b, m) coefficients of b penalised logistic regressions, one a row of weights (b, n).

    scikit-learn fits them one at a time, which is too slow for every resample.
    """
    squares, ridge = _products(features, PENALTY)
    error_rate = (weights @ wrong + 0.5) / (weights.sum(1) + 1)
    coefficients = np.zeros((len(weights), len(ridge)))
    coefficients[:, 0] = logit(error_rate)
    for _ in range(50):
        p_error = expit(np.clip(coefficients @ features.T, -30, 30))
        gradient = (weights * (wrong - p_error)) @ features - coefficients @ ridge
        curvature = (weights * p_error * (1 - p_error)) @ squares
        curvature = curvature.reshape(-1, *ridge.shape) + ridge
        curvature[:, 0, 0] += 1e-9  # a training set without errors, or without right answers
        step = np.linalg.solve(curvature, gradient[..., None])[..., 0]
        # Newton's step can overshoot if errors are well separated.
        furthest = np.abs(step @ features.T).max(1, keepdims=True)
        step *= np.minimum(1, 5 / np.maximum(furthest, 1e-12))
        coefficients += step
        if furthest.max() < 1e-6 or np.abs(coefficients[:, 0]).max() > 30:
            break
    return coefficients
