"""Score many answers: rows one by one, or tables of rows."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lm_polygraph_asmi.files import to_json
from lm_polygraph_asmi.scoring.result import Score
from lm_polygraph_asmi.validation import TOKENS, check_one_of, describe_fields

if TYPE_CHECKING:
    import pyarrow as pa

    from lm_polygraph_asmi.model import PrefixCache
    from lm_polygraph_asmi.scoring.prepared import PreparedModel

FAILURES = (ValueError, TypeError, ArithmeticError, RuntimeError, LookupError, NotImplementedError)
"""Errors of a bad row; templates and tokenizers may raise any of them."""
SCORE_FIELDS = ("prompt", "answer", "samples")
"""Fields of a row passed to `Scorer.score`."""
FIELDS = (*SCORE_FIELDS, "offsets")
"""All fields of a row; `offsets` are passed to `Score.with_spans`."""
COMPACT = ("text", "u", "mi", "agreement", "vote", "alternative")
"""Fields of each token with `tokens="compact"`."""


class Outcome(NamedTuple):
    """The score of a row, or its error.

    Attributes:
        index: position among the rows, from 0.
        id: the row's id; None without.
        score: None if the row could not be scored.
        error: why not; None if it was scored.

    Example:
        >>> (outcome,) = scorer.score_many([{"id": "q1", "answer": " Brask"}])
        >>> isinstance(outcome, Outcome), outcome.score, outcome.error
        (True, None, 'expected a text, or an object with a "prompt", got the fields id, answer')
    """

    index: int  # type: ignore[assignment]  # hides tuple.index
    id: Any
    score: Score | None
    error: str | None


def attempt(
    scorer: "PreparedModel", index: int, row: Any, prefix_cache: "PrefixCache", id_field: str = "id"
) -> tuple[Outcome, Exception | None]:
    """Score one row: the outcome, and its exception if it failed.

    Args:
        prefix_cache: keys and values of the row before.
    """
    row_id = row.get(id_field) if isinstance(row, Mapping) else None
    try:
        content: Any = {"prompt": row} if isinstance(row, str) else row
        if not isinstance(content, Mapping) or content.get("prompt") is None:
            raise ValueError(
                f'expected a text, or an object with a "prompt", got {describe_fields(content)}'
            )
        answer, samples = (content.get(name) for name in SCORE_FIELDS[1:])
        score = scorer.score_answer(content["prompt"], answer, samples, prefix_cache)
        if content.get("offsets") is not None:
            score = score.with_spans(content["offsets"])
        return Outcome(index, row_id, score, None), None
    except FAILURES as failure:
        return Outcome(index, row_id, None, str(failure) or repr(failure)), failure


def score_together(scorer: "PreparedModel", rows: Sequence[Mapping[str, Any]]) -> Iterator[Outcome]:
    """Outcomes of a batch of rows, from the scorer's result cache if it has the batch.

    The batch is one entry, because the reuse of prefixes makes a row's last digits depend on the
    rows before it. Not stored after a RuntimeError, such as too little memory. Fields that do not
    change scores, such as `id`, are not part of the key.
    """
    from lm_polygraph_asmi.model import PrefixCache  # imports torch

    key = scorer.batch_key([{name: row.get(name) for name in FIELDS} for row in rows])
    stored = scorer.result_cache.get(key)
    if stored is not None:
        for outcome, row in zip(stored, rows, strict=True):
            yield outcome._replace(id=row.get("id"))
        return
    prefix_cache, outcomes, cacheable = PrefixCache(), [], True
    for index, row in enumerate(rows):
        outcome, failure = attempt(scorer, index, row, prefix_cache)
        cacheable = cacheable and not isinstance(failure, RuntimeError)
        outcomes.append(outcome)
        yield outcome
    if cacheable:
        scorer.result_cache.put(key, outcomes)


def token_records(score: Score, tokens: str) -> list[dict[str, Any]] | None:
    """One dictionary per token, with all or the compact fields; None with "none"."""
    if tokens == "none":
        return None
    rows = [asdict(token) for token in score.tokens]
    if tokens == "compact":
        rows = [{name: row[name] for name in COMPACT} for row in rows]
    return rows


def without_nan(value: Any) -> Any:
    """A value of a column as `score` takes it: arrays as lists, NaN as None."""
    if isinstance(value, np.ndarray):
        return [without_nan(part) for part in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        return {name: without_nan(part) for name, part in value.items()}
    if type(value).__name__ == "NAType":  # of pandas, which is not imported for it
        return None
    if isinstance(value, list | tuple):
        return [without_nan(part) for part in value]
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
    "asmi_settings": str,
    "asmi_warnings": str,
    "asmi_error": str,
}
"""Columns that `score_batch` adds, with their type (or None)."""


def score_batch(
    columns: Mapping[str, Sequence[Any]], scorer: "PreparedModel", tokens: str = "compact"
) -> dict[str, Any]:
    """Score a batch of rows passed as columns, as data engines do.

    Without global state: batches may be scored on any machine, in any order, and repeatedly. A
    batch that the scorer's `result_cache` holds is not scored again.

    Args:
        columns: name -> array or list, all of one length: `prompt`, optionally `answer`, `samples`,
            and `offsets` as for `Scorer.score`; None or NaN: the row has none. Other
            columns are passed through.
        scorer: model and settings.
        tokens: fields of each token, as JSON: "none", "compact" or "full".

    Returns:
        The input's columns as they are, and those of `OUTPUT` as object arrays; None: no value.
        `asmi_score` in nats, higher = more fragile; `asmi_answer`: the model's greedy answer, if
        the row has none; `asmi_error`: why a row has no score.

    Raises:
        ValueError: no column `prompt`, columns of different lengths, or named as one of `OUTPUT`.

    Example:
        >>> columns = {"question": [7, 8], "prompt": [prompt, None], "answer": [" Edda Holm", " ?"]}
        >>> scored = score_batch(columns, scorer, tokens="none")
        >>> scored["question"], scored["asmi_score"][0] >= 0, scored["asmi_score"][1]
        ([7, 8], True, None)
    """
    check_one_of("tokens", tokens, TOKENS)
    if "prompt" not in columns:
        raise ValueError(
            f"expected a column 'prompt', got {', '.join(map(repr, columns)) or 'none'}"
        )
    clashing = sorted(OUTPUT.keys() & columns.keys())
    if clashing:
        raise ValueError(f"columns {clashing} would be overwritten by the scores: rename them")
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"expected columns of one length, got {lengths}")
    names = [name for name in FIELDS if name in columns]
    values = zip(*(columns[name] for name in names), strict=True)
    rows = [dict(zip(names, map(without_nan, row), strict=True)) for row in values]
    scored = [
        output_of(outcome, row, tokens)
        for row, outcome in zip(rows, score_together(scorer, rows), strict=True)
    ]
    return {**columns, **{name: _objects([row[name] for row in scored]) for name in OUTPUT}}


def with_output(table: "pa.Table", scored: Sequence[Mapping[str, Any]]) -> "pa.Table":
    """The table with the columns of `OUTPUT` in the types of Arrow; its own stay unchanged."""
    import pyarrow as pa

    types = {float: pa.float64(), int: pa.int64(), bool: pa.bool_(), str: pa.string()}
    for name, kind in OUTPUT.items():
        table = table.append_column(name, pa.array([row[name] for row in scored], types[kind]))
    return table


def output_of(outcome: Outcome, row: Mapping[str, Any], tokens: str) -> dict[str, Any]:
    """Values of the columns of `OUTPUT` for one row."""
    score = outcome.score
    if score is None:
        return dict.fromkeys(OUTPUT) | {"asmi_error": outcome.error}
    return {
        "asmi_score": score.score,
        "asmi_msp": score.msp,
        "asmi_counted": score.counted,
        "asmi_answered": score.answered,
        "asmi_answer": score.answer if row.get("answer") is None else None,
        "asmi_text": score.scored_text,
        "asmi_percentile": score.percentile,
        "asmi_error_probability": score.error_probability,
        "asmi_accept": score.accept,
        "asmi_tokens": None if tokens == "none" else to_json(token_records(score, tokens)),
        "asmi_settings": to_json(score.settings),
        "asmi_warnings": to_json(score.warnings) if score.warnings else None,
        "asmi_error": None,
    }


def _objects(values: Iterable[Any]) -> np.ndarray:
    values = list(values)
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array
