"""Rows of prompts and answers: read from a file, and scored one after the other."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from lm_polygraph_asmi.files import parse_json
from lm_polygraph_asmi.validation import check_one_of, describe_fields

ROW_ERRORS = (ValueError, FloatingPointError)
"""Errors of a row, its content or its numbers; others are ours, or the machine's."""
ROWS = (".jsonl", ".jsonlines", ".ndjson")
"""Suffixes of files with a row on each line."""
TABLES = (".csv", ".parquet")
IN_JSON = ("row", "correct", "quality", "samples")
"""Columns of a table whose cells are JSON; others are text."""
DETAILS = "details"
"""Column of a table with all fields of a row's result, as one JSON object."""
MISNAMED = "the file holds rows: name it .csv, or write one JSON object per line, to .jsonl"


class Row(NamedTuple):
    """A row of a file."""

    number: int  # from 1; of JSON lines that of the line, blank lines counted
    content: dict[str, Any]  # `prompt`, maybe `answer` and `samples`, and other fields
    error: str | None = None  # why the row cannot be read


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


class Rows(Protocol):
    """What scores rows: a `Scorer`, or a `Decider`."""

    _result: ClassVar[type]

    def score_many(self, rows: Iterable[Any]) -> Iterator[Outcome]:
        """An outcome for each row, in order."""


def outcomes(
    run: Callable[..., Any], rows: Iterable[Any], on_error: str, id_field: str
) -> Iterator[Outcome]:
    """Outcomes of rows as they arrive; `run`: of prompt, answer and samples."""
    check_one_of("on_error", on_error, ("return", "raise"))
    for index, row in enumerate(rows):
        row_id = row.get(id_field) if isinstance(row, Mapping) else None
        result, error = None, None
        try:
            result = run(*row_parts(row))
        except ROW_ERRORS as failure:
            if on_error == "raise":
                raise
            error = str(failure) or repr(failure)
        yield Outcome(index, row_id, result, error)


def row_parts(row: Any) -> tuple[Any, Any, Any]:
    """Prompt, answer and samples of a row, a text or a mapping; ValueError: no prompt."""
    content: Any = {"prompt": row} if isinstance(row, str) else row
    if not isinstance(content, Mapping) or content.get("prompt") is None:
        raise ValueError(
            f'expected a text, or an object with a "prompt", got {describe_fields(content)}'
        )
    return content["prompt"], content.get("answer"), content.get("samples")


def score_rows(scorer: Rows, rows: Iterable[Row]) -> Iterator[tuple[Row, Outcome]]:
    """Rows of a file with their outcomes, in order; `scorer` may be a `Decider`."""
    for index, row in enumerate(rows):
        outcome = Outcome(index, row.content.get("id"), None, row.error)
        if row.error is None:
            (outcome,) = scorer.score_many([row.content])
        yield row, outcome._replace(index=index)


def in_chat(content: Mapping[str, Any]) -> dict[str, Any]:
    """A row's content with a text prompt as chat messages."""
    if not isinstance(content.get("prompt"), str):
        return dict(content)
    return {**content, "prompt": [{"role": "user", "content": content["prompt"]}]}


def read_rows(path: str | Path) -> Iterator[Row]:
    """Rows of JSON lines (.jsonl, .ndjson), CSV or Parquet; of another file, its text: one prompt.

    A text file's final line break and byte order mark are removed. Raises ValueError: text that is
    not UTF-8, or a file whose name hides what it holds, such as rows in .txt.
    """
    suffix = Path(path).suffix.lower()
    if suffix in TABLES:
        yield from (Row(n, content) for n, content in enumerate(_table(path, suffix), start=1))
        return
    text = _text(path)
    if suffix not in ROWS:
        if not text.strip():
            raise ValueError(f"{path}: expected a prompt, got an empty file")
        if _holds_rows(text):
            raise ValueError(f"{path}: {MISNAMED}")
        yield Row(1, {"prompt": re.sub("\r\n?", "\n", text).removesuffix("\n")})
        return
    filled = [(n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if filled and (filled[0][1].lstrip().startswith("[") or filled[0][1].strip() == "{"):
        raise ValueError(f"{path}: {MISNAMED}")
    yield from (_parsed(number, line) for number, line in filled)


def _text(path: str | Path) -> str:
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        text, problem = "\0", str(error)
    else:
        problem = "NUL bytes"
    if "\0" in text:
        raise ValueError(
            f"{path}: expected text in UTF-8, got other bytes ({problem}): save it as UTF-8 if it "
            "is UTF-16, unpack it if it is gzip or zip, or name it .parquet if it is that"
        )
    return text


def _holds_rows(text: str) -> bool:
    """Whether a text is a table with a column `prompt`, or JSON alone with such a field."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    columns = re.split("[,;\t]", lines[0].lower().replace('"', ""))
    if len(lines) > 1 and len(columns) > 1 and "prompt" in columns:
        return True
    in_json = all(line.startswith((*'{}[]"#', "//")) for line in lines)  # or comments
    return in_json and re.search(r'"(prompt|messages)"\s*:', text) is not None


def _parsed(number: int, line: str) -> Row:
    try:
        content = parse_json(line)
    except ValueError as error:
        return Row(number, {"line": line.rstrip("\r\n")}, str(error))
    if not isinstance(content, dict) or "prompt" not in content:
        missing = f'expected an object with a "prompt", got {describe_fields(content)}'
        kept = content if isinstance(content, dict) else {"line": line.strip()}
        return Row(number, kept, missing)
    return Row(number, content)


def _table(path: str | Path, suffix: str) -> list[dict[str, Any]]:
    """The rows of a table; empty cells of CSV are None."""
    import pandas as pd

    try:
        if suffix == ".csv":
            options: Any = {"dtype": str, "keep_default_na": False, "encoding": "utf-8-sig"}
            frame = pd.read_csv(path, **options).replace({"": None})
        else:
            frame = pd.read_parquet(path)
    except ValueError as error:
        raise ValueError(f"{path}: expected a table in {suffix[1:]} and UTF-8: {error}") from error
    if "prompt" not in frame.columns:
        raise ValueError(f"{path}: expected a column 'prompt', got {', '.join(frame.columns)}")
    return list(map(of_table, frame.to_dict("records")))


def of_table(cells: Mapping[Any, Any]) -> dict[str, Any]:
    """A row of a table: missing cells are None, and what is JSON becomes values.

    JSON are labels and samples, a prompt that is a list of objects, and `details`.
    """
    row = {str(name): plain(value) for name, value in cells.items()}
    for name in row.keys() & IN_JSON:
        row[name] = _of_json(row[name])
    if str(row.get("prompt")).startswith("[{"):
        row["prompt"] = _of_json(row["prompt"])
    details = _of_json(row.get(DETAILS))
    if not isinstance(details, dict) or "digest" not in details:
        return row
    del row[DETAILS]
    texts = {name: row.get(name) or "" for name in ("prompt", "answer")}  # CSV has no empty ones
    return row | texts | details


def _of_json(cell: Any) -> Any:
    """The value of a cell that is JSON, or true or false in any case; else the cell."""
    if not isinstance(cell, str):
        return cell
    try:
        return parse_json(cell.lower() if cell.lower() in ("true", "false") else cell)
    except ValueError:
        return cell


def plain(value: Any) -> Any:
    """A value of a table as plain Python: arrays as lists, missing values as None."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(part) for part in value]
    missing = type(value).__name__ in ("NAType", "NaTType")  # of pandas, not imported for it
    return None if missing or (isinstance(value, float) and value != value) else value
