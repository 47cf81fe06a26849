"""Make a `Calibration` from signals and labels, both for rows and for runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from lm_polygraph_asmi.analysis.clusters import RESAMPLES
from lm_polygraph_asmi.analysis.comparison import auroc_interval, prr_intervals
from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.analysis.risk_control import RiskThreshold, check_guarantee, risk_threshold
from lm_polygraph_asmi.decisions.calibration import Calibration, RankedSignal, Sample
from lm_polygraph_asmi.decisions.learned import Features, learned_threshold
from lm_polygraph_asmi.scoring.signals import LEARNED, signal_of
from lm_polygraph_asmi.validation import check_at_least_one


@dataclass(frozen=True)
class CalibrationOptions:
    """Options of a calibration. Raises ValueError for an impossible value.

    Args:
        risk: largest error rate among accepted answers, in (0, 1); see `risk_threshold`.
        confidence: probability, over samples of labelled answers, that the guarantee holds.
        signal: the signal to threshold. A key of `SIGNALS`; "score" for the score of the method;
            "column:NAME" or "column:-NAME" for any score in the rows; "best" to choose among
            MSP, perplexity and entropy, each tested at a third of the level; or "learned" for a
            score that is learned on half of the clusters.
        largest: most answers of one cluster in later use; None: the most of one cluster here.
        right_from: lowest quality of a right answer. None: 0.5, and qualities are in [0, 1].
        resamples: number of bootstrap resamples for the intervals of PRR and AUROC.
    """

    risk: float
    confidence: float = 0.95
    signal: str = "best"
    largest: int | None = None
    right_from: float | None = None
    resamples: int = RESAMPLES

    def __post_init__(self) -> None:
        if self.signal not in ("best", "score"):
            signal_of(self.signal)  # raises ValueError for an unknown signal
        check_guarantee(self.risk, self.confidence)
        check_at_least_one("resamples", self.resamples)


def rank_signals(scores: Mapping[str, ArrayLike], answers: Labelled) -> dict[str, RankedSignal]:
    """PRR and AUROC of several signals on the same answers, by the signal's name."""
    columns = dict(zip(scores, answers.columns(**scores), strict=True))
    prr, _ = prr_intervals(columns, answers.resampled(answers.resamples or RESAMPLES))
    return {
        name: RankedSignal(prr[name], auroc_interval(score, answers))
        for name, score in columns.items()
    }


def best_threshold(
    columns: Mapping[str, Float[np.ndarray, " n"]],
    answers: Labelled,
    risk: float,
    confidence: float,
    unlabelled: Mapping[str, Float[np.ndarray, " m"]] = {},
    largest: int | None = None,
) -> tuple[str, RiskThreshold]:
    """The signal that accepts most answers, and its threshold.

    Each of the k signals is tested at 1 / k of the level.
    """
    level = (1 - confidence) / len(columns)
    rules = {
        name: risk_threshold(
            values, answers, risk, 1 - level, unlabelled=unlabelled.get(name), largest=largest
        )
        for name, values in columns.items()
    }
    best = max(rules, key=lambda name: rules[name].coverage)
    return best, replace(rules[best], confidence=confidence, signals=len(columns))


def fit(
    columns: Mapping[str, Float[np.ndarray, " n"]],
    answers: Labelled,
    asked: CalibrationOptions,
    *,
    features: Callable[[], Features] = dict,
    unlabelled: Mapping[str, Float[np.ndarray, " m"]] = {},
    **about: Any,
) -> Calibration:
    """Choose a threshold on answers that are not blank.

    Args:
        columns: signal -> values, nats, higher = more uncertain.
        answers: labels and clusters of the same answers.
        asked: `signal` is one of `columns`, "best" or "learned".
        features: returns the inputs of "learned": group -> (n, width).
        unlabelled: the same signals of other answers, whose values are the thresholds to test.
        about: other fields of `Calibration`.
    """
    risk, confidence, signal, largest = asked.risk, asked.confidence, asked.signal, asked.largest
    if answers.wrong.all():
        raise ValueError(f"expected right and wrong answers, got {len(answers)}, all wrong")
    chose = None
    if signal == LEARNED:
        if unlabelled:
            raise ValueError(
                "a learned score cannot use unlabelled rows: leave them out, or name another signal"
            )
        simple = {kind: columns[kind] for kind in columns if not signal_of(kind).masked}
        choice = learned_threshold(features(), simple, answers, risk, confidence, largest=largest)
        columns = {**columns, choice.signal: choice.values}
        decider, rule, chose = choice.signal, choice.rule, choice.chose
        about |= {"learned": choice.score, "learning": choice.learning}
    else:
        unmasked = [name for name in columns if not signal_of(name).masked]
        names = (unmasked or list(columns)) if signal == "best" else [signal]
        if missing := set(names) - set(columns):
            raise ValueError(f"expected a signal of {', '.join(columns)}; got {missing.pop()!r}")
        tested = {name: columns[name] for name in names}
        decider, rule = best_threshold(tested, answers, risk, confidence, unlabelled, largest)
    titled = {signal_of(kind).title: values for kind, values in columns.items()}
    return Calibration(
        signal=decider,
        guarantee=rule,
        n=len(answers),
        signals=rank_signals(titled, answers),
        errors=int(answers.wrong.sum()),
        right_from=asked.right_from,
        sample=Sample(
            columns[decider],
            answers.wrong.astype(float),
            answers.clusters,
            unlabelled.get(decider),
            chose,
        ),
        **about,
    )
