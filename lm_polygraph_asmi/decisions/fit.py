"""The fit that both doors share: columns of signals and labels in, a `Calibration` out."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from lm_polygraph_asmi.analysis.calibration import calibrate, held_out_brier
from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.decisions.calibration import Calibration
from lm_polygraph_asmi.decisions.learned import Features, learned_threshold
from lm_polygraph_asmi.decisions.risk_control import check_guarantee, risk_threshold
from lm_polygraph_asmi.decisions.signals import (
    best_signal,
    combination,
    rank_signals,
    recommendation,
)
from lm_polygraph_asmi.scoring.signals import LEARNED, SIGNALS, TITLES

COMBINED = "combination"
COMBINES = ("perplexity", "msp")
"""Signals combined with the score: few features, so that few answers suffice."""


def check_signal(signal: str, risk: float, confidence: float, run: bool = False) -> None:
    """Raise ValueError unless a calibration (`run`: of a finished run) can be asked for these."""
    if signal not in ("best", "score", *SIGNALS):
        raise ValueError(
            f"expected signal best, score or one of {', '.join(SIGNALS)}; got {signal!r}"
        )
    if run and signal == LEARNED:
        raise ValueError(
            "a finished run has no hidden states to learn from: write its prompts, answers and "
            "labels as rows, and pass ROWS --model MODEL --signal learned"
        )
    check_guarantee(risk, confidence)


def fit(
    columns: Mapping[str, Float[np.ndarray, " n"]],
    answers: Labelled,
    *,
    risk: float,
    confidence: float,
    signal: str,
    method: str,
    name: str,
    features: Features | None = None,
    **about: Any,
) -> Calibration:
    """Fit threshold and probability of error on answers that are not blank.

    Args:
        columns: signal -> values, nats, higher = more uncertain.
        risk, confidence, signal: as for `calibrate_rows`.
        method: column of the score.
        features: with the signal "learned", what it learns from, (n, width) by group.
        **about: other fields of `Calibration`.
    """
    wrong, clusters = answers.wrong, answers.clusters
    if wrong.all():
        raise ValueError(f"{name}: expected right and wrong answers, got {len(wrong)}, all wrong")
    if signal == LEARNED:
        simple = {kind: columns[kind] for kind in columns if not SIGNALS[kind].masked}
        choice = learned_threshold(features or {}, simple, answers, risk, confidence)
        columns = {**columns, choice.signal: choice.values}
        signal, rule = choice.signal, choice.rule
        about |= {"learned": choice.score, "learning": choice.learning}
    ordered = {method: columns[method], **columns}  # the score comes first, so that it wins ties
    decider = {"best": best_signal(ordered, answers), "score": method}.get(signal, signal)
    if decider not in columns:
        raise ValueError(f"expected a signal of {', '.join(columns)}; got {decider!r}")
    values = columns[decider]
    if "learning" not in about:
        rule = risk_threshold(values, wrong, clusters, risk, confidence)
    by_name = {TITLES[kind]: column for kind, column in columns.items()}
    try:
        combined = [columns[method], *(columns[kind] for kind in COMBINES)]
        by_name[COMBINED] = combination(np.log1p(np.column_stack(combined)), answers)
    except (ValueError, KeyError):
        pass  # too few wrong or right answers for its folds, or a signal was not saved
    ranked = rank_signals(by_name, answers)
    return Calibration(
        name=name,
        signal=decider,
        guarantee=rule,
        values=np.sort(values).tolist(),
        error_steps=calibrate(values, wrong),
        brier=held_out_brier(values, answers),
        signals=ranked,
        recommendation=recommendation(ranked, by_name, answers, TITLES[method]),
        errors=int(wrong.sum()),
        **about,
    )
