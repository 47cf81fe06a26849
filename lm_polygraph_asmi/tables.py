"""Read rows of JSON lines, CSV and Parquet strictly, with one reader for all interfaces.

If a row cannot be read, it gets an error, and the next rows are read. If a file cannot be divided
into rows, ValueError is raised. No type is guessed: all cells of a CSV file are text, and values of
other files have the types that the file gives them.
"""

import csv
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lm_polygraph_asmi.files import parse_json, to_json
from lm_polygraph_asmi.validation import describe_fields, identity, listed

Value = TypeVar("Value")

LINES = (".jsonl", ".jsonlines", ".ndjson")
"""Suffixes of files with one JSON object per line."""
TABLES = (".csv", ".tsv", ".parquet")
SEPARATORS = (",", ";", "\t")
"""Separators in a CSV file. The first with which the header has a needed column is used."""
AT_ONCE = 1000
"""Number of rows of a Parquet file that are in memory at the same time."""


class Row(NamedTuple):
    """One row of a file."""

    number: int  # from 1; in JSON lines, the number of the line, where blank lines count
    content: dict[str, Any]  # its fields; perhaps only its text as `line` if it cannot be read
    error: str | None = None  # why the row cannot be read; None: it can


def read_table(
    path: str | Path, needed: Collection[str] = (), strict_text: bool = True
) -> Iterator[Row]:
    """Rows of a file whose suffix is in `LINES` or `TABLES`.

    Args:
        path: the file.
        needed: names of columns. A table must have at least one of them.
        strict_text: whether a CSV file must be UTF-8. If False, other bytes are replaced by a
            mark, for files of which only names, keys and labels are read.

    Raises:
        ValueError: the suffix or encoding is wrong; a table lacks the needed columns or has a
            column twice; or quotes do not match, so that the ends of rows are unknown.
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
    """A file's text without a byte order mark. ValueError if it is not UTF-8, or has NUL bytes."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig", "strict" if strict else "replace")
        if "\0" in text:
            raise ValueError("NUL bytes")
    except ValueError as error:  # UnicodeDecodeError is a ValueError
        raise ValueError(
            f"{path}: expected text in UTF-8, got other bytes ({error}). If it is UTF-16, save it "
            "as UTF-8; if it is gzip or zip, unpack it; if it is Parquet, name it .parquet"
        ) from error
    return text


def _json_lines(path: str | Path) -> Iterator[Row]:
    lines = [(n, line) for n, line in enumerate(text_of_file(path).split("\n"), 1) if line.strip()]
    if lines and (lines[0][1].lstrip().startswith("[") or lines[0][1].strip() == "{"):
        raise ValueError(
            f"{path}: expected one JSON object per line, got a list, or an object over several "
            "lines: write each row on its own line"
        )
    for number, line in lines:
        try:
            content = parse_json(line)
            if not isinstance(content, dict):
                raise ValueError(f"expected a JSON object, got {describe_fields(content)}")
        except ValueError as error:
            yield Row(number, {"line": line.strip()}, str(error))
        else:
            yield Row(number, content)


def _csv(path: str | Path, text: str, needed: Collection[str]) -> Iterator[Row]:
    limit = csv.field_size_limit(sys.maxsize)  # a passage may exceed the default limit
    try:
        header, separator = _header(path, text, needed)
        _check_columns(path, header, needed)
        cell = rf'(?:"[^"]*(?:""[^"]*)*"|[^"{separator}\r\n]*)'
        well_formed = re.compile(rf"{cell}(?:{separator}{cell})*\r?\n?")
        for number, (raw, cells) in islice(enumerate(_records(path, text, separator)), 1, None):
            content: dict[str, Any] = {"line": raw.strip("\r\n")}
            problem = None
            if not well_formed.fullmatch(raw):
                problem = (
                    "a cell that is not in quotes has a quote or a carriage return: write the "
                    "cell in quotes, and each quote in it twice"
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
    """Names of the columns, and the separator with which the header has a needed column."""
    headers = dict[str, list[str]]()
    for separator in SEPARATORS:
        with suppress(ValueError):  # with a wrong separator, quotes may not match
            headers[separator] = next(_records(path, text, separator), ("", []))[1]
    right = [each for each, header in headers.items() if {*header} & {*needed}]
    separator = (right or sorted(headers, key=lambda each: -len(headers[each])) or [","])[0]
    return headers.get(separator, []), separator


def _records(path: str | Path, text: str, separator: str) -> Iterator[tuple[str, list[str]]]:
    """Records of a CSV file, each as raw text and as cells. Blank lines are left out."""
    taken: list[str] = []

    def lines() -> Iterator[str]:
        for line in re.findall(r"[^\n]*\n|[^\n]+", text):  # a lone "\r" does not end a line
            taken.append(line)
            yield line

    reader, number = csv.reader(lines(), delimiter=separator, strict=True), 0
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            # After a lone carriage return, drop the line, unless it is inside an open quoted cell.
            if "new-line character" not in str(error) or "".join(taken).count('"') % 2:
                raise ValueError(
                    f"{path}, row {number} (line {reader.line_num}): {error}. The end of this row "
                    "is unknown: write each cell that has quotes in quotes, and each of its "
                    "quotes twice"
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
        contents = chain.from_iterable(batch.to_pylist() for batch in file.iter_batches())
        for number, content in enumerate(contents, start=1):
            for name in in_json:
                content[name] = content[name] and parse_json(content[name])
            yield Row(number, plain(content))


def write_parquet(records: Callable[[], Iterable[Mapping[str, Any]]], path: str | Path) -> None:
    """Write rows as a Parquet file, with few of them in memory at a time.

    `records` is called twice. A column with lists, objects, or values of several types is written
    as JSON, and has the JSON type.
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
    types = {  # a column without values is text
        name: flat.get("".join(kind or ["str"]), pa.json_()) for name, kind in kinds.items()
    }

    def column(name: str, rows: Sequence[Mapping[str, Any]]) -> pa.Array:
        values = [row.get(name) for row in rows]
        if types[name] != pa.json_():
            return pa.array(values, types[name])
        texts = [None if value is None else to_json(value) for value in values]
        return pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts, pa.string()))

    partial, left = Path(f"{path}.writing"), iter(records())
    try:
        with parquet.ParquetWriter(partial, schema := pa.schema(types)) as writer:
            while rows := list(islice(left, AT_ONCE)):
                writer.write_batch(pa.record_batch([column(n, rows) for n in types], schema=schema))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def plain(value: Any) -> Any:
    """A value of a table as plain Python: arrays become lists.

    NaN, and the marks of pandas and Parquet for missing values, become None.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    missing = type(value).__name__ in ("NAType", "NaTType")  # types of pandas, without its import
    return None if missing or (isinstance(value, float) and value != value) else value


def _check_columns(path: str | Path, names: list[str], needed: Collection[str]) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{path}: the column {twice[0]!r} occurs twice: keep one")
    if needed and not {*names} & {*needed}:
        raise ValueError(
            f"{path}: expected a column {' or '.join(map(repr, needed))}, got "
            f"{listed(map(repr, names), most=8) or 'none'}"
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
    """The result of `read` for each row. ValueError names a row that cannot be read."""
    values = []
    for row in rows:
        with placing(f"row {row.number}"):
            if row.error is not None:
                raise ValueError(row.error)
            values.append(read(row))
    return values


def identity_of(name: str, value: Any) -> str:
    """`identity` of a field's value. Errors begin with the field's name."""
    with placing(f'"{name}"'):
        return identity(value)
