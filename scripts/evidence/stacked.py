"""What a score adds to a model of errors: nested logistic models, out of fold."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit

from lm_polygraph_asmi.analysis import Interval, Labelled
from lm_polygraph_asmi.analysis.added import checked, logistic, mid_ranks, smooth, standardised
from lm_polygraph_asmi.analysis.clusters import (
    SEED,
    bootstrap_values,
    percentile_interval,
)
from lm_polygraph_asmi.analysis.comparison import BootstrapAUROC
from lm_polygraph_asmi.analysis.labelled import FOLDS
from lm_polygraph_asmi.analysis.prr import weighted_prr

REFITS = 500
"""Resamples; all models are refitted in each."""


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
    answers = Labelled(wrong, clusters, quality, resamples, seed)
    score, table, errors = checked(scores, controls, answers)
    base = smooth(table)
    full = np.column_stack([base, standardised(mid_ranks(score)[:, None])])
    folds = answers.folds()

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
            prr = weighted_prr(chances, answers.quality, [sample])[0]
            ranking.append((area[1] - area[0], prr[1] - prr[0]))
        return np.column_stack([loss[1] - loss[0], np.array(ranking)])

    value = differences(np.ones((1, len(errors)), dtype=int))[0]
    drawn = bootstrap_values(differences, answers)
    total = answers.n_clusters
    columns = zip(value, drawn.T, strict=True)
    return Gain(*(percentile_interval(v, column, total) for v, column in columns))


def _out_of_fold(
    features: np.ndarray, wrong: np.ndarray, counts: np.ndarray, folds: np.ndarray
) -> np.ndarray:
    """(b, n) probability of an error, fitted on the other folds of each sample (b, n)."""
    p_error = np.empty(counts.shape)
    for fold in range(FOLDS):
        test = folds == fold
        fitted = logistic(features, wrong, counts * ~test)
        p_error[:, test] = expit(np.clip(fitted @ features[test].T, -30, 30))
    return p_error
