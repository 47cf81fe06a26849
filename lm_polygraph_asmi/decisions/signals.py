"""Which signal, if any, ranks errors on a user's answers.

`scores` are by name, (n,), higher = more uncertain, finite.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from lm_polygraph_asmi.analysis.clusters import (
    FEW,
    RESAMPLES,
    Interval,
    cluster_interval,
    control_table,
)
from lm_polygraph_asmi.analysis.comparison import augrc, auroc, auroc_interval, prr_intervals
from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.decisions.risk_control import fixing_rows


class RankedSignal(NamedTuple):
    """How well a signal ranks errors, with intervals over clusters.

    Attributes:
        prr: 1 = errors first, 0 = chance, negative = worse than chance.
        auroc: 0.5 = chance.
        augrc: lower = better.
    """

    prr: Interval
    auroc: Interval
    augrc: Interval

    @property
    def ranks(self) -> bool:
        """Whether the PRR interval is above 0."""
        return self.prr.low > 0

    @property
    def misleads(self) -> bool:
        """Whether the PRR interval is below 0: worse than chance."""
        return self.prr.high < 0


def rank_signals(scores: Mapping[str, ArrayLike], answers: Labelled) -> dict[str, RankedSignal]:
    """PRR, AUROC and AUGRC of signals on the same answers, by name.

    Example:
        >>> scores = {"good": [0.1, 0.9] * 10, "bad": [0.9, 0.1] * 10}
        >>> signals = rank_signals(scores, Labelled([0, 1] * 10, range(20), resamples=100))
        >>> signals["good"].ranks, signals["bad"].ranks, signals["bad"].auroc.value
        (True, False, 0.0)
    """
    columns = dict(zip(scores, answers.columns(**scores), strict=True))
    prr, _ = prr_intervals(columns, answers.resampled(answers.resamples or RESAMPLES))
    by_name = {}
    for name, score in columns.items():

        def area(rows: np.ndarray, score: np.ndarray = score) -> float:
            return augrc(score[rows], answers.wrong[rows])

        by_name[name] = RankedSignal(
            prr[name], auroc_interval(score, answers), cluster_interval(area, answers)
        )
    return by_name


def combination(features: ArrayLike, answers: Labelled) -> np.ndarray:
    """(n,) probability of an error by a logistic model of a few signals, out of fold.

    The features (n, m) have a column per signal; folds keep clusters whole. ValueError also for
    right or wrong answers in fewer than five clusters.

    Example:
        >>> features = [[n % 7, score] for n, score in enumerate([0.1, 0.3, 0.2, 0.9] * 25)]
        >>> chance = combination(features, Labelled([0, 0, 1, 1] * 25, range(100)))
        >>> bool(chance[3::4].min() > 0.5 > chance[0::4].max())  # of scores 0.9 and 0.1
        True
    """
    from lm_polygraph_asmi.analysis.distinct import error_probability

    (columns,) = answers.columns(features=control_table(features))
    return error_probability(columns, answers.wrong, answers.folds())


def best_signal(scores: Mapping[str, ArrayLike], answers: Labelled) -> str:
    """The signal with the highest AUROC on the clusters that choose thresholds; ties: the first.

    `risk_threshold` tests on the other clusters, so its guarantee still holds.

    Example:
        >>> scores = {"constant": [0.5] * 20, "good": [0.1, 0.9] * 10}
        >>> best_signal(scores, Labelled([0, 1] * 10, [n // 2 for n in range(20)]))
        'good'
    """
    columns = dict(zip(scores, answers.columns(**scores), strict=True))
    rows = fixing_rows(answers.clusters, answers.seed)

    def auroc_of(name: str) -> float:
        area = auroc(columns[name][rows], answers.wrong[rows])
        return 0.5 if np.isnan(area) else area

    return max(scores, key=auroc_of)


def recommendation(
    signals: Mapping[str, RankedSignal],
    scores: Mapping[str, ArrayLike],
    answers: Labelled,
    method: str,
) -> str:
    """A sentence: which signal to use here, and how it compares with the signal `method`.

    `signals` are those of `rank_signals` on these answers.

    Example:
        >>> answers = Labelled([0, 1] * 30, range(60), resamples=100)
        >>> scores = {"good": [0.1, 0.9] * 30, "bad": [0.9, 0.1] * 30}
        >>> print(recommendation(rank_signals(scores, answers), scores, answers, "good"))
        On all these answers, good ranks errors best (PRR +1.00 [+1.00, +1.00]).
    """
    if answers.too_few:
        return (
            f"Too few answers to recommend a signal: {answers.n_clusters} clusters, "
            f"{answers.wrong.sum()} wrong and {(~answers.wrong).sum()} right answers. {FEW}"
        )
    ranking = [name for name, signal in signals.items() if signal.ranks]
    if not ranking:
        misleading = [name for name, signal in signals.items() if signal.misleads]
        return (
            "No evidence that any of these signals ranks errors here: no PRR interval is above 0. "
            + (f"Negative PRR: {', '.join(misleading)}. " if misleading else "")
            + "Do not sort or reject answers by them; label more answers."
        )
    best = max(ranking, key=lambda name: signals[name].prr.value)
    sentence = f"On all these answers, {best} ranks errors best (PRR {signals[best].prr})"
    if best == method:
        return f"{sentence}."
    pair = {name: scores[name] for name in (best, method)}
    answers = answers.resampled(answers.resamples or RESAMPLES)
    gap = prr_intervals(pair, answers, [(best, method)])[1][best, method]
    comparison = "better than" if gap.low > 0 else "not significantly different from"
    verdict = "is inconclusive"
    if signals[method].ranks:
        verdict = "ranks errors too"
    elif signals[method].misleads:
        verdict = "has negative PRR"
    return f"{sentence}, {comparison} {method} (difference {gap}), which {verdict}."
