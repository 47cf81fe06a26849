"""Score many answers: rows one by one, or tables of rows."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lm_polygraph_asmi.files import to_json
from lm_polygraph_asmi.scoring.result import Score

if TYPE_CHECKING:
    import pyarrow as pa


FAILURES = (ValueError, TypeError, ArithmeticError, RuntimeError, LookupError, NotImplementedError)
"""Errors of a bad row; templates and tokenizers may raise any of them."""
FIELDS = ("prompt", "answer", "samples", "offsets")
"""Fields of a row: of `Scorer.score`, and `offsets` of `Score.with_spans`."""
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
