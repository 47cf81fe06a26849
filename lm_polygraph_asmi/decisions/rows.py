"""Calibrate on labelled rows, with the signals that `score --out` saved.

The signal can also be a column of any table; then no model is loaded. "column:NAME" is an
uncertainty (higher = more uncertain), "column:-NAME" a confidence (higher = more certain).
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from lm_polygraph_asmi.analysis.clusters import cluster_codes
from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.analysis.risk_control import ordered_threshold, thinned_rows
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.decisions.calibration import MACHINE, Calibration, Sample, config_of
from lm_polygraph_asmi.decisions.fit import CalibrationOptions, fit
from lm_polygraph_asmi.decisions.labels import (
    clusters_of,
    digest_of_texts,
    labels_in,
    labels_of,
    question_of,
    with_labels,
)
from lm_polygraph_asmi.files import parse_json, to_json
from lm_polygraph_asmi.inputs import LABELS
from lm_polygraph_asmi.scoring.provenance import NAMES, loadable, names_that_count
from lm_polygraph_asmi.scoring.result import UnmaskedAnswer
from lm_polygraph_asmi.scoring.sheet import is_sheet, key_of, write_sheet
from lm_polygraph_asmi.scoring.signals import column_of
from lm_polygraph_asmi.tables import Row, each, placing, read_table
from lm_polygraph_asmi.validation import describe_fields, listed

if TYPE_CHECKING:
    from lm_polygraph_asmi.scoring.scorer import Scorer

Rows = str | Path | Iterable[Row | Mapping[str, Any]]
Answered = list[tuple[Row, UnmaskedAnswer]]
"""Pairs of a row and its answer, for rows whose answer is not empty."""
FEW = 5
"""If there are fewer labelled or unlabelled answers than this, do not test whether the labelled
ones were chosen by a signal: they may be the most certain by chance."""
DECIDED = ("accept", "reason", "signal", "value", "threshold", "calibration")
"""Fields of a decision that are written beside a row of a table."""
SCORE = "`polygraph_asmi score ROWS --model M --out answers.jsonl --sheet labels.csv`"


def calibrate_rows(
    rows: Rows,
    risk: float,
    confidence: float = 0.95,
    *,
    labels: str | Path | None = None,
    unlabelled: Rows = (),
    scorer: "Scorer | None" = None,
    **options: Any,
) -> Calibration:
    """Calibrate on labelled answers: find a threshold with a risk guarantee.

    Args:
        rows: a file that `score_file` wrote, or its rows, which record the model and the settings.
            Rows without a label (`correct` or `quality`) and empty answers are left out.
        risk, confidence: see `CalibrationOptions`.
        labels: the sheet of these rows, filled with labels.
        unlabelled: scored rows like later ones; their signals are the thresholds to test.
        scorer: reads the hidden states for "learned". None: the recorded model is loaded.
        options: further fields of `CalibrationOptions`. The default of `signal` is the signal
            that sorts the sheet `labels`, or "best" for an unsorted sheet.

    Example:
        >>> run = calibrate_rows("answers-of-smollm2.jsonl", risk=0.1, resamples=50)
        >>> run.n, run.errors, run.guarantee.threshold  # far too few for a guarantee
        (8, 4, None)
    """
    given = options.get("signal")
    asked = CalibrationOptions(risk, confidence, **options | {"signal": given or "best"})
    every, about = scored_rows(rows, asked.signal), dict[str, Any]()
    if isinstance(rows, str | Path):
        about["name"] = Path(rows).name
    if labels is not None:
        sheet = labels_in([labels], every)
        every = with_labels(every, sheet.labels)
        if sheet.order is not None:
            if given and given != sheet.order:
                raise ValueError(
                    f"{labels} is sorted by {sheet.order}, the most certain answers first, so "
                    f"only {sheet.order} can be tested, not {given!r}: best and learned need "
                    "labels of random rows"
                )
            if unlabelled:
                raise ValueError(
                    "a sorted sheet already has its unlabelled rows: leave --unlabelled out"
                )
            asked = replace(asked, signal=sheet.order)
            return _calibrate_sorted(every, sheet.labels.keys(), asked, about)
    with placing(rows) if labels is None else nullcontext():  # else a label may be the sheet's
        known, about["left_out"] = _labelled_answers(every, asked)
    inputs = [row for row, _ in known]
    quality: list[Any] = [row.content.get("quality") for row in inputs]
    return fit(
        columns_of(known),
        Labelled(
            np.array(labels_of(inputs, asked.right_from), dtype=bool),
            clusters_of(inputs),
            None if None in quality else quality,
            asked.resamples,
        ),
        replace(asked, signal=known[0][1].settings["method"]) if given == "score" else asked,
        features=lambda: _features(known, scorer),
        unlabelled=_unlabelled_signals(inputs, scored_rows(unlabelled, asked.signal), asked.signal),
        **about,
        **_described(known),
    )


def _labelled_answers(rows: Sequence[Row], asked: CalibrationOptions) -> tuple[Answered, str]:
    """Rows with a label and a non-empty answer, and a phrase on how many others there are.

    Raises ValueError: there are none, or the labelled ones are the most certain answers.
    """
    wrong = labels_of(rows, asked.right_from)
    labelled = [row for row, label in zip(rows, wrong, strict=True) if label is not None]
    others = [row for row, label in zip(rows, wrong, strict=True) if label is None]
    known = answered(labelled, asked.signal)
    if not known:
        raise ValueError(
            f"expected labelled answers, got {len(labelled) or 'none'} among {len(rows)} rows"
            f'{", all empty" if labelled else ""}: fill "correct" (true or false), or "quality"'
        )
    if not column_of(asked.signal)[0]:
        others = [row for row in others if row.content.get("digest")]
    _check_random(known, answered(others, asked.signal))
    left_out = {
        "without a label": len(rows) - len(labelled),
        "empty": len(labelled) - len(known),
    }
    return known, ", ".join(f"{number} {kind}" for kind, number in left_out.items() if number)


def _check_random(known: Answered, others: Answered) -> None:
    """Raise ValueError if the labelled answers are the most certain by a signal, so not random."""
    if min(len(known), len(others)) < FEW:
        return
    labelled, rest = columns_of(known), columns_of(others)
    for name in labelled:
        if labelled[name].max() < rest[name].min():
            raise ValueError(
                f"the {len(known)} labelled answers are the surest by {name}, so they are not "
                f"random: label random rows, or write a sheet with --surest-first {name}"
            )


def _calibrate_sorted(
    rows: Sequence[Row], keys: Collection[str], asked: CalibrationOptions, about: Mapping[str, Any]
) -> Calibration:
    """Calibrate with labels of the most certain answers, and say what to label next.

    Args:
        rows: scored rows with the labels of the sheet.
        keys: keys of the sheet's rows.
        asked: `signal` is the signal that sorts the sheet.
        about: other fields of `Calibration`.
    """
    known, largest, _ = surest_first(rows, asked.signal, asked.largest)
    inputs = [row for row, _ in known]
    if keys != {key_of(row.content) for row in inputs}:
        raise ValueError(
            "the sheet has other answers than those that would be sorted now: rows were scored "
            "again, added or removed, or --largest differs. Ranks are among all answers, so rows "
            "must not change after the sheet was written: write another sheet with `score`, and "
            "name the same --largest, if any, in both commands"
        )
    wrong = np.array(labels_of(inputs, asked.right_from), dtype=float)  # NaN: no label
    values = columns_of(known)[asked.signal]
    rule, to_label, spare = ordered_threshold(values, wrong, asked.risk, asked.confidence, largest)
    ended = "No further label helps: " + (
        "the first test failed, as too many of the surest answers are wrong to show a rate of at "
        f"most {asked.risk:.3g}. Begin again with more new answers, a better model's, or "
        "another signal, and new labels."
        if rule.threshold is None and not rule.limits
        else "the sequence of tests has ended."
    )
    return Calibration(
        signal=asked.signal,
        guarantee=rule,
        n=int(np.isfinite(wrong).sum()),
        errors=int(np.nansum(wrong)),
        signals={},
        right_from=asked.right_from,
        following=(
            f"Next test: label {len(to_label)} more, of rank {to_label[0] + 1} to "
            f"{to_label[-1] + 1}. It passes if at most {spare} of them "
            f"{'is' if spare == 1 else 'are'} wrong"
            f"{'.' if rule.threshold is None else '; if not, this threshold stays.'}"
            if len(to_label)
            else ended
        ),
        sample=Sample(values, wrong, list(map(str, range(len(wrong))))),
        **about,
        **_described(known),
    )


def write_ordered_sheet(
    scores: str | Path, sheet: str | Path, signal: str, largest: int | None = None
) -> tuple[int, str]:
    """Write a sheet of scored answers, sorted by a signal, at most one per cluster.

    Args:
        scores: a file that `score_file` wrote.
        sheet: a new CSV file. People label from its top and may stop at any row.
        signal: the signal that sorts answers, the most certain first, and later decides. "best" and
            "learned" are not possible.
        largest: most answers of one cluster in later use, as for `calibrate_rows`.

    Returns:
        The number of answers in the sheet, and why clusters have none there; or empty.
    """
    known, largest, together = surest_first(scored_rows(scores), signal, largest)
    write_sheet((row.content for row, _ in known), sheet, signal)
    if largest == 1:
        return len(known), ""
    such = f", such as rows {listed(together, most=3)}" if len(together) == largest else ""
    return len(known), (
        f"An answer is in the sheet with chance 1 in {largest}, since a cluster may have {largest} "
        f"answers{such}. For a longer sheet, keep one row of each cluster, now and in later use; "
        "or, if they share only instructions, give each row its own `cluster`."
    )


def surest_first(
    rows: Sequence[Row], signal: str, largest: int | None
) -> tuple[Answered, int, list[int]]:
    """Scored answers, at most one per cluster, the most certain first.

    Clusters are thinned by `largest` (`thinned_rows`), so some have no answer. The draw is seeded
    with the keys of the rows, so the same answers give the same draw.

    Returns:
        The answers; `largest`, or the most answers of one cluster if it is None; and the numbers of
        the rows of the largest cluster.
    """
    known = answered([row for row in rows if row.content.get("digest")], signal)
    if not known:
        raise ValueError("expected scored answers to label, got none")
    if signal not in (computed := known[0][1].signals):
        raise ValueError(f"expected a signal of {', '.join(computed)}; got {signal!r}")
    known.sort(key=lambda pair: key_of(pair[0].content))
    codes = cluster_codes(clusters_of([row for row, _ in known]))
    sizes = np.bincount(codes)
    together = [known[place][0].number for place in np.flatnonzero(codes == sizes.argmax())]
    largest = largest or int(sizes.max())
    seed = crc32("".join(key_of(row.content) for row, _ in known).encode())
    alone = [known[place] for place in thinned_rows(codes, largest, seed)]
    alone.sort(key=lambda pair: pair[1].signals[signal])
    return alone, largest, sorted(together)


def _described(known: Answered) -> dict[str, Any]:
    """Fields of a calibration that describe the answers it was made from."""
    answers = [answer for _, answer in known]
    lengths = [answer.prompt_tokens for answer in answers]
    return {
        "label_source": "their labels",
        "model": answers[0].model,
        "settings": _shared_settings(answers),
        "prompt_tokens": sorted(map(float, lengths)) if all(lengths) else [],
        "question_digests": _digests([row for row, _ in known]),
    }


def columns_of(known: Answered) -> dict[str, np.ndarray]:
    """Signal -> values (n,); empty if there is no answer."""
    names = known[0][1].signals if known else ()
    return {name: np.array([answer.signals[name] for _, answer in known]) for name in names}


def answered(rows: Sequence[Row], signal: str) -> Answered:
    """Answers with the signal, from a column of any table, or as `score --out` saved it.

    Empty answers are left out. Raises ValueError with the row: the column has no finite number; or
    the errors of `saved_answers`.
    """
    column, _ = column_of(signal)
    if column:
        read = each(rows, lambda row: column_answer(row.content, signal))
    else:
        read = saved_answers(rows)
    if column and len(read) > 1 and len({answer.signals[signal] for answer in read}) == 1:
        raise ValueError(
            f"column {column!r} has the same number in all rows: name a column that varies"
        )
    return [pair for pair in zip(rows, read, strict=True) if pair[1].answered]


def column_answer(content: Mapping[str, Any], signal: str) -> UnmaskedAnswer:
    """A row as an answer with only this signal. ValueError if it has no finite number."""
    name, sign = column_of(signal)
    if name in (*LABELS, *DECIDED, "id", "row", "cluster"):
        raise ValueError(f"column {name!r} is not a score: name a column with a score")
    value = content.get(name)
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"column {name!r}: expected a number, got {value!r:.40}")
    return UnmaskedAnswer.of_table(content, {signal: sign * number})


def scored_rows(rows: Rows, signal: str = "") -> list[Row]:
    """Scored rows, from a file or as passed.

    If the signal is a column, any table with this column is accepted. Raises ValueError: a sheet,
    another kind of table, or rows without scores.
    """
    column, _ = column_of(signal)
    if isinstance(rows, str | Path):
        scored = list(read_table(rows, [column] if column else ()))
    else:
        scored = [r if isinstance(r, Row) else Row(n, dict(r)) for n, r in enumerate(rows, start=1)]
    if any(is_sheet(row.content) for row in scored[:1]):
        raise ValueError("expected the scored answers, got a sheet: name the sheet with --labels")
    if not column and scored and not any(row.content.get("digest") for row in scored):
        with placing(rows):
            saved_answers(scored[:1])  # raises: score them first
    return scored


def saved_answers(rows: Sequence[Row]) -> list[UnmaskedAnswer]:
    """Answers and signals of rows that `score --out` wrote, all with the same model and settings.

    Raises ValueError with the row: it was not scored, was changed later, or was scored with another
    model or other settings than the first row.
    """
    first = dict[str, Any]()

    def read(row: Row) -> UnmaskedAnswer:
        answer = _saved_answer(row.content)
        settings = _made_with(answer)
        first.update({} if first else settings)
        shared = first.keys() & settings.keys() - {*NAMES} | {*names_that_count(first, settings)}
        if other := [n for n in shared if first.get(n) != settings.get(n)]:
            listed = "; ".join(f"{n} {settings[n]!r}, not {first[n]!r}" for n in sorted(other))
            raise ValueError(
                f"scored otherwise than row {rows[0].number} ({listed}). Score all alike: {SCORE}"
            )
        return answer

    return each(rows, read)


def _saved_answer(content: Mapping[str, Any]) -> UnmaskedAnswer:
    if not content.get("digest"):
        raise ValueError(
            f"expected a row with scores, got {describe_fields(content)}: run {SCORE} first, fill "
            "the sheet's column `correct`, then calibrate with --labels labels.csv"
        )
    answer = UnmaskedAnswer.of_row(content)
    if answer is None:
        raise ValueError(
            "prompt, answer, settings or scores were changed after it was scored, or another "
            f"release scored it. Score it again: {SCORE}"
        )
    if missing := [name for name in MACHINE if name not in answer.settings]:
        raise ValueError(
            f"{', '.join(missing)} not recorded, since the model had hooks: remove them, and "
            f"score it again: {SCORE}"
        )
    return answer


def _made_with(answer: UnmaskedAnswer) -> dict[str, Any]:
    """What all scores of a calibration must share. The number of passed samples may differ."""
    settings = answer.compared_settings
    more = ("layer", "attention_in_use", "samples", "prompt_format", *MACHINE)
    shared = ASMIConfig.key_of(settings) | {name: settings.get(name) for name in more}
    shared["model"] = Path(answer.model).name
    return {name: value for name, value in shared.items() if name != "num_samples"}


def _unlabelled_signals(
    labelled: Sequence[Row], others: Sequence[Row], signal: str
) -> dict[str, np.ndarray]:
    """Signals of unlabelled rows, which must be scored like the labelled ones; empty if none."""
    with placing("unlabelled"):
        _, *spare = answered([labelled[0], *others], signal)
    if not {*_digests(labelled)}.isdisjoint(_digests(others)):
        raise ValueError(
            "unlabelled and labelled rows have questions in common: pass unlabelled rows of "
            "other questions"
        )
    return columns_of(spare)


def _features(known: Answered, scorer: "Scorer | None") -> dict[str, np.ndarray]:
    """Inputs of a learned score: group -> (n, width), from one unmasked pass per row.

    The scored token ids are read again. If texts were read, an end token would be added to them,
    even if the answer was cut off.
    """
    from lm_polygraph_asmi.scoring.scorer import Scorer

    row, answer = known[0]
    if scorer is None:
        scorer = Scorer(loadable(answer.model), config_of(answer.settings))
    if others := scorer.differences(row.content):
        raise ValueError(
            f"row {row.number} was scored with another model or other parameters "
            f"({'; '.join(others)}): use that model, or score again: {SCORE}"
        )
    tables = [
        scorer.read(
            each.prompt, each.ids, states=True, **each.settings.get("template", {})
        ).features
        for _, each in known
    ]
    return {name: np.vstack([features[name] for features in tables]) for name in tables[0]}


def _digests(rows: Sequence[Row]) -> list[str]:
    """Sorted hashes of the rows' questions."""
    return sorted(digest_of_texts(question_of(row.content)) for row in rows)


def _shared_settings(answers: Sequence[UnmaskedAnswer]) -> dict[str, Any]:
    """The settings that all answers share, and the ways in which the answers end."""
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
