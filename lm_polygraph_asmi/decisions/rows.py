"""The first door: labelled rows, whose saved scores are kept where they can be trusted."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_polygraph_asmi.analysis.clusters import RESAMPLES
from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.decisions.calibration import Calibration
from lm_polygraph_asmi.decisions.fit import check_signal, fit, unlabelled_signals
from lm_polygraph_asmi.decisions.labels import (
    answer_digest,
    clusters_of,
    is_blank,
    labels_of,
    request_of,
)
from lm_polygraph_asmi.files import parse_json, to_json
from lm_polygraph_asmi.scoring.answer import UnmaskedAnswer
from lm_polygraph_asmi.scoring.result import Score
from lm_polygraph_asmi.scoring.rows import Row, score_rows
from lm_polygraph_asmi.scoring.signals import LEARNED
from lm_polygraph_asmi.validation import check_at_least_one

if TYPE_CHECKING:
    from lm_polygraph_asmi.scoring.scorer import Scorer

Scored = Score | UnmaskedAnswer
LABELLED_FIELDS = ("prompt", "answer", "samples", "id", "cluster", "context", "correct", "quality")
"""Fields of a row that are read; its saved score stands beside them."""


def calibrate_rows(
    rows: Iterable[Row | Mapping[str, Any]],
    scorer: "Scorer",
    risk: float,
    confidence: float = 0.95,
    *,
    signal: str = "best",
    right_from: float | None = None,
    unlabelled: Iterable[Row | Mapping[str, Any]] = (),
    resamples: int = RESAMPLES,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Calibrate on labelled answers: threshold with a risk guarantee, and error probability.

    Args:
        rows: from `read_rows`, or dictionaries: `prompt` (text or messages), `answer`, and
            `correct` or `quality`; `cluster` (all rows or none; default: `context_clusters`) if
            different prompts are not independent. Labelled rows of `score --out` keep their
            signals if these are of the scorer's model and settings; other ones are scored again,
            with a warning.
        scorer: model and settings; answers scored with others get no decision.
        risk: largest error rate among accepted answers, in (0, 1).
        confidence: probability that the guarantee holds, over calibration samples.
        signal: a key of `SIGNALS`; "score": the scorer's method; "best": the signal with the
            highest AUROC on a fifth of the clusters, which do not test, so that the guarantee is
            valid. Choosing after looking at the results is not. "learned": a score learned on half
            of the clusters, if it ranks their errors better than MSP, perplexity and entropy.
        right_from: lowest quality of a right answer; None: 0.5, and the quality is in [0, 1].
        unlabelled: other rows like the later ones, with or without answers, whose scores are the
            thresholds to test; see `risk_threshold`.
        progress: called after each scored row, with the numbers of scored and of all rows.

    Empty and blank answers are left out: they are never accepted.

    Raises:
        ValueError: a row without answer or label, with the id of another, or that cannot be
            scored; texts and chats in one calibration; only wrong answers; an unknown signal.

    Example:
        >>> rows = [
        ...     {"prompt": f"{passage}. {prompt}", "answer": answer, "correct": right}
        ...     for passage in range(4)
        ...     for answer, right in ((" Edda Holm", True), (" Brask", False))
        ... ]
        >>> run = calibrate_rows(rows, scorer, risk=0.1, resamples=50)
        >>> run.n, run.errors, run.guarantee.threshold  # far too few for a guarantee
        (8, 4, None)
    """
    check_signal(signal, risk, confidence)
    check_at_least_one("resamples", resamples)
    numbered = [r if isinstance(r, Row) else Row(n, dict(r)) for n, r in enumerate(rows, start=1)]
    inputs = [
        row._replace(content={n: row.content[n] for n in LABELLED_FIELDS if n in row.content})
        for row in numbered
    ]
    if not inputs:
        raise ValueError("expected at least two labelled answers, got no row")
    labels = labels_of(inputs, right_from)
    if all(is_blank(row.content["answer"]) for row in inputs):
        raise ValueError("expected answers, got only empty or blank ones")
    numbered, inputs = (list(filter(_not_empty, some)) for some in (numbered, inputs))
    cluster_of = {row.number: key for row, key in zip(inputs, clusters_of(inputs), strict=True)}
    saved = _saved_answers(numbered, scorer)
    if note := scored_again(numbered, len(saved)):
        warnings.warn(note, stacklevel=2)
    by_row = _scores_by_row(inputs, scorer, progress, saved)
    kept = [row for row in inputs if by_row[row.number].answered]
    if not kept:
        raise ValueError("expected answers, got only empty or blank ones")
    scores = [by_row[row.number] for row in kept]
    quality: list[Any] = [row.content.get("quality") for row in kept]
    known = None if None in quality else quality
    wrong, keys = ([of[row.number] for row in kept] for of in (labels, cluster_of))
    answers = Labelled(wrong, keys, known, resamples)
    texts = [score.scored_text[: score.content_end] for score in scores]
    shared = _shared_settings(scores, scorer)
    features = None
    if signal == LEARNED:
        features = _features(kept, scores, scorer)
        shared["hidden_width"] = features["hidden last"].shape[1]
    return fit(
        {kind: np.array([s.signals[kind] for s in scores]) for kind in scores[0].signals},
        answers,
        risk=risk,
        confidence=confidence,
        signal=signal,
        method=scorer.config.method,
        features=features,
        unlabelled=unlabelled_signals(unlabelled, scorer),
        label_source="their labels",
        right_from=right_from,
        model=scores[0].model,
        settings=shared,
        prompt_tokens=sorted(float(score.prompt_tokens or 0) for score in scores),
        answer_digests=digests_of([score.prompt for score in scores], texts),
    )


def _not_empty(row: Row) -> bool:
    """Whether a row's answer has text; an empty one is never accepted."""
    return row.content.get("answer") != ""


def _features(
    rows: Sequence[Row], scores: Sequence[Scored], scorer: "Scorer"
) -> dict[str, np.ndarray]:
    """What a learned score reads, (n, width) by group, from one unmasked pass a row.

    Of the tokens that were scored: as text, a saved answer that was cut off would get an end.
    """
    from lm_polygraph_asmi.scoring.unmasked import read

    tables = []
    for row, score in zip(rows, scores, strict=True):
        features = read(scorer, score.prompt, score.ids, states=True).features
        for name, values in features.items():
            if not np.isfinite(values).all():
                raise ValueError(
                    f"row {row.number}: {name} has values that are not finite: load the model in "
                    "a wider precision, or use another signal"
                )
        tables.append(features)
    return {name: np.vstack([features[name] for features in tables]) for name in tables[0]}


def digests_of(prompts: Sequence[Any], answers: Sequence[str]) -> list[str]:
    """Sorted `answer_digest` of answers as texts without their ends."""
    return sorted(answer_digest(*pair) for pair in zip(prompts, answers, strict=True))


def scored_again(rows: Iterable[Row], kept: int) -> str:
    """How many rows with saved scores are scored again, and why; empty for none."""
    saved = sum(bool(row.content.get("signals")) for row in rows)
    if saved <= kept:
        return ""
    return (
        f"Scored {saved - kept} of {saved} rows again: prompt, answer or settings differ from "
        "those of the saved scores, or these are of another model or an older release."
    )


def _saved_answers(rows: Iterable[Row], scorer: "Scorer") -> dict[int, UnmaskedAnswer]:
    """Row number -> answer of a row of `score --out` that this scorer would score so."""
    from lm_polygraph_asmi.scoring.advice import reads_clock  # imports transformers
    from lm_polygraph_asmi.scoring.unmasked import fingerprints, other_settings

    saved, dated = dict[int, UnmaskedAnswer](), reads_clock(scorer.tokenizer)
    known = fingerprints(scorer)
    for row in rows if scorer.config.method != "adapt" else ():  # its samples are not saved
        answer = UnmaskedAnswer.of_row(row.content)
        if answer is None or (dated and not isinstance(answer.prompt, str)):
            continue
        recorded = known.items() <= answer.settings.items()
        if recorded and not other_settings(scorer, row.content):
            saved[row.number] = answer
    return saved


def _scores_by_row(
    rows: list[Row],
    scorer: "Scorer",
    progress: Callable[[int, int], None] | None,
    saved: dict[int, UnmaskedAnswer],
) -> dict[int, Scored]:
    """Row number -> score, saved or computed."""
    from lm_polygraph_asmi.scoring.unmasked import check_tokens

    scores: dict[int, Scored] = dict(saved)
    missing = [row for row in rows if row.number not in saved]
    problem = (
        "row {} cannot be scored: {}. Correct or remove it; the risk guarantee does not cover rows "
        "left out"
    )
    for row in missing:  # before any of them is scored
        try:
            check_tokens(scorer, request_of(row))
        except ValueError as error:
            raise ValueError(problem.format(row.number, error)) from error
    for row, outcome in score_rows(scorer, missing):
        if outcome.result is None:
            raise ValueError(problem.format(row.number, outcome.error))
        scores[row.number] = outcome.result
        if progress is not None:
            progress(len(scores), len(rows))
    return scores


def _shared_settings(scores: Sequence[Scored], scorer: "Scorer") -> dict[str, Any]:
    """What all scores share, how their answers end, and what identifies the model."""
    from lm_polygraph_asmi.scoring.unmasked import fingerprints  # imports torch

    described = [score.compared_settings for score in scores]
    shared = dict(described[0])
    for other in described[1:]:
        shared = {n: value for n, value in shared.items() if other.get(n, math.nan) == value}
    del shared["model"]
    ends = sorted({other["answer_end"] for other in described if "answer_end" in other})
    shared.pop("answer_end", None)
    shared |= {"answer_ends": ends, "stop": list(scorer.config.stop or ())}
    return parse_json(to_json(shared | fingerprints(scorer)))
