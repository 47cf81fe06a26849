"""Does a score add information on errors to its controls? A test of valid level, and the gain.

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

from lm_polygraph_asmi.analysis.clusters import (
    SEED,
    Interval,
    binary,
    bootstrap_values,
    check_rows,
    control_table,
    percentile_interval,
)
from lm_polygraph_asmi.analysis.comparison import BootstrapAUROC
from lm_polygraph_asmi.analysis.distinct import FOLDS, check_folds, cluster_folds
from lm_polygraph_asmi.analysis.prr import weighted_prr

PARTITIONS = 5
"""Partitions into folds whose predictions are averaged, so that no single one decides."""
PENALTY, SLIGHT = 1.0, 0.01
"""Ridge penalties on standardised features: for models of errors, and of the score's rank."""
NOTHING_LEFT = 0.02
"""A residual with less than this share of the score's spread is an error of the fit."""
LEVEL = 0.05
REFITS = 500
"""Resamples; all models are refitted in each."""


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


def adds_information(
    scores: ArrayLike,
    controls: ArrayLike,
    wrong: ArrayLike,
    clusters: Sequence[str],
    seed: int = SEED,
) -> AddedInformation:
    """Generalised covariance measure: are score and errors independent given the controls?

    The score's rank and the probability of an error are both predicted from smooth functions of the
    controls' ranks, out of fold; products of the residuals are summed by cluster. Skewed scores,
    outliers and a spread that grows with the controls do not change its level. It detects average
    dependence only, not a score that is higher for some errors and lower for as many others.
    Source: Shah and Peters (2020), The hardness of conditional independence testing.

    Args:
        scores: (n,), higher = more uncertain.
        controls: (n, c), such as MSP, single-pass entropy and answer length.
        wrong: (n,) correctness labels, 1 or True = wrong.
        clusters: (n,) key of each row; folds keep clusters whole.
        seed: of the partitions into folds.

    Raises:
        ValueError: right or wrong answers in fewer than five clusters, a constant score, controls
            that are not a table, unequal lengths, a value that is not finite, or labels other than
            0 and 1.

    Example:
        >>> wrong, length = [0, 1] * 50, [[n] for n in range(100)]
        >>> keys = [str(n) for n in range(100)]  # every answer is a cluster of its own
        >>> adds_information(wrong, length, wrong, keys).added  # a score that knows each error
        True
        >>> adds_information(range(100), length, wrong, keys).added  # a score that is its control
        False
    """
    score, table, errors = checked(scores, controls, wrong, clusters)
    check_folds(errors, clusters)
    features, rank = _smooth(table), _ranks(score)
    rows, rank_fit, p_error = np.arange(len(rank)), np.zeros(len(rank)), np.zeros(len(rank))
    keys, codes = np.unique(np.asarray(clusters, dtype=str), return_inverse=True)
    rng = np.random.default_rng(seed)
    for _ in range(PARTITIONS):
        folds = (rng.permutation(codes.max() + 1) % FOLDS)[codes]
        train = (folds != np.arange(FOLDS)[:, None]).astype(float)
        rank_fit += (_least_squares(features, rank, train) @ features.T)[folds, rows]
        p_error += expit(_logistic(features, errors, train) @ features.T)[folds, rows]
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

    Each setting has the same weight, whatever its size. Clusters with the same key (a passage used
    with several models) are one cluster. The test allows for the correlation of their sums, so the
    same answers twice count once. Clusters with different keys are taken as independent.

    Args:
        settings: a result of `adds_information` for each setting; no result over several settings.

    Raises:
        ValueError: no setting.

    Example:
        >>> wrong, length = [0, 1] * 50, [[n] for n in range(100)]
        >>> setting = adds_information(wrong, length, wrong, [str(n) for n in range(100)])
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


@dataclass(frozen=True)
class Gain:
    """Gain of a model of errors from a score, out of fold: with the score minus without.

    Attributes:
        log_loss: nats per answer; negative = better with the score.
        auroc, prr: positive = better with the score.
    """

    log_loss: Interval
    auroc: Interval
    prr: Interval


def stacked_gain(
    scores: ArrayLike,
    controls: ArrayLike,
    wrong: ArrayLike,
    clusters: Sequence[str],
    quality: ArrayLike | None = None,
    resamples: int = REFITS,
    seed: int = SEED,
) -> Gain:
    """Gain of a logistic model of errors on smooth functions of the controls if the score is added.

    Both are fitted out of fold and refitted in every resample of clusters, so that the intervals
    include the variation of the fits. A score that adds nothing makes the model slightly worse.

    Args:
        scores, controls, wrong, clusters: as in `adds_information`.
        quality: (n,) for PRR, higher = better; None: right or wrong.
        resamples: number of bootstrap resamples of clusters.
        seed: of the folds and the resamples.

    Raises:
        ValueError: as `adds_information`.

    Example:
        >>> wrong, length = [0, 1] * 50, [[n] for n in range(100)]
        >>> gain = stacked_gain(wrong, length, wrong, [str(n) for n in range(100)], resamples=20)
        >>> gain.log_loss.high < 0, gain.auroc.low > 0.3  # the score is each error
        (True, True)
    """
    score, table, errors = checked(scores, controls, wrong, clusters)
    qualities = 1 - errors if quality is None else np.asarray(quality, dtype=float)
    check_rows(clusters, quality=qualities)
    base = _smooth(table)
    full = np.column_stack([base, _standardised(_ranks(score)[:, None])])
    folds = cluster_folds(errors, clusters, seed)

    def differences(counts: np.ndarray) -> np.ndarray:
        """(b, 3) changes of log-loss, AUROC and PRR on samples (b, n)."""
        first, second = (_out_of_fold(x, errors, counts, folds) for x in (base, full))
        loss = [
            -(counts * np.where(errors > 0, np.log(p), np.log1p(-p))).sum(1) / counts.sum(1)
            for p in (first, second)
        ]
        ranking = []
        for *chances, sample in zip(first, second, counts[:, None], strict=True):
            area = [BootstrapAUROC(p, errors > 0)(sample)[0] for p in chances]
            prr = weighted_prr(chances, qualities, [sample])[0]
            ranking.append((area[1] - area[0], prr[1] - prr[0]))
        return np.column_stack([loss[1] - loss[0], np.array(ranking)])

    value = differences(np.ones((1, len(errors)), dtype=int))[0]
    drawn = bootstrap_values(differences, clusters, resamples, seed)
    total = len(set(clusters))
    columns = zip(value, drawn.T, strict=True)
    return Gain(*(percentile_interval(v, column, total) for v, column in columns))


def checked(
    scores: ArrayLike, controls: ArrayLike, wrong: ArrayLike, clusters: Sequence[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Score, controls and errors (0 or 1) as arrays of numbers.

    Raises:
        ValueError: a constant score, controls of another shape than (n, c), lengths that differ, or
            values that are not finite.
    """
    table = control_table(controls)
    check_rows(clusters, scores=scores, controls=table, wrong=wrong)
    score = np.asarray(scores, dtype=float)
    if np.ptp(score) == 0:
        raise ValueError("the score is the same for all answers: there is nothing to test")
    return score, table, binary(wrong=wrong).astype(float)


def _ranks(values: np.ndarray) -> np.ndarray:
    """Mid-ranks in (0, 1), ties alike."""
    return (rankdata(values) - 0.5) / len(values)


def _standardised(features: np.ndarray) -> np.ndarray:
    spread = features.std(0)
    return (features - features.mean(0))[:, spread > 1e-12] / spread[spread > 1e-12]


def _smooth(controls: np.ndarray) -> np.ndarray:
    """(n, m) a constant, cubic splines of every control's ranks, and products of two of them."""
    ranks = np.column_stack([_ranks(column) for column in controls.T])
    knots = np.repeat(np.linspace(0, 1, 3)[:, None], ranks.shape[1], axis=1)
    splines = SplineTransformer(degree=3, knots=knots, include_bias=False).fit_transform(ranks)
    first, second = np.triu_indices(ranks.shape[1], 1)
    products = (ranks[:, first] - 0.5) * (ranks[:, second] - 0.5)
    features = _standardised(np.column_stack([splines, products]))
    return np.column_stack([np.ones(len(features)), features])


def _penalties(features: np.ndarray, weight: float) -> np.ndarray:
    """(m, m); the constant is free."""
    return np.diag([0.0] + [weight] * (features.shape[1] - 1))


def _least_squares(features: np.ndarray, target: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """(b, m) coefficients of b slightly penalised regressions, one a row of weights (b, n)."""
    m = features.shape[1]
    squares = (features[:, :, None] * features[:, None, :]).reshape(len(features), -1)
    gram = (weights @ squares).reshape(-1, m, m) + _penalties(features, SLIGHT)
    return np.linalg.solve(gram, ((weights * target) @ features)[..., None])[..., 0]


def _logistic(features: np.ndarray, wrong: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """(b, m) coefficients of b penalised logistic regressions, one a row of weights (b, n).

    scikit-learn fits them one at a time, which is too slow for every resample.
    """
    m = features.shape[1]
    squares = (features[:, :, None] * features[:, None, :]).reshape(len(features), -1)
    penalties = _penalties(features, PENALTY)
    error_rate = (weights @ wrong + 0.5) / (weights.sum(1) + 1)
    coefficients = np.zeros((len(weights), m))
    coefficients[:, 0] = logit(error_rate)
    for _ in range(50):
        p_error = expit(np.clip(coefficients @ features.T, -30, 30))
        gradient = (weights * (wrong - p_error)) @ features - coefficients @ penalties
        curvature = ((weights * p_error * (1 - p_error)) @ squares).reshape(-1, m, m) + penalties
        curvature[:, 0, 0] += 1e-9  # a training set without errors, or without right answers
        step = np.linalg.solve(curvature, gradient[..., None])[..., 0]
        # Newton's step can overshoot if errors are well separated.
        furthest = np.abs(step @ features.T).max(1, keepdims=True)
        step *= np.minimum(1, 5 / np.maximum(furthest, 1e-12))
        coefficients += step
        if furthest.max() < 1e-6 or np.abs(coefficients[:, 0]).max() > 30:
            break
    return coefficients


def _out_of_fold(
    features: np.ndarray, wrong: np.ndarray, counts: np.ndarray, folds: np.ndarray
) -> np.ndarray:
    """(b, n) probability of an error, fitted on the other folds of each sample (b, n)."""
    p_error = np.empty(counts.shape)
    for fold in range(FOLDS):
        test = folds == fold
        fitted = _logistic(features, wrong, counts * ~test)
        p_error[:, test] = expit(np.clip(fitted @ features[test].T, -30, 30))
    return p_error
