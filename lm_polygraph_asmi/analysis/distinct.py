"""Does a score add information on errors to output confidence? Tested out of fold.

Source: appendix "The Distinct-Signal Analysis" of the paper.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import chi2
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import PredefinedSplit, StratifiedGroupKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from lm_polygraph_asmi.analysis.clusters import (
    RESAMPLES,
    SEED,
    Interval,
    binary,
    check_rows,
    control_table,
)
from lm_polygraph_asmi.analysis.comparison import auroc_difference, auroc_interval

FOLDS = 5


@dataclass(frozen=True)
class DistinctSignal:
    """What a signal adds to its controls.

    Attributes:
        residual_auroc: error detection by the residual of a linear fit of the signal on the
            controls; 0.5 = chance; below 0.5, the residual is higher for right answers.
        incremental_auroc: AUROC with the signal minus AUROC without.
        likelihood_ratio: twice the gain in log-likelihood, in nats, over all rows.
        p_value: of the ratio (chi squared, one degree of freedom). Nominal, as in the paper: it
            takes rows as independent, so with clusters it is too small.
        n, clusters, errors: rows, clusters, wrong answers.
    """

    residual_auroc: Interval
    incremental_auroc: Interval
    likelihood_ratio: float
    p_value: float
    n: int
    clusters: int
    errors: int

    @property
    def detected(self) -> bool:
        """The paper's criterion: the residual interval excludes 0.5."""
        return self.residual_auroc.excludes(0.5)


def check_folds(wrong: ArrayLike, clusters: Sequence[str]) -> None:
    """Check that every fold can have right and wrong answers.

    Raises:
        ValueError: right or wrong answers are in too few clusters.
    """
    wrong = np.asarray(wrong, dtype=bool)
    fewest = min(
        len({c for c, is_wrong in zip(clusters, wrong, strict=True) if is_wrong == kind})
        for kind in (False, True)
    )
    if fewest < FOLDS:
        raise ValueError(
            f"{FOLDS} folds need right and wrong answers in at least {FOLDS} clusters each, got "
            f"{fewest}: use more rows"
        )


def cluster_folds(wrong: ArrayLike, clusters: Sequence[str], seed: int = SEED) -> np.ndarray:
    """(n,) fold of each row, 0 to 4; a cluster is in one fold, errors are spread evenly.

    Raises:
        ValueError: too few clusters, or too few with right or wrong answers, for the folds.
    """
    wrong = np.asarray(wrong, dtype=bool)
    check_folds(wrong, clusters)
    folds = np.empty(len(wrong), dtype=int)
    split = StratifiedGroupKFold(FOLDS, shuffle=True, random_state=seed)
    for number, (_, test) in enumerate(split.split(wrong, wrong, clusters)):
        folds[test] = number
    return folds


def _selector() -> LogisticRegression:
    return make_pipeline(StandardScaler(), LogisticRegression(C=np.inf, max_iter=1000))


def error_probability(features: ArrayLike, wrong: ArrayLike, folds: np.ndarray) -> np.ndarray:
    """(n,) probability of error by a logistic model that never saw the row's fold.

    Args:
        features: (n, m).
        wrong: (n,).
        folds: (n,), from `cluster_folds`.
    """
    features, wrong = np.asarray(features, dtype=float), np.asarray(wrong, dtype=bool)
    split = PredefinedSplit(folds)
    return cross_val_predict(_selector(), features, wrong, cv=split, method="predict_proba")[:, 1]


def residual(signal: ArrayLike, controls: ArrayLike, folds: np.ndarray) -> np.ndarray:
    """(n,) residual of a linear model of the signal on the controls, fitted on the other folds."""
    signal, controls = np.asarray(signal, dtype=float), np.asarray(controls, dtype=float)
    predicted = cross_val_predict(LinearRegression(), controls, signal, cv=PredefinedSplit(folds))
    # For a linear function of the controls, rounding errors would be left and rank answers.
    return np.where(np.isclose(signal, predicted, rtol=1e-9, atol=0), 0.0, signal - predicted)


def likelihood_ratio_test(
    controls: ArrayLike, signal: ArrayLike, wrong: ArrayLike
) -> tuple[float, float]:
    """Twice the gain in log-likelihood of a logistic model by the signal, and its p-value."""
    controls = np.asarray(controls, dtype=float)
    wrong = np.asarray(wrong, dtype=bool)

    def log_likelihood(features: np.ndarray) -> float:
        fitted = _selector().fit(features, wrong).predict_proba(features)
        return -log_loss(wrong, fitted, normalize=False)

    full = log_likelihood(np.column_stack([controls, np.asarray(signal, dtype=float)]))
    ratio = max(0.0, 2 * (full - log_likelihood(controls)))
    return ratio, float(chi2.sf(ratio, 1))


def distinct_signal(
    signal: ArrayLike,
    controls: ArrayLike,
    wrong: ArrayLike,
    clusters: Sequence[str],
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> DistinctSignal:
    """Residual and incremental error detection of a signal over its controls.

    Out of fold, in 5 folds that keep clusters whole. Intervals resample clusters and hold the
    fitted models fixed. The residual is that of a linear model, so a curved function of the
    controls can be detected too, although it adds nothing. Source: table "app-distinct" of the
    paper.

    Args:
        signal: (n,), higher = more uncertain.
        controls: (n, m), such as MSP and single-pass entropy.
        wrong: (n,) correctness labels, 1 or True = wrong.
        clusters: (n,) key of each row; answers on one passage share a key.
        resamples: number of bootstrap resamples of clusters.
        seed: of the folds.

    Raises:
        ValueError: right or wrong answers in fewer than five clusters, a constant signal, controls
            that are not a table, unequal lengths, a value that is not finite, or labels other than
            0 and 1.

    Example:
        >>> signal, wrong = [0.1, 0.3, 0.2, 0.9] * 25, [0, 0, 1, 1] * 25
        >>> control, keys = [[n % 7] for n in range(100)], [str(n) for n in range(100)]
        >>> distinct = distinct_signal(signal, control, wrong, keys, resamples=100)
        >>> distinct.detected, distinct.incremental_auroc.low > 0  # the control has no information
        (True, True)
    """
    check_rows(clusters, signal=signal, controls=controls, wrong=wrong)
    signal, controls = np.asarray(signal, dtype=float), control_table(controls)
    wrong = binary(wrong=wrong)
    if np.ptp(signal) == 0:
        raise ValueError("the signal is the same for all answers: there is nothing to test")
    folds = cluster_folds(wrong, clusters, seed)
    base = error_probability(controls, wrong, folds)
    full = error_probability(np.column_stack([controls, signal]), wrong, folds)
    ratio, p_value = likelihood_ratio_test(controls, signal, wrong)
    residuals = residual(signal, controls, folds)
    return DistinctSignal(
        auroc_interval(residuals, wrong, clusters, resamples),
        auroc_difference(full, base, wrong, clusters, resamples),
        ratio,
        p_value,
        len(wrong),
        len(set(clusters)),
        int(wrong.sum()),
    )


AGGREGATIONS: dict[str, Callable[[np.ndarray], float]] = {
    "mean": lambda tokens: float(np.mean(tokens)),
    "top-quartile mean": lambda tokens: float(
        np.mean(np.sort(tokens)[-math.ceil(len(tokens) / 4) :])
    ),
    "max": lambda tokens: float(np.max(tokens)),
}
"""Aggregations of token scores (T,) to an answer's score; the paper uses the mean."""
