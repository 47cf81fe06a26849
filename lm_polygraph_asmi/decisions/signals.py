"""Which signal, if any, ranks errors on a user's answers.

`scores` are by name, (n,), higher = more uncertain, finite.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from lm_polygraph_asmi.analysis.clusters import RESAMPLES, Interval
from lm_polygraph_asmi.analysis.comparison import auroc, auroc_interval, prr_intervals
from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.decisions.risk_control import choosing_rows


class RankedSignal(NamedTuple):
    """How well a signal ranks errors, with intervals over clusters.

    PRR: 1 = errors first, 0 = chance, negative = worse than chance; AUROC: 0.5 = chance.
    """

    prr: Interval
    auroc: Interval


def rank_signals(scores: Mapping[str, ArrayLike], answers: Labelled) -> dict[str, RankedSignal]:
    """PRR and AUROC of signals on the same answers, by name."""
    columns = dict(zip(scores, answers.columns(**scores), strict=True))
    prr, _ = prr_intervals(columns, answers.resampled(answers.resamples or RESAMPLES))
    return {
        name: RankedSignal(prr[name], auroc_interval(score, answers))
        for name, score in columns.items()
    }


def best_signal(scores: Mapping[str, ArrayLike], answers: Labelled) -> str:
    """The signal with the highest AUROC on the clusters that choose; ties: the first.

    `risk_threshold` with the share of these clusters tests on the others, so its guarantee holds.
    """
    columns = dict(zip(scores, answers.columns(**scores), strict=True))
    rows = choosing_rows(answers.clusters, answers.seed)

    def auroc_of(name: str) -> float:
        area = auroc(columns[name][rows], answers.wrong[rows])
        return 0.5 if np.isnan(area) else area

    return max(scores, key=auroc_of)
