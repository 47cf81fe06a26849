"""The fit that both doors share: columns of signals and labels in, a `Calibration` out."""

from collections.abc import Callable, Mapping
from dataclasses import replace
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


def check_signal(signal: str, risk: float, confidence: float, run: bool = False) -> None:
    """Raise ValueError unless a calibration (`run`: of a finished run) can be asked for these."""
    if signal not in ("best", "score"):
        signal_of(signal)  # raises for an unknown one
    if run and signal == LEARNED:
        raise ValueError(
            "a finished run has no hidden states to learn from: score its prompts and answers as "
            "rows (`polygraph_asmi score`), and calibrate on those"
        )
    check_guarantee(risk, confidence)


def rank_signals(scores: Mapping[str, ArrayLike], answers: Labelled) -> dict[str, RankedSignal]:
    """PRR and AUROC of signals on the same answers, by name."""
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
    unlabelled: Mapping[str, Float[np.ndarray, " m"]] | None = None,
    largest: int | None = None,
) -> tuple[str, RiskThreshold]:
    """The signal that accepts most, each tested at an equal part of the level, with its rule."""
    level, others = (1 - confidence) / len(columns), unlabelled or {}
    rules = {
        name: risk_threshold(
            values, answers.wrong, answers.clusters, risk, 1 - level,
            unlabelled=others.get(name), largest=largest,
        )
        for name, values in columns.items()
    }  # fmt: skip
    best = max(rules, key=lambda name: rules[name].coverage)
    return best, replace(rules[best], confidence=confidence, signals=len(columns))


def fit(
    columns: Mapping[str, Float[np.ndarray, " n"]],
    answers: Labelled,
    *,
    risk: float,
    confidence: float,
    signal: str,
    features: Callable[[], Features] = dict,
    unlabelled: Mapping[str, Float[np.ndarray, " m"]] | None = None,
    largest: int | None = None,
    **about: Any,
) -> Calibration:
    """Fit the threshold on answers that are not blank.

    `columns` has signal -> values, nats, higher = more uncertain. `signal` names one; "best" is the
    unmasked one that accepts most, each at an equal part of the level; for "learned", `features`
    reads what it learns from, (n, width) by group. `unlabelled` has the signals of other answers,
    and `largest` the most answers of a cluster, see `risk_threshold`. `about`: other fields of
    `Calibration`.
    """
    if answers.wrong.all():
        raise ValueError(f"expected right and wrong answers, got {len(answers)}, all wrong")
    chose = None
    if signal == LEARNED:
        if unlabelled:
            raise ValueError("a learned score takes no unlabelled rows: name another signal")
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
        asked = {name: columns[name] for name in names}
        decider, rule = best_threshold(asked, answers, risk, confidence, unlabelled, largest)
    titled = {signal_of(kind).title: values for kind, values in columns.items()}
    return Calibration(
        signal=decider,
        guarantee=rule,
        n=len(answers),
        signals=rank_signals(titled, answers),
        errors=int(answers.wrong.sum()),
        sample=Sample(
            columns[decider],
            answers.wrong.astype(float),
            answers.clusters,
            None if unlabelled is None else unlabelled[decider],
            chose,
        ),
        **about,
    )
