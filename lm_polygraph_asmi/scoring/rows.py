"""Many answers from a file: JSON lines or Parquet in, the same out.

Rows are read, scored and written in batches of `BATCH`, each an entry of the scorer's result cache.
So a killed run, started again, writes the same file.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lm_polygraph_asmi.files import check_unlocked, parse_json, partial_of, to_json, writing
from lm_polygraph_asmi.scoring.many import (
    FIELDS,
    Outcome,
    Rows,
    output_of,
    with_output,
    without_nan,
)
from lm_polygraph_asmi.validation import TOKENS, check_new, check_one_of, describe_fields

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

BATCH = 16
"""Rows scored together: few, since a kill loses up to one batch."""
ROW_GROUP = 4096
"""Rows of a row group of an output in Parquet."""
ROWS = (".jsonl", ".jsonlines", ".ndjson")
"""Suffixes of files with a row on each line."""
COPIED_FIELDS = {"prompt", "answer"}
"""Fields of an output line that an input may have; they are copied unchanged."""
TABLES = (".csv", ".tsv", ".xls", ".xlsx")
"""Tables that are not read: they would be taken for one prompt."""

MAGIC = {
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip, as .xlsx and .docx are",
    b"PAR1": "Parquet",
    b"\x28\xb5\x2f\xfd": "Zstandard",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
}
"""First bytes of files that are no text in UTF-8 -> what they are."""
ROW_FIELDS = {"prompt", "messages"}
"""Fields by which a JSON object is taken for a row."""
ARRAY = "the file holds a JSON array or object: write one object per line, to .jsonl"


class Row(NamedTuple):
    """A line of the input.

    Attributes:
        number: line number from 1, blank lines counted, as an editor shows it.
        content: `prompt`, optionally `answer` and `samples` (as for `score`); other fields are
             passed through.
        error: why the line cannot be read; None if it can.
    """

    number: int
    content: dict[str, Any]
    error: str | None = None


def row_count(path: str | Path) -> int:
    """Number of rows that `read_rows` yields; raises its errors."""
    if _is_parquet(path):
        return _parquet(path).metadata.num_rows
    return sum(1 for _ in read_rows(path))


def read_rows(path: str | Path) -> Iterator[Row]:
    """Rows of a JSON-lines (.jsonl, .ndjson) or Parquet file, or one prompt from text.

    One by one. Blank lines are skipped. A text file's final line break and byte order mark are
    removed.

    Raises:
        ValueError: a .json file, another kind of table, a file that is not UTF-8, or one whose name
            hides what it holds, such as JSON lines in .txt.
    """
    suffix = Path(path).suffix.lower()
    if suffix == ".json":
        raise ValueError(
            f"{path}: expected .jsonl (one object per line), .parquet or .txt (one prompt), got "
            ".json"
        )
    if suffix in TABLES:
        raise ValueError(
            f"{path}: expected .parquet, .jsonl (one object per line; pandas: to_json(FILE, "
            f"orient='records', lines=True)) or .txt (one prompt), got {suffix}"
        )
    if _is_parquet(path):
        contents = (row for table in _tables(path) for row in _to_rows(path, table))
        yield from (Row(number, content) for number, content in enumerate(contents, start=1))
        return
    _check_bytes(path)
    try:
        if suffix not in ROWS:
            text = Path(path).read_text(encoding="utf-8-sig")
            if not text.strip():
                raise ValueError(f"{path}: expected a prompt, got an empty file")
            _check_prompt(path, text)
            yield Row(1, {"prompt": text.removesuffix("\n")})
            return
        with Path(path).open(encoding="utf-8-sig", newline="\n") as lines:
            filled = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
            for first, (number, line) in enumerate(filled):
                if first == 0 and (line.lstrip().startswith("[") or line.strip() == "{"):
                    raise ValueError(f"{path}: {ARRAY}")
                yield _parsed(number, line)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8: {error}") from error


def _check_bytes(path: str | Path) -> None:
    """Raise ValueError for a file that begins as no text in UTF-8 does."""
    with Path(path).open("rb") as file:
        start = file.read(256)
    kind = next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), None)
    if kind is None and b"\0" in start:
        kind = "UTF-16, or no text (NUL bytes)"
    if kind is not None:
        raise ValueError(
            f"{path}: expected UTF-8 text, got {kind}: save it as UTF-8, unpack it, or name it by "
            "its kind"
        )


def _check_prompt(path: str | Path, text: str) -> None:
    """Raise ValueError for a text that holds rows rather than one prompt."""
    lines = [line for line in text.splitlines() if line.strip()]
    values = [_json(line.rstrip().removesuffix(",")) for line in lines]
    objects = [value for value in values if isinstance(value, dict)]
    has_row = any(value.keys() & ROW_FIELDS for value in objects)
    only_rows = all(line.lstrip().startswith(("{", "#", "//")) for line in lines)  # or comments
    if (has_row and only_rows) or len(objects) == len(lines) > 1:
        raise ValueError(f"{path}: the file holds JSON objects, one per line: rename it to .jsonl")
    whole = _json(text)
    listed = whole if isinstance(whole, list) else [whole]
    if any(isinstance(value, dict) and value.keys() & ROW_FIELDS for value in listed):
        raise ValueError(f"{path}: {ARRAY}")
    columns = [name.strip(' "').lower() for name in re.split("[,;\t]", lines[0])]
    is_header = len(columns) > 1 and all(len(name.split()) < 3 for name in columns)  # no sentence
    if "prompt" in columns and is_header and len(lines) > 1:
        raise ValueError(
            f"{path}: the file holds a table with a column 'prompt': write .parquet or .jsonl"
        )


def _json(text: str) -> Any:
    """The value of a JSON text; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_parquet(path: str | Path) -> bool:
    return Path(path).suffix.lower() == ".parquet"


def _parquet(path: str | Path) -> "pq.ParquetFile":
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path, memory_map=True)
    except pa.ArrowException as error:
        raise ValueError(f"{path}: expected a Parquet file: {error}") from error


def _tables(path: str | Path) -> "Iterator[pa.Table]":
    """A Parquet file in tables of at most `BATCH` rows."""
    import pyarrow as pa

    return (pa.Table.from_batches([batch]) for batch in _parquet(path).iter_batches(BATCH))


def _to_rows(path: str | Path, table: "pa.Table") -> list[dict[str, Any]]:
    try:
        return [without_nan(row) for row in table.to_pylist()]
    except (OverflowError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}: a value cannot be read ({error}): leave its column out, or write .parquet"
        ) from error


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


def reserved(scorer: Rows) -> set[str]:
    """Fields of an output line that an input must not have."""
    return {*scorer.fields, "row", "error"} - COPIED_FIELDS


def misspelt(names: Iterable[str]) -> dict[str, str]:
    """Unknown field -> known field with a similar name that is missing."""
    present = set(names)
    similar = {
        name: get_close_matches(name, sorted(set(FIELDS) - present), n=1, cutoff=0.8)
        for name in sorted(present - set(FIELDS))
    }
    return {name: close[0] for name, close in similar.items() if close}


def in_chat(content: dict[str, Any]) -> dict[str, Any]:
    """A row's content with a text prompt as chat messages."""
    if not isinstance(content.get("prompt"), str):
        return content
    return content | {"prompt": [{"role": "user", "content": content["prompt"]}]}


def score_rows(scorer: Rows, rows: Iterable[Row]) -> Iterator[tuple[Row, Outcome]]:
    """Rows with their outcomes, in order; `rows` are taken `BATCH` at a time.

    `Outcome.index` is the position among all rows.

    Args:
        scorer: a `Scorer`, or a `Decider`.
    """
    remaining, index = iter(rows), 0
    while batch := list(islice(remaining, BATCH)):
        errors = {row.number: row.error or _unusable(scorer, row.content) for row in batch}
        scored = scorer.run_batch([row.content for row in batch if errors[row.number] is None])
        for row in batch:
            error = errors[row.number]
            outcome = Outcome(0, row.content.get("id"), None, error)
            yield row, (next(scored) if error is None else outcome)._replace(index=index)
            index += 1
        next(scored, None)  # after its last row, the batch is stored


def _unusable(scorer: Rows, content: Mapping[str, Any]) -> str | None:
    """Why no line of an output can have these fields; None if one can."""
    if clashing := sorted(reserved(scorer) & set(content)):
        return f"expected no fields {clashing}, which the output uses: rename or remove them"
    try:
        to_json(content, str)
    except ValueError as error:
        return str(error)
    return None


def line_of(row: Row, outcome: Outcome, scorer: Rows, tokens: str = "full") -> str:
    """A line of an output in JSON lines, without its line break.

    Args:
        tokens: fields of each token: "none", "compact" or "full".

    Returns:
        `row`, then the result's `to_dict` (nats, higher = more uncertain) or `error`, and the
        input's fields, which stay unchanged.
    """
    line: dict[str, Any] = {"row": row.number}
    result = outcome.result
    if result is None:
        clashing = reserved(scorer) & set(row.content)
        input_fields = {"line": row.content} if clashing else row.content
        failed = line | {"error": outcome.error}
        try:
            return to_json(failed | input_fields, str)
        except ValueError:  # it has no JSON, as the error says
            return to_json(failed | {"line": ascii(row.content)})
    line |= result.to_line(tokens)
    line |= {n: v for n, v in row.content.items() if v is not None or n not in line}
    return to_json(line | {"digest": result.digest(line)}, str)


def score_file(
    scorer: Rows,
    source: str | Path,
    out: str | Path,
    tokens: str | None = None,
    change: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> Iterator[tuple[Row, Outcome]]:
    """Score the rows of a file into another one.

    Written as OUT.partial, locked, and renamed when complete.

    Args:
        scorer: a `Scorer`, or a `Decider`; with its result cache, a killed run resumes.
        source: as for `read_rows`.
        out: .jsonl, with lines as of `line_of`; or .parquet, if the source is, with its columns
            and `scorer.columns`.
        tokens: fields of each token: "none", "compact" or "full"; None: full in JSON lines,
            compact in Parquet.
        change: of a row's content before it is scored; in Parquet, the columns written stay.

    Yields:
        Each row and its outcome.

    Raises:
        ValueError: another kind of `out`, one that exists or that another program is writing, or
            columns that the scores would overwrite.
    """
    check_out(source, out, scorer.columns)
    tokens = tokens or ("compact" if _is_parquet(out) else "full")
    check_one_of("tokens", tokens, TOKENS)
    with writing(out) as partial:
        if _is_parquet(out):
            yield from _score_tables(scorer, source, partial, tokens, change)
            return
        rows = (row._replace(content=change(row.content)) for row in read_rows(source))
        with partial.open("w", encoding="utf-8") as file:
            for row, outcome in score_rows(scorer, rows):
                file.write(line_of(row, outcome, scorer, tokens) + "\n")
                file.flush()
                yield row, outcome


def check_out(source: str | Path, out: str | Path, output: Mapping[str, type]) -> None:
    """Raise ValueError unless the rows of `source` can be written to `out`, with these columns."""
    for file in (Path(out), partial_of(out)):
        if file.resolve() == Path(source).resolve():
            raise ValueError(f"cannot write {file}: it is the file of prompts")
    if _is_parquet(out) and _is_parquet(source):
        names = _parquet(source).schema_arrow.names
        if twice := sorted(name for name, times in Counter(names).items() if times > 1):
            raise ValueError(f"{source}: expected each column once, got {twice} several times")
        if "prompt" not in names:
            raise ValueError(
                f"{source}: expected a column 'prompt', got {', '.join(map(repr, names)) or 'none'}"
            )
        if clashing := sorted(output.keys() & set(names)):
            raise ValueError(
                f"{source}: columns {clashing} would be overwritten by the scores: rename them"
            )
    elif Path(out).suffix.lower() not in ROWS:
        raise ValueError(f"expected a .jsonl file, or .parquet for rows in Parquet; got {out}")
    check_new(out)
    check_unlocked(out)


def _score_tables(
    scorer: Rows,
    source: str | Path,
    out: Path,
    tokens: str,
    change: Callable[[dict[str, Any]], dict[str, Any]],
) -> Iterator[tuple[Row, Outcome]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    output = scorer.columns
    schema = with_output(_parquet(source).schema_arrow.empty_table(), output, []).schema
    number, finished = 0, []
    with pq.ParquetWriter(out, schema) as writer:
        for table in _tables(source):
            # Other columns may hold values that Python has no type for.
            columns = table.select([name for name in (*FIELDS, "id") if name in table.column_names])
            rows, scored = list(map(change, columns.to_pylist())), []
            for content, outcome in zip(rows, scorer.run_batch(rows), strict=True):
                number += 1
                scored.append(output_of(outcome, content, output, tokens))
                yield Row(number, content), outcome
            finished.append(with_output(table, output, scored))
            if len(finished) * BATCH >= ROW_GROUP:
                writer.write_table(pa.concat_tables(finished))
                finished = []
        if finished:
            writer.write_table(pa.concat_tables(finished))
