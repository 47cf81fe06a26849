"""Rows of prompts and answers: read from a file, and scored one after the other."""

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
"""Errors that concern one row: its content, or its numbers. Any other ends the scoring of rows."""
_JSON_ROW = r"""[\[{].*["'](prompt|messages)["']\s*:"""
TEXTS = ("", ".txt", ".md", ".prompt")
"""Suffixes of files whose text is one prompt."""


class Outcome(NamedTuple):
    """The result of a row, or its error.

    Example:
        >>> (outcome,) = scorer.score_many([{"id": "q1", "answer": " Brask"}])
        >>> isinstance(outcome, Outcome), outcome.result, outcome.error
        (True, None, 'expected a text, or an object with a "prompt", got the fields id, answer')
    """

    index: int  # type: ignore[assignment]  # position among the rows, from 0; hides tuple.index
    id: Any  # the row's; None without
    result: Any  # a `Score`, or of a `Decider` a `Decision`; None if the row failed
    error: str | None  # why it failed


@runtime_checkable
class ScoresRows(Protocol):
    """What scores rows: a `Scorer`, or a `Decider`."""

    result_type: ClassVar[type]

    def score_many(self, rows: Iterable[Any]) -> Iterator[Outcome]:
        """An outcome for each row, in order."""

    def known_fingerprints(self) -> dict[str, str]:
        """Hashes of model and tokenizer, or nothing for a model that cannot be identified."""

    def differences(self, row: Mapping[str, Any]) -> list[str]:
        """How a written row was made otherwise than this would make it, in words."""


def outcomes(
    run: Callable[..., Any], rows: Iterable[Any], on_error: str, id_field: str
) -> Iterator[Outcome]:
    """Outcomes of rows as they arrive; arguments as of `Scorer.score_many`.

    Args:
        run: scores a request, whose parts are its arguments.
    """
    check_one_of("on_error", on_error, ("return", "raise"))
    for index, row in enumerate(rows):
        content, error = (row.content, row.error) if isinstance(row, Row) else (row, None)
        row_id = content.get(id_field) if isinstance(content, Mapping) else None
        result = None
        try:
            if error is not None:  # the row of a file that could not be read
                raise ValueError(error)
            result = run(**parse_row(content))
        except ROW_ERRORS as failure:
            if on_error == "raise":
                raise
            error = str(failure) or repr(failure)
        yield Outcome(index, row_id, result, error)


def request_of(content: Mapping[str, Any]) -> Request:
    """The request of a row; ValueError as of `parse_row` and `parse_request`."""
    return parse_request(**parse_row(content))


def checked(row: Row) -> Row:
    """The row, with an error if no model can score it."""
    if row.error is None:
        try:
            request_of(row.content)
        except ValueError as error:
            return row._replace(error=str(error))
    return row


def in_chat(content: Mapping[str, Any]) -> dict[str, Any]:
    """A row's content with a text prompt as chat messages."""
    prompt = content.get("prompt")
    return {**content, "prompt": as_chat(prompt)} if isinstance(prompt, str) else dict(content)


def read_rows(path: str | Path) -> Iterator[Row]:
    """Rows of JSON lines, CSV or Parquet (`read_table`), or the text of a file as one prompt.

    A text file's final line break and byte order mark are removed. Raises ValueError: a file of
    another suffix, text that is not UTF-8, a sheet of labels, or a file whose name hides what it
    holds, such as rows in .txt.
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
            f"{path}: the file holds rows: name it .csv, or write one JSON object per line, to "
            '.jsonl. If all of it is one prompt, write it as a line {"prompt": "..."} to .jsonl'
        )
    yield Row(1, {"prompt": re.sub("\r\n?", "\n", text).removesuffix("\n")})


def _holds_rows(text: str) -> bool:
    """Whether a text has a line of JSON with a prompt, or the header of a table with one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if re.match(rf"(?s)\s*{_JSON_ROW}", text) or any(re.match(_JSON_ROW, line) for line in lines):
        return True
    if sum(re.fullmatch(r"\{.*\},?", line) is not None for line in lines) > 1:
        return True
    for line, separator in product(lines[:-1], (*SEPARATORS, "|")):
        names = [name.strip(" \"'").lower() for name in line.split(separator)]
        words = len(names) > 1 and all(re.fullmatch(r"\w+", name) for name in names)
        if words and {"prompt", "messages"} & {*names}:  # in prose, several words
            return True
    return False
