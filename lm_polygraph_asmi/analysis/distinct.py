"""Does a score tell more about errors than output confidence does? Tested out of fold.

Source: appendix "The Distinct-Signal Analysis" of the paper.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from warnings import catch_warnings, simplefilter

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike
from scipy.special import expit
from scipy.stats import chi2
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.model_selection import PredefinedSplit, cross_val_predict

from lm_polygraph_asmi.analysis.clusters import Interval, control_table
from lm_polygraph_asmi.analysis.comparison import auroc_difference, auroc_interval
from lm_polygraph_asmi.analysis.labelled import Labelled

# A direction with less spread than this share of the largest spread is only rounding error.
DEPENDENT = 1e-9


@dataclass(frozen=True)
class DistinctSignal:
    """What a signal adds to its controls.

    Attributes:
        residual_auroc: error detection by the residual of a linear fit of the signal on the
            controls. 0.5 = chance. Below 0.5, the residual is higher for right answers.
        incremental_auroc: AUROC with the signal minus AUROC without it.
        likelihood_ratio: twice the gain in log-likelihood, in nats, over all rows.
        p_value: p-value of the ratio (chi squared, one degree of freedom). It is nominal, as in the
            paper: it assumes independent rows, so it is too small if there are clusters.
        errors: number of wrong answers.
    """

    residual_auroc: Interval
    incremental_auroc: Interval
    likelihood_ratio: float
    p_value: float
    errors: int

    @property
    def detected(self) -> bool:
        """The paper's criterion: the residual interval excludes 0.5."""
        return self.residual_auroc.excludes(0.5)


def _fitted(
    features: Float[np.ndarray, "n m"],
    wrong: Bool[np.ndarray, " n"],
    rows: Float[np.ndarray, "rows m"],
) -> Float[np.ndarray, " rows"]:
    """(rows,) log-odds of an error, by maximum likelihood on features, without a penalty.

    The fit uses Newton's method on whitened columns. MI is a small difference of two entropies. If
    both are controls, a direction with 1e-4 of the others' spread may matter, which a gradient
    method would not fit.
    """
    mean, scale = features.mean(0), features.std(0)
    varies = scale > DEPENDENT * np.abs(mean)
    centred = [(table - mean)[:, varies] / scale[varies] for table in (features, rows)]
    _, spread, axes = np.linalg.svd(centred[0], full_matrices=False)
    free = spread > DEPENDENT * spread.max(initial=0.0)
    turn = axes[free].T * (len(features) ** 0.5 / spread[free])
    known, asked = (np.column_stack([np.ones(len(table)), table @ turn]) for table in centred)
    model = LogisticRegression(C=np.inf, solver="newton-cholesky", tol=1e-8, fit_intercept=False)
    with catch_warnings():
        # It warns that lbfgs ends the fit, if answers are separable or zero is the exact solution.
        simplefilter("ignore")
        return model.fit(known, wrong).decision_function(asked)


def error_probability(
    features: Float[np.ndarray, "n m"], wrong: Bool[np.ndarray, " n"], folds: Int[np.ndarray, " n"]
) -> Float[np.ndarray, " n"]:
    """(n,) probability of an error, by a logistic model fitted on the other folds."""
    odds = np.empty(len(wrong))
    for fold in np.unique(folds):
        test = folds == fold
        odds[test] = _fitted(features[~test], wrong[~test], features[test])
    return expit(odds)


def residual(
    signal: Float[np.ndarray, " n"],
    controls: Float[np.ndarray, "n m"],
    folds: Int[np.ndarray, " n"],
) -> Float[np.ndarray, " n"]:
    """(n,) residual of a linear model of the signal on the controls, fitted on the other folds."""
    predicted = cross_val_predict(LinearRegression(), controls, signal, cv=PredefinedSplit(folds))
    # If the signal is a linear function of the controls, rounding errors would rank the answers.
    return np.where(np.isclose(signal, predicted, rtol=DEPENDENT, atol=0), 0.0, signal - predicted)


def _loss(features: Float[np.ndarray, "n m"], wrong: Bool[np.ndarray, " n"]) -> float:
    """Negative log-likelihood, in nats, of a logistic model that is fitted on all rows."""
    return np.logaddexp(0.0, np.where(wrong, -1, 1) * _fitted(features, wrong, features)).sum()


def likelihood_ratio_test(
    controls: Float[np.ndarray, "n m"], full: Float[np.ndarray, "n k"], answers: Labelled
) -> tuple[float, float]:
    """Twice the log-likelihood that a logistic model gains by the signal, and its p-value.

    `controls` (n, m) are without the signal, `full` (n, m + 1) with it.
    """
    less, more = (answers.once(_loss, table, answers.wrong) for table in (controls, full))
    ratio = max(0.0, 2 * float(less - more))
    return ratio, float(chi2.sf(ratio, 1))


def residual_auroc(signal: ArrayLike, controls: ArrayLike, answers: Labelled) -> Interval:
    """AUROC of error detection by the residual of a linear model of the signal on the controls.

    Arguments and errors are those of `distinct_signal`, whose result contains this.
    """
    values, table = answers.columns(signal=signal, controls=control_table(controls))
    if np.ptp(values) == 0:
        raise ValueError("the signal is the same for all answers: there is nothing to test")
    return auroc_interval(answers.once(residual, values, table, answers.folds()), answers)


def distinct_signal(signal: ArrayLike, controls: ArrayLike, answers: Labelled) -> DistinctSignal:
    """Residual and incremental error detection of a signal over its controls.

    Models are fitted out of fold, in 5 folds that keep clusters whole; only those of the likelihood
    ratio are fitted on all rows. Intervals resample clusters, with the fitted models held fixed.
    Since the model for the residual is linear, a curved function of the controls can be detected,
    too, although it adds nothing. Source: table "app-distinct" of the paper.

    Args:
        signal: (n,), not constant.
        controls: (n, m), such as MSP and single-pass entropy.

    Raises:
        ValueError: also if fewer than five clusters have a right answer, or a wrong one.

    Example:
        >>> signal, wrong = [0.1, 0.3, 0.2, 0.9] * 25, [0, 0, 1, 1] * 25
        >>> control = [[n % 7] for n in range(100)]
        >>> distinct = distinct_signal(signal, control, Labelled(wrong, range(100), resamples=100))
        >>> distinct.detected, distinct.incremental_auroc.low > 0  # the control has no information
        (True, True)
    """
    detection = residual_auroc(signal, controls, answers)
    values, table = answers.columns(signal=signal, controls=controls)
    wrong, folds, both = answers.wrong, answers.folds(), np.column_stack([table, values])
    base, full = (
        answers.once(error_probability, features, wrong, folds) for features in (table, both)
    )
    return DistinctSignal(
        detection,
        auroc_difference(full, base, answers),
        *likelihood_ratio_test(table, both, answers),
        int(wrong.sum()),
    )


AGGREGATIONS: dict[str, Callable[[np.ndarray], float]] = {
    "mean": lambda tokens: float(np.mean(tokens)),
    "top-quartile mean": lambda tokens: float(
        np.mean(np.sort(tokens)[-math.ceil(len(tokens) / 4) :])
    ),
    "max": lambda tokens: float(np.max(tokens)),
}
"""Functions that aggregate token scores (T,) to an answer's score. The paper uses the mean."""
