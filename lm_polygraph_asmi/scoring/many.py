"""Score many answers: rows one by one, or tables of rows."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

    from lm_polygraph_asmi.results.cache import ResultCache
    from lm_polygraph_asmi.scoring.text import Request


FAILURES = (ValueError, FloatingPointError, RuntimeError, MemoryError)
"""Errors of a row: its content, its numbers, or what it asks of the device; others are ours."""
FIELDS = ("prompt", "answer", "samples")
"""Fields of a row, as for `Scorer.score`."""


class Result(Protocol):
    """What is made of a row: a `Score`, or a `Decision`."""

    def to_line(self, tokens: str) -> dict[str, Any]:
        """Fields of a line of an output."""

    def to_columns(self, tokens: str) -> dict[str, Any]:
        """Values of columns of an output."""

    @staticmethod
    def digest(line: Mapping[str, Any]) -> str:
        """Hash of what in a line belongs together."""


class Rows(Protocol):
    """A `Scorer`, or a `Decider`: what takes rows.

    Attributes:
        columns: columns of an output, with their type (or None).
        fields: fields of an output line.
    """

    columns: dict[str, type]
    fields: frozenset[str]

    def run_batch(self, rows: Sequence[Mapping[str, Any]]) -> "Iterator[Outcome]":
        """Outcomes of a batch of rows, from the result cache if it has the batch."""


class Outcome(NamedTuple):
    """The result of a row, or its error.

    Attributes:
        index: position among the rows, from 0.
        id: the row's id; None without.
        result: a `Score`, or of a `Decider` a `Decision`; None if the row failed.
        error: why it failed; None if it did not.

    Example:
        >>> (outcome,) = scorer.score_many([{"id": "q1", "answer": " Brask"}])
        >>> isinstance(outcome, Outcome), outcome.result, outcome.error
        (True, None, 'expected a text, or an object with a "prompt", got the fields id, answer')
    """

    index: int  # type: ignore[assignment]  # hides tuple.index
    id: Any
    result: Any
    error: str | None


def attempts(
    run: "Callable[[Request], Any]", rows: Iterable[Any], id_field: str = "id"
) -> Iterator[tuple[Outcome, Exception | None]]:
    """Outcomes of rows, each with its exception if it failed.

    Args:
        run: scores or decides a request.
    """
    from lm_polygraph_asmi.scoring.text import row_request

    for index, row in enumerate(rows):
        row_id = row.get(id_field) if isinstance(row, Mapping) else None
        result, failed = None, None
        try:
            result = run(row_request(row))
        except FAILURES as failure:
            result, failed = None, failure
        error = None if failed is None else str(failed) or repr(failed)
        yield Outcome(index, row_id, result, error), failed


def one_by_one(
    run: "Callable[[Request], Any]", rows: Iterable[Any], on_error: str, id_field: str
) -> Iterator[Outcome]:
    """Outcomes of rows as they arrive; `on_error`: "raise" or "return"."""
    for outcome, failure in attempts(run, rows, id_field):
        if failure is not None and on_error == "raise":
            raise failure
        yield outcome


def run_batch(
    run: "Callable[[Request], Any]",
    rows: Sequence[Mapping[str, Any]],
    cache: "ResultCache",
    key: dict[str, Any],
) -> Iterator[Outcome]:
    """Outcomes of a batch of rows, from the result cache if it has the batch.

    Not stored after a RuntimeError, such as too little memory. Fields that do not change results,
    such as `id`, are not part of the key.
    """
    stored = cache.get(key)
    if stored is not None:
        for outcome, row in zip(stored, rows, strict=True):
            yield outcome._replace(id=row.get("id"))
        return
    finished, cacheable = [], True
    for outcome, failure in attempts(run, rows):
        cacheable = cacheable and not isinstance(failure, RuntimeError)
        finished.append(outcome)
        yield outcome
    if cacheable:
        cache.put(key, finished)


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
    "asmi_tokens": str,
    "asmi_settings": str,
    "asmi_warnings": str,
    "asmi_error": str,
}
"""Columns that `score_batch` adds with a `Scorer`, with their type (or None)."""


def with_output(
    table: "pa.Table", output: Mapping[str, type], values: Sequence[Mapping[str, Any]]
) -> "pa.Table":
    """The table with the columns of an output in the types of Arrow; its own stay unchanged."""
    import pyarrow as pa

    types = {float: pa.float64(), int: pa.int64(), bool: pa.bool_(), str: pa.string()}
    for name, kind in output.items():
        table = table.append_column(name, pa.array([row[name] for row in values], types[kind]))
    return table


def output_of(
    outcome: Outcome, row: Mapping[str, Any], output: Mapping[str, type], tokens: str
) -> dict[str, Any]:
    """Values of the columns of an output for one row."""
    values = dict.fromkeys(output) | {"asmi_error": outcome.error}
    if outcome.result is not None:
        values |= outcome.result.to_columns(tokens)
        if row.get("answer") is not None:
            values["asmi_answer"] = None
    return values
