"""The first door: labelled rows with the signals that `score --out` has saved."""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_polygraph_asmi.analysis.clusters import RESAMPLES
from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.decisions.calibration import MACHINE, Calibration
from lm_polygraph_asmi.decisions.fit import check_signal, fit
from lm_polygraph_asmi.decisions.labels import (
    answer_digest,
    clusters_of,
    is_blank,
    labelled_only,
    labels_of,
    naming,
)
from lm_polygraph_asmi.files import parse_json, to_json
from lm_polygraph_asmi.scoring.answer import UnmaskedAnswer
from lm_polygraph_asmi.scoring.rows import Row, row_parts, score_rows
from lm_polygraph_asmi.scoring.signals import LEARNED
from lm_polygraph_asmi.validation import check_at_least_one, describe_fields

if TYPE_CHECKING:
    from lm_polygraph_asmi.scoring.scorer import Scorer

Rows = Iterable[Row | Mapping[str, Any]]
AGAIN = "score it again: `polygraph_asmi score FILE --model MODEL --out SCORED`"


def calibrate_rows(
    rows: Rows,
    risk: float,
    confidence: float = 0.95,
    *,
    signal: str = "best",
    right_from: float | None = None,
    unlabelled: Rows = (),
    scorer: "Scorer | None" = None,
    resamples: int = RESAMPLES,
) -> Calibration:
    """Calibrate on labelled answers: threshold with a risk guarantee, and error probability.

    Args:
        rows: that `score_file` wrote, whose model and settings are taken, with `correct` or
            `quality`, and maybe `cluster`. Empty answers are left out: they are never accepted.
        risk: largest error rate among accepted answers, in (0, 1); see `risk_threshold`.
        signal: a key of `SIGNALS`; "score": that of the method; "best": by AUROC on a fifth of the
            clusters, which then do not test; "learned": a score learned on half of them.
        right_from: lowest quality of a right answer; None: 0.5, and the quality is in [0, 1].
        unlabelled: scored rows like later ones; their signals are the thresholds to test.
        scorer: scores rows that are not scored yet, and reads hidden states for "learned".

    Example:
        >>> rows = [
        ...     {"prompt": f"{passage}. {prompt}", "answer": answer, "correct": right}
        ...     for passage in range(4)
        ...     for answer, right in ((" Edda Holm", True), (" Brask", False))
        ... ]
        >>> run = calibrate_rows(rows, risk=0.1, scorer=scorer, resamples=50)
        >>> run.n, run.errors, run.guarantee.threshold  # far too few for a guarantee
        (8, 4, None)
    """
    check_signal(signal, risk, confidence)
    check_at_least_one("resamples", resamples)
    numbered, others = _numbered(rows), _numbered(unlabelled)
    inputs = labelled_only(numbered)
    if without := len(numbered) - len(inputs):
        warnings.warn(f"Left out {without} rows without a label", stacklevel=2)
    labels = labels_of(inputs, right_from)
    inputs = [row for row in inputs if not is_blank(row.content["answer"])]
    cluster_of = dict(zip((row.number for row in inputs), clusters_of(inputs), strict=True))
    if scorer is not None:
        inputs, others = (list(scored(some, scorer)) for some in (inputs, others))
    answers = saved_answers(inputs, scorer)
    inputs = [row for row, answer in zip(inputs, answers, strict=True) if answer.answered]
    kept = [answer for answer in answers if answer.answered]
    if not kept:
        raise ValueError("expected answers, got only empty or blank ones")
    quality: list[Any] = [row.content.get("quality") for row in inputs]
    wrong, keys = ([of[row.number] for row in inputs] for of in (labels, cluster_of))
    shared, features = _shared_settings(kept), None
    if signal == LEARNED:
        reader = scorer or scorer_for(inputs)
        saved_answers(inputs[:1], reader)
        features = _features(kept, reader)
        shared["hidden_width"] = features["hidden last"].shape[1]
    return fit(
        _columns([one.signals for one in kept]),
        Labelled(wrong, keys, None if None in quality else quality, resamples),
        risk=risk,
        confidence=confidence,
        signal=signal,
        method=shared["method"],
        features=features,
        unlabelled=_spare(inputs[0], others),
        label_source="their labels",
        right_from=right_from,
        model=kept[0].model,
        settings=shared,
        prompt_tokens=sorted(float(one.prompt_tokens) for one in kept),
        answer_digests=digests_of(
            [one.prompt for one in kept], [one.scored_text[: one.content_end] for one in kept]
        ),
    )


def _numbered(rows: Rows) -> list[Row]:
    return [r if isinstance(r, Row) else Row(n, dict(r)) for n, r in enumerate(rows, start=1)]


def _columns(signals: Sequence[Mapping[str, float]]) -> dict[str, np.ndarray]:
    return {name: np.array([each[name] for each in signals]) for name in signals[0]}


def scored(rows: Iterable[Row], scorer: "Scorer") -> Iterator[Row]:
    """The rows as `score --out` writes them; those that it wrote, and blank ones, stay."""
    from lm_polygraph_asmi.scoring.tables import columns_of, record_of
    from lm_polygraph_asmi.scoring.text import parse_request
    from lm_polygraph_asmi.scoring.unmasked import check_tokens, fingerprints

    def is_missing(row: Row) -> bool:
        return "digest" not in row.content and not is_blank(row.content.get("answer"))

    rows, columns, known = list(rows), columns_of(scorer._result), fingerprints(scorer)
    for row in filter(is_missing, rows):  # before any of them is scored
        with naming(row):
            check_tokens(scorer, parse_request(*row_parts(row.content)))
    for row in rows:
        if is_missing(row):
            ((_, outcome),) = score_rows(scorer, [row])
            if outcome.result is None:
                raise ValueError(f"row {row.number}: {outcome.error}: correct or remove it")
            row = row._replace(content=record_of(row, outcome, columns, known))
        yield row


def saved_answers(rows: Sequence[Row], scorer: "Scorer | None" = None) -> list[UnmaskedAnswer]:
    """Answers and signals of rows that `score --out` wrote, all with one model and its settings.

    ValueError, which names the row: it is another one, was changed, or differs from the first;
    `scorer`: or it would not score them so.
    """
    answers: list[UnmaskedAnswer] = []
    for row in rows:
        with naming(row):
            answers.append(_saved_answer(row.content))
            first, own = (_made_with(answer) for answer in (answers[0], answers[-1]))
            if other := [n for n in first.keys() & own.keys() if first[n] != own[n]]:
                listed = "; ".join(f"{n} {own[n]!r}, not {first[n]!r}" for n in sorted(other))
                raise ValueError(f"scored otherwise than row {rows[0].number} ({listed}): {AGAIN}")
    if scorer is not None and rows:
        from lm_polygraph_asmi.scoring.unmasked import other_settings

        here = str(scorer.model.config.name_or_path or "")  # weights tell whether it is another
        if listed := "; ".join(other_settings(scorer, rows[0].content | {"model": here})):
            raise ValueError(
                f"row {rows[0].number} was scored with another model or other settings ({listed}): "
                f"leave them out to use those of the rows, or {AGAIN}"
            )
    return answers


def _saved_answer(content: Mapping[str, Any]) -> UnmaskedAnswer:
    if not content.get("digest"):
        raise ValueError(
            f"expected a row that `score --out` wrote, got {describe_fields(content)}: name the "
            "model that answered (--model, or a scorer), or score the file first: `polygraph_asmi "
            "score FILE --model MODEL --out SCORED`"
        )
    answer = UnmaskedAnswer.of_row(content)
    if answer is None:
        raise ValueError(
            "prompt, answer, settings or scores were changed after it was scored, or by another "
            f"release: {AGAIN}"
        )
    if missing := [name for name in MACHINE if name not in answer.settings]:
        raise ValueError(f"{', '.join(missing)} not recorded, as of a model with hooks: {AGAIN}")
    return answer


def _made_with(answer: UnmaskedAnswer) -> dict[str, Any]:
    """What all scores of a calibration must share; samples that were passed differ in number."""
    settings = answer.compared_settings
    more = ("layer", "attention_in_use", "samples", "prompt_format", *MACHINE)
    shared = ASMIConfig.key_of(settings) | {name: settings.get(name) for name in more}
    shared["model"] = Path(answer.model).name
    return {name: value for name, value in shared.items() if name != "num_samples"}


def _spare(first: Row, others: Sequence[Row]) -> dict[str, np.ndarray] | None:
    """Signals of unlabelled rows that were scored as the first labelled one; None for no row."""
    try:
        given = [row for row in others if not is_blank(row.content.get("answer"))]
        answers = saved_answers([first, *given])[1:]
    except ValueError as error:
        raise ValueError(f"unlabelled {error}") from error
    signals = [answer.signals for answer in answers if answer.answered]
    return _columns(signals) if signals else None


def scorer_for(
    rows: Iterable[Row], model: str | None = None, settings: Mapping[str, Any] | None = None,
    **loading: Any,
) -> "Scorer":  # fmt: skip
    """The model that scored the rows, or one by name, with the rows' settings or others."""
    from lm_polygraph_asmi.scoring.scorer import Scorer

    answers = filter(None, (UnmaskedAnswer.of_row(row.content) for row in rows))
    answer = next(answers, None)
    if model is None and answer is None:
        raise ValueError("expected rows that `score --out` wrote, or the name of a model")
    machine = ASMIConfig.names("machine")
    saved = answer.settings if answer else {}
    config = ASMIConfig.from_dict({n: v for n, v in saved.items() if n not in machine})
    name = model or loadable(answer.model if answer else "")
    return Scorer(name, config.replace(**settings or {}), **loading)


def loadable(model: str) -> str:
    """The name that loads a model again: the demo's model is recorded by its folder."""
    from lm_polygraph_asmi.host.loading import SMOLLM2
    from lm_polygraph_asmi.host.smollm2 import smollm2_source

    with suppress(FileNotFoundError):
        if Path(model) == smollm2_source()[0]:
            return SMOLLM2
    return model


def _features(answers: Sequence[UnmaskedAnswer], scorer: "Scorer") -> dict[str, np.ndarray]:
    """What a learned score reads, (n, width) by group, from one unmasked pass a row.

    Of the tokens that were scored: as text, a saved answer that was cut off would get an end.
    """
    from lm_polygraph_asmi.scoring.unmasked import read

    tables = [read(scorer, one.prompt, one.ids, states=True).features for one in answers]
    return {name: np.vstack([features[name] for features in tables]) for name in tables[0]}


def digests_of(prompts: Sequence[Any], answers: Sequence[str]) -> list[str]:
    """Sorted `answer_digest` of answers as texts without their ends."""
    return sorted(answer_digest(*pair) for pair in zip(prompts, answers, strict=True))


def _shared_settings(answers: Sequence[UnmaskedAnswer]) -> dict[str, Any]:
    """What all answers share, and how they end."""
    first, *others = (answer.compared_settings for answer in answers)
    ends = sorted({each["answer_end"] for each in (first, *others) if "answer_end" in each})
    left_out = ("model", "answer_end")
    shared = {
        name: value
        for name, value in first.items()
        if name not in left_out and all(each.get(name, math.nan) == value for each in others)
    }
    stops = [answer.settings["stop"] for answer in answers if "stop" in answer.settings]
    shared |= {"answer_ends": ends, "stop": stops[0] if stops else []}
    return dict(parse_json(to_json(shared)))
