"""Which signal, if any, ranks errors on a user's answers."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from lm_polygraph_asmi.analysis.clusters import (
    FEW,
    RESAMPLES,
    SEED,
    Interval,
    binary,
    check_rows,
    cluster_interval,
    control_table,
    too_few,
)
from lm_polygraph_asmi.analysis.comparison import augrc, auroc, auroc_interval, prr_intervals
from lm_polygraph_asmi.analysis.risk_control import fixing_rows


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


def rank_signals(
    scores: Mapping[str, ArrayLike],
    wrong: ArrayLike,
    clusters: Sequence[str],
    quality: ArrayLike | None = None,
    resamples: int = RESAMPLES,
) -> dict[str, RankedSignal]:
    """PRR, AUROC and AUGRC of signals on the same answers, by name.

    Args:
        scores: name -> (n,), higher = more uncertain.
        wrong: (n,) correctness labels, 1 or True = wrong.
        clusters: (n,) key of each row; answers on one passage share a key.
        quality: (n,) for PRR, higher = better; None: right or wrong.
        resamples: number of bootstrap resamples of clusters.

    Raises:
        ValueError: no signal, no answer, unequal lengths, a value that is not finite, or labels
            other than 0 and 1.

    Example:
        >>> scores = {"good": [0.1, 0.9] * 10, "bad": [0.9, 0.1] * 10}
        >>> signals = rank_signals(scores, [0, 1] * 10, [str(n) for n in range(20)], resamples=100)
        >>> signals["good"].ranks, signals["bad"].ranks, signals["bad"].auroc.value
        (True, False, 0.0)
    """
    check_rows(clusters, wrong=wrong, **scores)
    errors = binary(wrong=wrong)
    qualities = 1.0 - errors if quality is None else quality
    prr, _ = prr_intervals(scores, qualities, clusters, resamples=resamples)
    by_name = {}
    for name, values in scores.items():
        score = np.asarray(values, dtype=float)

        def area(rows: np.ndarray, score: np.ndarray = score) -> float:
            return augrc(score[rows], errors[rows])

        by_name[name] = RankedSignal(
            prr[name],
            auroc_interval(score, errors, clusters, resamples),
            cluster_interval(area, clusters, resamples),
        )
    return by_name


def combination(
    features: ArrayLike, wrong: ArrayLike, clusters: Sequence[str], seed: int = SEED
) -> np.ndarray:
    """(n,) probability of an error by a logistic model of a few signals, out of fold.

    Args:
        features: (n, m), a column per signal.
        wrong: (n,) correctness labels, 1 or True = wrong.
        clusters: (n,) key of each row; folds keep clusters whole.
        seed: of the folds.

    Raises:
        ValueError: right or wrong answers in fewer than five clusters, features that are not a
            table, unequal lengths, a value that is not finite, or labels other than 0 and 1.

    Example:
        >>> features = [[n % 7, score] for n, score in enumerate([0.1, 0.3, 0.2, 0.9] * 25)]
        >>> chance = combination(features, [0, 0, 1, 1] * 25, [str(n) for n in range(100)])
        >>> bool(chance[3::4].min() > 0.5 > chance[0::4].max())  # of scores 0.9 and 0.1
        True
    """
    from lm_polygraph_asmi.analysis.distinct import cluster_folds, error_probability

    columns, errors = control_table(features), binary(wrong=wrong)
    check_rows(clusters, features=columns, wrong=errors)
    return error_probability(columns, errors, cluster_folds(errors, clusters, seed))


def best_signal(
    scores: Mapping[str, ArrayLike], wrong: ArrayLike, clusters: Sequence[str], seed: int = SEED
) -> str:
    """The signal with the highest AUROC on the clusters that choose thresholds; ties: the first.

    `risk_threshold` with the same seed tests on the other clusters, so its guarantee still holds.

    Args:
        scores: name -> (n,), higher = more uncertain.
        wrong: (n,) correctness labels, 1 or True = wrong.
        clusters: (n,) key of each row; answers on one passage share a key.
        seed: of the choice of clusters.

    Raises:
        ValueError: as `rank_signals`.

    Example:
        >>> scores = {"constant": [0.5] * 20, "good": [0.1, 0.9] * 10}
        >>> best_signal(scores, [0, 1] * 10, [str(n // 2) for n in range(20)])
        'good'
    """
    check_rows(clusters, wrong=wrong, **scores)
    rows = fixing_rows(clusters, seed)
    errors = binary(wrong=wrong)[rows]

    def auroc_of(name: str) -> float:
        area = auroc(np.asarray(scores[name], dtype=float)[rows], errors)
        return 0.5 if np.isnan(area) else area

    return max(scores, key=auroc_of)


def recommendation(
    signals: Mapping[str, RankedSignal],
    scores: Mapping[str, ArrayLike],
    wrong: ArrayLike,
    clusters: Sequence[str],
    method: str,
    quality: ArrayLike | None = None,
    resamples: int = RESAMPLES,
) -> str:
    """A sentence: which signal to use here, and how it compares with `method`.

    Args:
        signals: by name, of `rank_signals` on these answers.
        scores, wrong, clusters, quality: as there.
        method: name of the signal that is compared with the best.
        resamples: number of bootstrap resamples of clusters.

    Raises:
        ValueError: labels other than 0 and 1.
        KeyError: another signal ranks errors best, and `method` is not in `scores`.

    Example:
        >>> scores, wrong = {"good": [0.1, 0.9] * 30, "bad": [0.9, 0.1] * 30}, [0, 1] * 30
        >>> keys = [str(n) for n in range(60)]
        >>> signals = rank_signals(scores, wrong, keys, resamples=100)
        >>> print(recommendation(signals, scores, wrong, keys, "good"))
        good ranks errors best here (PRR +1.00 [+1.00, +1.00]).
    """
    errors = binary(wrong=wrong)
    if too_few(errors, clusters):
        return (
            f"Too few answers to recommend a signal: {len(set(clusters))} clusters, "
            f"{int(errors.sum())} wrong and {int((errors == 0).sum())} right answers. {FEW}"
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
    sentence = f"{best} ranks errors best here (PRR {signals[best].prr})"
    if best == method:
        return f"{sentence}."
    qualities = 1.0 - np.asarray(wrong, dtype=float) if quality is None else quality
    pair = {name: scores[name] for name in (best, method)}
    _, gaps = prr_intervals(pair, qualities, clusters, [(best, method)], resamples)
    gap = gaps[best, method]
    comparison = "better than" if gap.low > 0 else "not significantly different from"
    verdict = "is inconclusive"
    if signals[method].ranks:
        verdict = "ranks errors too"
    elif signals[method].misleads:
        verdict = "has negative PRR"
    return f"{sentence}, {comparison} {method} (difference {gap}), which {verdict}."
