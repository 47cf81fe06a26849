"""Rows of files, read strictly by one reader for all doors: JSON lines, CSV and Parquet.

A row that cannot be read has an error, and the others are read on; a file that cannot be divided
into rows is refused. Nothing is guessed: all cells of a CSV are text, those of other files have the
types that the file says.
"""

import csv
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lm_polygraph_asmi.files import parse_json, to_json
from lm_polygraph_asmi.validation import describe_fields, identity

Value = TypeVar("Value")

LINES = (".jsonl", ".jsonlines", ".ndjson")
"""Suffixes of files with a JSON object on each line."""
TABLES = (".csv", ".tsv", ".parquet")
SEPARATORS = (",", ";", "\t")
"""What separates the cells of a CSV: the first by which its header has a column that is needed."""
AT_ONCE = 1000
"""Rows of a Parquet file that are in memory together."""
SHOWN = 8
"""Columns that a message lists."""


class Row(NamedTuple):
    """A row of a file."""

    number: int  # from 1; of JSON lines that of the line, blank lines counted
    content: dict[str, Any]  # its fields; of a row that cannot be read, maybe only its `line`
    error: str | None = None  # why the row cannot be read


def read_table(
    path: str | Path, needed: Collection[str] = (), strict_text: bool = True
) -> Iterator[Row]:
    """The rows of a file of `LINES` or `TABLES`, by its suffix.

    Args:
        path: the file.
        needed: names of columns of which a table must have one.
        strict_text: whether a CSV must be UTF-8; else what is not is replaced by a mark, for files
            of which only names, keys and labels are read.

    Raises:
        ValueError: another suffix, another encoding, a table without a needed column or with a
            column twice, or quotes that do not match, so that no one can tell where rows end.
    """
    suffix = Path(path).suffix.lower()
    if suffix in LINES:
        yield from _json_lines(path)
    elif suffix == ".parquet":
        yield from _parquet(path, needed)
    elif suffix in TABLES:
        yield from _csv(path, text_of_file(path, strict_text), needed)
    else:
        raise ValueError(f"{path}: expected a file {', '.join((*LINES, *TABLES))}")


def text_of_file(path: str | Path, strict: bool = True) -> str:
    """A file's text, without a byte order mark; ValueError: it is not in UTF-8, or has NUL."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig", "strict" if strict else "replace")
        if "\0" in text:
            raise ValueError("NUL bytes")
    except ValueError as error:  # UnicodeDecodeError is one
        raise ValueError(
            f"{path}: expected text in UTF-8, got other bytes ({error}): save it as UTF-8 if it "
            "is UTF-16, unpack it if it is gzip or zip, or name it .parquet if it is that"
        ) from error
    return text


def _json_lines(path: str | Path) -> Iterator[Row]:
    lines = [(n, line) for n, line in enumerate(text_of_file(path).split("\n"), 1) if line.strip()]
    if lines and (lines[0][1].lstrip().startswith("[") or lines[0][1].strip() == "{"):
        raise ValueError(
            f"{path}: expected one JSON object per line, got a list, or an object over several "
            "lines: write each row on a line of its own"
        )
    for number, line in lines:
        try:
            content = parse_json(line)
        except ValueError as error:
            yield Row(number, {"line": line.strip()}, str(error))
            continue
        if isinstance(content, dict):
            yield Row(number, content)
        else:
            problem = f"expected a JSON object, got {describe_fields(content)}"
            yield Row(number, {"line": line.strip()}, problem)


def _csv(path: str | Path, text: str, needed: Collection[str]) -> Iterator[Row]:
    limit = csv.field_size_limit(sys.maxsize)  # a passage may be longer than the default allows
    try:
        header, separator = _header(path, text, needed)
        _check_columns(path, header, needed)
        cell = rf'(?:"[^"]*(?:""[^"]*)*"|[^"{separator}\r\n]*)'
        well_formed = re.compile(rf"{cell}(?:{separator}{cell})*\r?\n?")
        for number, (raw, cells) in enumerate(_records(path, text, separator)):
            if number == 0:
                continue
            content: dict[str, Any] = {"line": raw.strip("\r\n")}
            problem = None
            if not well_formed.fullmatch(raw):
                problem = (
                    "a quote or a carriage return in a cell that is not in quotes: write the cell "
                    "in quotes, and each quote in it twice"
                )
            elif len(cells) != len(header):
                problem = (
                    f"expected {len(header)} cells, as in the header, got {len(cells)}: a cell "
                    f"with {separator!r} or a line break must be in quotes"
                )
            else:
                content = {n: value or None for n, value in zip(header, cells, strict=True)}
            yield Row(number, content, problem)
    finally:
        csv.field_size_limit(limit)


def _header(path: str | Path, text: str, needed: Collection[str]) -> tuple[list[str], str]:
    """The names of the columns, and the separator by which one of them is needed."""
    headers = dict[str, list[str]]()
    for separator in SEPARATORS:
        with suppress(ValueError):  # by another separator, quotes may not match
            headers[separator] = next(_records(path, text, separator), ("", []))[1]
    right = [each for each, header in headers.items() if {*header} & {*needed}]
    separator = (right or sorted(headers, key=lambda each: -len(headers[each])) or [","])[0]
    return headers.get(separator, []), separator


def _records(path: str | Path, text: str, separator: str) -> Iterator[tuple[str, list[str]]]:
    """The records of a CSV, each as it is written and as its cells; blank lines are left out."""
    taken: list[str] = []

    def lines() -> Iterator[str]:
        for line in re.findall(r"[^\n]*\n|[^\n]+", text):  # a bare "\r" ends no line
            taken.append(line)
            yield line

    reader, number = csv.reader(lines(), delimiter=separator, strict=True), 0
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            # After a bare carriage return the line is left, unless a quoted cell goes on from it.
            if "new-line character" not in str(error) or "".join(taken).count('"') % 2:
                raise ValueError(
                    f"{path}, row {number} (line {reader.line_num}): {error}. Where this row ends "
                    "is unknown: write each cell that has quotes in quotes, and its quotes twice"
                ) from error
            cells = []
        raw = "".join(taken)
        taken.clear()
        if cells is None:
            return
        if cells or raw.strip():
            yield raw, cells
            number += 1


def _parquet(path: str | Path, needed: Collection[str]) -> Iterator[Row]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path}: expected a Parquet file: {error}") from error
    with file:
        schema = file.schema_arrow
        _check_columns(path, schema.names, needed)
        in_json = [field.name for field in schema if isinstance(field.type, pa.JsonType)]
        number = 0
        for batch in file.iter_batches():
            for content in batch.to_pylist():
                number += 1
                for name in in_json:
                    content[name] = content[name] and parse_json(content[name])
                yield Row(number, plain(content))


def write_parquet(records: Callable[[], Iterable[Mapping[str, Any]]], path: str | Path) -> None:
    """Write rows, which are read twice, as a Parquet file, with few in memory at a time.

    A column of lists and objects, or of values of several kinds, is JSON, and its type says so.
    """
    import pyarrow as pa
    from pyarrow import parquet

    kinds = dict[str, set[str]]()
    for record in records():
        for name, value in record.items():
            kind = (
                "large" if isinstance(value, int) and abs(value) >= 2**63 else type(value).__name__
            )
            kinds.setdefault(name, set()).update([] if value is None else [kind])
    flat = {"bool": pa.bool_(), "int": pa.int64(), "float": pa.float64(), "str": pa.string()}
    types = {  # of no value, text
        name: flat.get("".join(kind or ["str"]), pa.json_()) for name, kind in kinds.items()
    }

    def column(name: str, rows: Sequence[Mapping[str, Any]]) -> pa.Array:
        values = [row.get(name) for row in rows]
        if types[name] != pa.json_():
            return pa.array(values, types[name])
        texts = [None if value is None else to_json(value) for value in values]
        return pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts, pa.string()))

    partial, left = Path(f"{path}.writing"), iter(records())
    with parquet.ParquetWriter(partial, schema := pa.schema(types)) as writer:
        while rows := list(islice(left, AT_ONCE)):
            columns = [column(name, rows) for name in types]
            writer.write_batch(pa.record_batch(columns, schema=schema))
    partial.replace(path)


def plain(value: Any) -> Any:
    """A value of a table as plain Python: arrays as lists; None for NaN and other marks of pandas
    and Parquet for what is missing."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    missing = type(value).__name__ in ("NAType", "NaTType")  # of pandas, not imported for it
    return None if missing or (isinstance(value, float) and value != value) else value


def _check_columns(path: str | Path, names: list[str], needed: Collection[str]) -> None:
    listed = ", ".join(map(repr, names[:SHOWN])) + ", ..." * (len(names) > SHOWN)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{path}: the column {twice[0]!r} occurs twice: keep one")
    if needed and not {*names} & {*needed}:
        raise ValueError(
            f"{path}: expected a column {' or '.join(map(repr, needed))}, got {listed or 'none'}"
        )


@contextmanager
def placing(place: object) -> Iterator[None]:
    """Put the place, a text or a file, in front of the message of a ValueError; of others, none."""
    try:
        yield
    except ValueError as error:
        named = f"{place}: " if isinstance(place, str | Path) else ""
        raise ValueError(f"{named}{error}") from error


def each(rows: Iterable[Row], read: Callable[[Row], Value]) -> list[Value]:
    """What `read` makes of each row. ValueError, with the row's number: one that cannot be read."""
    values = []
    for row in rows:
        with placing(f"row {row.number}"):
            if row.error is not None:
                raise ValueError(row.error)
            values.append(read(row))
    return values


def identity_of(name: str, value: Any) -> str:
    """`identity` of a field, whose name is in the errors."""
    with placing(f'"{name}"'):
        return identity(value)
