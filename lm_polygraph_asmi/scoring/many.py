"""Many answers: an iterator of rows in, an iterator of outcomes out; or columns in, columns out."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lm_polygraph_asmi.scoring.result import Score
from lm_polygraph_asmi.validation import TOKENS, check_one_of, describe_fields

if TYPE_CHECKING:
    from lm_polygraph_asmi.scoring.scorer import Scorer

FAILURES = (ValueError, TypeError, ArithmeticError, RuntimeError, LookupError, NotImplementedError)
"""What a bad row raises. Templates and tokenizers raise whatever they like."""
GIVEN = ("prompt", "answer", "samples", "context")
"""Fields of a row that `Scorer.score` takes."""
FIELDS = (*GIVEN, "offsets")
"""And those of a row of a file: `offsets` go to `Score.with_spans`."""
COMPACT = ("text", "u", "mi", "agreement", "vote", "alternative")
"""What `tokens="compact"` keeps of each token."""


class Outcome(NamedTuple):
    """What became of a row.

    Attributes:
        index: its place among the rows, from 0.
        id: the row's own, None where it has none.
        score: None where it could not be scored.
        error: why it could not; None where it could.

    Example:
        >>> (found,) = scorer.score_many([{"id": "q1", "answer": " Brask"}])
        >>> isinstance(found, Outcome), found.score, found.error
        (True, None, 'expected a text, or an object with a "prompt", got the fields id, answer')
    """

    index: int  # type: ignore[assignment]  # what tuples call so is not needed here
    id: Any
    score: Score | None
    error: str | None


def outcome(
    scorer: "Scorer", index: int, row: Any, prefix_cache: Any, on_error: str, id_field: str
) -> Outcome:
    """Score one row over what is known of the one before."""
    own = row.get(id_field) if isinstance(row, Mapping) else None
    try:
        content: Any = {"prompt": row} if isinstance(row, str) else row
        if not isinstance(content, Mapping) or content.get("prompt") is None:
            raise ValueError(
                f'expected a text, or an object with a "prompt", got {describe_fields(content)}'
            )
        answer, samples, context = (content.get(name) for name in GIVEN[1:])
        found = scorer._score(content["prompt"], answer, samples, context, prefix_cache)
        if content.get("offsets") is not None:
            found = found.with_spans(content["offsets"])
        return Outcome(index, own, found, None)
    except FAILURES as failure:
        if on_error == "raise":
            raise
        return Outcome(index, own, None, str(failure) or repr(failure))


def token_records(score: Score, tokens: str) -> list[dict[str, Any]] | None:
    """What is told of a score's tokens; None where nothing is wanted."""
    if tokens == "none":
        return None
    rows = [asdict(token) for token in score.tokens]
    if tokens == "compact":
        rows = [{name: row[name] for name in COMPACT} for row in rows]
    return rows


def _plain(value: Any) -> Any:
    """A setting of a column as `score` takes it: arrays as lists, what is missing as None."""
    if isinstance(value, np.ndarray):
        return [_plain(part) for part in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and value != value else value


OUTPUT: dict[str, type] = {
    "asmi_score": float,
    "asmi_msp": float,
    "asmi_counted": int,
    "asmi_answered": bool,
    "asmi_answer": str,
    "asmi_text": str,
    "asmi_percentile": float,
    "asmi_error_probability": float,
    "asmi_accept": bool,
    "asmi_tokens": str,
    "asmi_sources": str,
    "asmi_settings": str,
    "asmi_warnings": str,
    "asmi_error": str,
}
"""Columns that `score_batch` adds, and what is in them besides None."""


def score_batch(
    columns: Mapping[str, Sequence[Any]], scorer: "Scorer", tokens: str = "compact"
) -> dict[str, np.ndarray]:
    """Score a batch of rows given as columns: for engines that hand data out in such pieces.

    Nothing global is set, read or written, and no row depends on another: a batch may be scored
    anywhere, in any order, and again.

    Args:
        columns: arrays or lists of one length by name: `prompt` and, if wanted, `answer`,
            `samples`, `context` and `offsets`, as `Scorer.score` takes them, None or NaN where a
            row has none. Others are passed through.
        scorer: model and settings.
        tokens: "none", "compact" or "full": what is told of each token, as JSON.

    Returns:
        The columns as they were given, and those of `OUTPUT`, in arrays of objects: None stands
        where there is nothing. `asmi_score` in nats, higher = more fragile; `asmi_answer`, the
        model's own answer, where none was given; `asmi_error`, why a row has no score.

    Raises:
        ValueError: no column `prompt`, columns of several lengths, or one that has a name of
            `OUTPUT`.

    Example:
        >>> columns = {"question": [7, 8], "prompt": [prompt, None], "answer": [" Edda Holm", " ?"]}
        >>> found = score_batch(columns, scorer, tokens="none")
        >>> found["question"], found["asmi_score"][0] >= 0, found["asmi_score"][1]
        (array([7, 8]), True, None)
    """
    check_one_of("tokens", tokens, TOKENS)
    if "prompt" not in columns:
        raise ValueError(f"no column 'prompt' among {', '.join(map(repr, columns)) or 'none'}")
    taken = sorted(OUTPUT.keys() & columns.keys())
    if taken:
        raise ValueError(f"columns {taken} are there already: the scores would go there")
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns differ in length: {lengths}")
    made: dict[str, list[Any]] = {name: [] for name in OUTPUT}
    asked = [name for name in FIELDS if name in columns]
    given = zip(*(columns[name] for name in asked), strict=True)
    rows = [dict(zip(asked, map(_plain, row), strict=True)) for row in given]
    for row, found in zip(rows, scorer.score_many(rows), strict=True):
        for name, value in _groups(found, tokens, row.get("answer") is None).items():
            made[name].append(value)
    return {name: np.asarray(column) for name, column in columns.items()} | {
        name: _objects(values) for name, values in made.items()
    }


def _groups(found: Outcome, tokens: str, own: bool) -> dict[str, Any]:
    score = found.score
    if score is None:
        return dict.fromkeys(OUTPUT) | {"asmi_error": found.error}
    return {
        "asmi_score": score.score,
        "asmi_msp": score.msp,
        "asmi_counted": score.counted,
        "asmi_answered": score.answered,
        "asmi_answer": score.answer if own else None,
        "asmi_text": score.scored_text,
        "asmi_percentile": score.percentile,
        "asmi_error_probability": score.error_probability,
        "asmi_accept": score.accept,
        "asmi_tokens": None if tokens == "none" else _json(token_records(score, tokens)),
        "asmi_sources": None
        if score.sources is None
        else _json({name: asdict(source) for name, source in score.sources.items()}),
        "asmi_settings": _json(score.settings),
        "asmi_warnings": _json(score.warnings) if score.warnings else None,
        "asmi_error": None,
    }


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _objects(values: Iterable[Any]) -> np.ndarray:
    values = list(values)
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found
