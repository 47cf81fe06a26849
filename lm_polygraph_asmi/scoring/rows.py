"""Read rows of prompts and answers from a file, and score them one after the other."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from lm_polygraph_asmi.inputs import Request, as_chat, parse_request, parse_row
from lm_polygraph_asmi.scoring.sheet import is_sheet
from lm_polygraph_asmi.tables import LINES, SEPARATORS, TABLES, Row, read_table, text_of_file
from lm_polygraph_asmi.validation import check_one_of

ROW_ERRORS = (ValueError, FloatingPointError)
"""Errors caused by one row's content or numbers. Any other error ends the scoring of all rows."""
_JSON_ROW = r"""[\[{].*["'](prompt|messages)["']\s*:"""
TEXTS = ("", ".txt", ".md", ".prompt")  # suffixes of files whose whole text is one prompt


class Outcome(NamedTuple):
    """The result of a row, or its error.

    Example:
        >>> (outcome,) = scorer.score_many([{"id": "q1", "answer": " Brask"}])
        >>> isinstance(outcome, Outcome), outcome.result, outcome.error
        (True, None, 'expected a text, or an object with a "prompt", got the fields id, answer')
    """

    index: int  # type: ignore[assignment]  # position among the rows, from 0; hides tuple.index
    id: Any  # the row's id; None if it has none
    result: Any  # a `Score` from a `Scorer`, a `Decision` from a `Decider`; None if the row failed
    error: str | None  # why the row failed


@runtime_checkable
class ScoresRows(Protocol):
    """An object that scores rows: a `Scorer` or a `Decider`."""

    result_type: ClassVar[type]

    def score_many(self, rows: Iterable[Any]) -> Iterator[Outcome]:
        """An outcome for each row, in order."""

    def known_fingerprints(self) -> dict[str, str]:
        """Hashes of model and tokenizer; empty for a model that cannot be identified."""

    def differences(self, row: Mapping[str, Any]) -> list[str]:
        """How a written row ("there") differs from what this object would write ("here")."""


def outcomes(
    run: Callable[..., Any], rows: Iterable[Any], on_error: str, id_field: str
) -> Iterator[Outcome]:
    """Score rows as they arrive. For the arguments, see `Scorer.score_many`.

    Args:
        run: scores one request; its keyword arguments are the parts of the request.
    """
    check_one_of("on_error", on_error, ("return", "raise"))
    for index, row in enumerate(rows):
        content, error = (row.content, row.error) if isinstance(row, Row) else (row, None)
        row_id = content.get(id_field) if isinstance(content, Mapping) else None
        result = None
        try:
            if error is not None:  # this row of a file could not be read
                raise ValueError(error)
            result = run(**parse_row(content))
        except ROW_ERRORS as failure:
            if on_error == "raise":
                raise
            error = str(failure) or repr(failure)
        yield Outcome(index, row_id, result, error)


def request_of(content: Mapping[str, Any]) -> Request:
    """The request that a row describes. Raises ValueError as `parse_row` and `parse_request` do."""
    return parse_request(**parse_row(content))


def checked(row: Row) -> Row:
    """The row; with an error added if no model could score it."""
    if row.error is None:
        try:
            request_of(row.content)
        except ValueError as error:
            return row._replace(error=str(error))
    return row


def in_chat(content: Mapping[str, Any]) -> dict[str, Any]:
    """A row's content, with a prompt that is text turned into chat messages."""
    prompt = content.get("prompt")
    return {**content, "prompt": as_chat(prompt)} if isinstance(prompt, str) else dict(content)


def read_rows(path: str | Path) -> Iterator[Row]:
    """Rows of JSON lines, CSV or Parquet (`read_table`), or the whole text of a file as one prompt.

    A text file's final line break and byte order mark are removed. Raises ValueError: the suffix is
    unknown; the text is not UTF-8; the file is a sheet of labels; or a text file holds rows.
    """
    suffix = Path(path).suffix.lower()
    if suffix in (*LINES, *TABLES):
        for row in read_table(path, ("prompt", "messages")):
            if is_sheet(row.content):
                raise ValueError(
                    f"{path} is a sheet of labels, not of questions: pass the file that was scored"
                )
            yield row
        return
    if suffix not in TEXTS:
        raise ValueError(
            f"{path}: expected rows in a file {', '.join((*LINES, *TABLES))}, or one prompt in a "
            ".txt file"
        )
    text = text_of_file(path)
    if not text.strip():
        raise ValueError(f"{path}: expected a prompt, got an empty file")
    if _holds_rows(text):
        raise ValueError(
            f"{path}: expected the text of one prompt, but the file holds rows. Name it .csv, or "
            "write one JSON object per line to a .jsonl file. If all of it is one prompt, write "
            'it as a line {"prompt": "..."} to a .jsonl file'
        )
    yield Row(1, {"prompt": re.sub("\r\n?", "\n", text).removesuffix("\n")})


def _holds_rows(text: str) -> bool:
    """Whether a text holds a line of JSON with a prompt, or a table header with a prompt column."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if (
        re.match(rf"(?s)\s*{_JSON_ROW}", text)
        or any(re.match(_JSON_ROW, line) for line in lines)
        or sum(re.fullmatch(r"\{.*\},?", line) is not None for line in lines) > 1
    ):
        return True
    for line, separator in product(lines[:-1], (*SEPARATORS, "|")):
        names = [name.strip(" \"'").lower() for name in line.split(separator)]
        words = len(names) > 1 and all(re.fullmatch(r"\w+", name) for name in names)
        if words and {"prompt", "messages"} & {*names}:  # not prose, which has spaces
            return True
    return False
