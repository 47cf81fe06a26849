"""Very many rows in blocks: read, scored and written one by one, locally or on a Ray cluster.

A block is written to a temporary file and renamed when complete, so the next start skips it. A
killed run, a lost machine or a full disk loses only unfinished blocks. Blocks are independent of
each other and of the process that scores them.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from lm_polygraph_asmi.scoring.calibration import ROWS
from lm_polygraph_asmi.scoring.many import FIELDS, OUTPUT, score_batch
from lm_polygraph_asmi.validation import TOKENS, check_at_least_one, check_one_of

if TYPE_CHECKING:
    from lm_polygraph_asmi.scoring.scorer import Scorer

PLAN = ".blocks.json"
"""Input and settings of a folder of blocks. Hidden, so that the folder can be read as one table:
pandas, pyarrow, datasets and Spark skip such files."""
NUMBER = "asmi_row"
ADDED = {NUMBER, *OUTPUT}
"""Fields of a block that an input must not have."""
BATCH = 256
"""Rows of a Parquet file read at once."""
ENDS = 2**20
"""Bytes at either end of a file that identify it."""
ARROW = {float: pa.float64(), int: pa.int64(), bool: pa.bool_(), str: pa.string()}


class Block(NamedTuple):
    """A range of rows of the input.

    Attributes:
        number: from 0.
        row: index of its first row, from 0; blank lines do not count.
        rows: number of rows.
        at: position: in Parquet the row group and its first row; in JSON lines the first byte and
            the number of bytes.
    """

    number: int
    row: int
    rows: int
    at: tuple[int, int]


class Done(NamedTuple):
    """Outcome of a block.

    Attributes:
        number: of the block.
        rows: number of rows.
        failed: number of rows with an error instead of a score.
        error: why the block was not written; None if it was.
    """

    number: int
    rows: int
    failed: int
    error: str | None


def is_lines(path: str | Path) -> bool:
    return Path(path).suffix.lower() in ROWS


def blocks_of(source: str | Path, rows: int) -> list[Block]:
    """Blocks of a Parquet or JSON-lines file, at most `rows` rows each.

    Reads only the footer of Parquet; of JSON lines, the whole file once.

    Raises:
        ValueError: another kind of file, no column `prompt`, or no row.
    """
    check_at_least_one("block_rows", rows)
    if is_lines(source):
        blocks = list(_of_lines(source, rows))
    elif Path(source).suffix.lower() == ".parquet":
        blocks = list(_of_groups(source, rows))
    else:
        raise ValueError(f"{source}: expected a .parquet, .jsonl or .ndjson file")
    if not blocks:
        raise ValueError(f"{source}: expected at least one row, got none")
    return blocks


def _of_groups(source: str | Path, rows: int) -> Iterator[Block]:
    number = before = 0
    with pq.ParquetFile(source) as file:
        names = file.schema_arrow.names
        if "prompt" not in names:
            raise ValueError(
                f"{source}: expected a column 'prompt', got {', '.join(map(repr, names)) or 'none'}"
            )
        if taken := sorted(ADDED & set(names)):
            raise ValueError(
                f"{source}: columns {taken} would be overwritten by the scores: rename them"
            )
        for group in range(file.metadata.num_row_groups):
            size = file.metadata.row_group(group).num_rows
            for start in range(0, size, rows):
                yield Block(number, before + start, min(rows, size - start), (group, start))
                number += 1
            before += size


def _of_lines(source: str | Path, rows: int) -> Iterator[Block]:
    number = held = row = start = 0
    with Path(source).open("rb") as file:
        for line in file:
            held += bool(line.strip())
            if held == rows:
                yield Block(number, row, held, (start, file.tell() - start))
                number, row, held, start = number + 1, row + held, 0, file.tell()
        if held:
            yield Block(number, row, held, (start, file.tell() - start))


class _Rows:
    """The rows of a Parquet row group, in order.

    A group may be the whole file; at most a block and a batch are in memory.
    """

    def __init__(self, source: str, group: int) -> None:
        file = pq.ParquetFile(source, memory_map=True)
        self.batches = file.iter_batches(BATCH, row_groups=[group])
        self.held = file.schema_arrow.empty_table()
        self.start = 0

    def take(self, start: int, number: int) -> pa.Table:
        """`number` rows from `start`, which must not decrease between calls."""
        while self.start + len(self.held) < start + number:
            passed = min(start - self.start, len(self.held))
            batch = pa.Table.from_batches([next(self.batches)])
            self.held = pa.concat_tables([self.held.slice(passed), batch])
            self.start += passed
        return self.held.slice(start - self.start, number)


@lru_cache(maxsize=1)
def _rows_of(source: str, group: int) -> _Rows:
    return _Rows(source, group)


def _table_of(source: str, block: Block) -> pa.Table:
    group, start = block.at
    if start < _rows_of(source, group).start:  # another run over the same file
        _rows_of.cache_clear()
    return _rows_of(source, group).take(start, block.rows)


def _place(folder: Path, block: Block, source: str | Path) -> Path:
    suffix = ".jsonl" if is_lines(source) else ".parquet"
    return folder / f"block-{block.number:07d}{suffix}"


def score_block(
    scorer: "Scorer", source: str | Path, block: Block, folder: Path, tokens: str = "compact"
) -> Done:
    """Score one block and write it: the input's columns, `asmi_row`, and those of `OUTPUT`.

    A bad row gets `asmi_error`. An error of the whole block is returned, not raised.
    """
    place = _place(folder, block, source)
    unfinished = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        if is_lines(source):
            failed = _lines(scorer, source, block, unfinished, tokens)
        else:
            failed = _table(scorer, source, block, unfinished, tokens)
        unfinished.replace(place)
        for left in folder.glob(f".{place.name}.*"):  # left by killed processes
            left.unlink(missing_ok=True)
    except Exception as error:  # any error: the other blocks are still scored
        unfinished.unlink(missing_ok=True)
        _rows_of.cache_clear()  # its position is unknown after an error
        return Done(block.number, block.rows, 0, f"{type(error).__name__}: {error}")
    return Done(block.number, block.rows, failed, None)


def _table(scorer: "Scorer", source: str | Path, block: Block, place: Path, tokens: str) -> int:
    given = _table_of(str(source), block)
    rows = {name: given[name].to_pylist() for name in given.column_names}
    scored = score_batch(rows, scorer, tokens)
    columns = {name: pa.array(scored[name].tolist(), ARROW[kind]) for name, kind in OUTPUT.items()}
    numbers = pa.array(range(block.row, block.row + block.rows), pa.int64())
    table = given.append_column(NUMBER, numbers)  # the input's columns stay unchanged
    for name, column in columns.items():
        table = table.append_column(name, column)
    with place.open("wb") as file:
        pq.write_table(table, file)
        _kept(file)
    return sum(error is not None for error in scored["asmi_error"])


def _lines(scorer: "Scorer", source: str | Path, block: Block, place: Path, tokens: str) -> int:
    start, length = block.at
    with Path(source).open("rb") as file:
        file.seek(start)
        lines = [line for line in file.read(length).split(b"\n") if line.strip()]
    rows, errors = zip(*map(_parsed, lines), strict=True)
    columns = {name: [row.get(name) for row in rows] for name in FIELDS}
    scored = score_batch(columns, scorer, tokens)
    with place.open("wb") as file:
        for number, (line, row, error) in enumerate(zip(lines, rows, errors, strict=True)):
            content = row or {"line": line.decode("utf-8", "replace")}
            added = {name: scored[name][number] for name in OUTPUT}
            if error is not None:
                added["asmi_error"] = error
            text = json.dumps(content | {NUMBER: block.row + number} | added, ensure_ascii=False)
            # Half a surrogate pair is not UTF-8; it stays an escape.
            file.write(text.encode("utf-8", "backslashreplace") + b"\n")
        _kept(file)
    return sum(error is not None for error in scored["asmi_error"])


def _kept(file: IO[bytes]) -> None:
    """Force the file to disk before it is renamed."""
    file.flush()
    os.fsync(file.fileno())


def _parsed(line: bytes) -> tuple[dict[str, Any], str | None]:
    """Fields of a line (none if it cannot be scored), and the error or None."""
    try:
        content = json.loads(line)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        return {}, "ValueError: expected a JSON object"
    if taken := sorted(ADDED & set(content)):
        return {}, f"ValueError: fields {taken} would be overwritten by the scores: rename them"
    return content, None


def _fingerprint(source: str | Path) -> str:
    """Hash of a file's size, start and end."""
    size = Path(source).stat().st_size
    with Path(source).open("rb") as file:
        content = file.read(ENDS)
        file.seek(max(0, size - ENDS))
        content += file.read(ENDS)
    return hashlib.sha256(str(size).encode() + content).hexdigest()[:16]


def contents(*paths: str | Path) -> list[dict[str, str]]:
    """For each path: file name -> hash, of the file or a folder's files, to detect changed weights.

    Empty for anything else, such as a hub ID.
    """
    hashes = []
    for path in map(Path, paths):
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        hashes.append({file.name: _fingerprint(file) for file in files if file.is_file()})
    return hashes


def blocks_left(
    source: str | Path, folder: Path, block_rows: int, settings: Mapping[str, Any]
) -> list[Block]:
    """Blocks that are not in a folder yet; it is created if missing.

    Args:
        settings: everything that scores depend on, except the rows.

    Raises:
        ValueError: the folder is of another input or other settings, or holds something else.
    """
    blocks = blocks_of(source, block_rows)
    plan = {"input": _fingerprint(source), "block_rows": block_rows, "settings": settings}
    plan = json.loads(json.dumps(plan, default=str))
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / PLAN
    if note.exists():
        before = json.loads(note.read_text(encoding="utf-8"))
        if before != plan:
            differing = sorted(name for name in plan if before.get(name) != plan[name])
            raise ValueError(
                f"{folder} holds blocks with other {', '.join(differing)}: name another folder"
            )
    elif any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty and holds no blocks: name another folder")
    else:
        unfinished = folder / f"{PLAN}.{os.getpid()}"
        unfinished.write_text(json.dumps(plan), encoding="utf-8")
        unfinished.replace(note)
    return [block for block in blocks if not _place(folder, block, source).exists()]


def score_blocks(
    scorer: "Scorer", source: str | Path, blocks: Sequence[Block], folder: Path, tokens: str
) -> Iterator[Done]:
    """Score blocks one by one in this process."""
    check_one_of("tokens", tokens, TOKENS)
    _rows_of.cache_clear()  # the file may have changed
    for block in blocks:
        yield score_block(scorer, source, block, folder, tokens)


class Actor:
    """A Ray actor with its own model, which scores blocks."""

    def __init__(self, loading: Mapping[str, Any], source: str, folder: str, tokens: str) -> None:
        from lm_polygraph_asmi.scoring.loading import load

        self.scorer = load(**loading)
        self.source, self.folder, self.tokens = source, Path(folder), tokens

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        columns = (batch[name].tolist() for name in ("number", "row", "rows", "first", "second"))
        done = [
            score_block(
                self.scorer, self.source, Block(number, row, rows, (a, b)), self.folder, self.tokens
            )
            for number, row, rows, a, b in zip(*columns, strict=True)
        ]
        return {
            "number": [one.number for one in done],
            "rows": [one.rows for one in done],
            "failed": [one.failed for one in done],
            "error": [one.error or "" for one in done],
        }


def score_on_ray(
    loading: Mapping[str, Any],
    source: str | Path,
    blocks: Sequence[Block],
    folder: Path,
    tokens: str,
    actors: int = 1,
    gpus_per_actor: float = 0,
) -> Iterator[Done]:
    """Score blocks on Ray Data with `actors` actors, one model each.

    On several machines, `source` and `folder` must be on a shared disk. Ray Data restarts a lost
    actor with its block.

    Args:
        loading: keyword arguments of `scoring.loading.load`.

    Raises:
        ImportError: Ray is not installed.
        RuntimeError: Ray stopped.
    """
    check_one_of("tokens", tokens, TOKENS)
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ImportError(
            "Ray Data is not installed: pip install 'lm-polygraph-asmi[ray]'"
        ) from error
    if not blocks:
        return
    items = [
        {"number": one.number, "row": one.row, "rows": one.rows, "first": a, "second": b}
        for one in blocks
        for a, b in [one.at]
    ]
    tasks = ray.data.from_items(items, override_num_blocks=len(items))  # a task per block
    scored = tasks.map_batches(
        Actor,
        fn_constructor_args=(
            dict(loading), str(Path(source).absolute()), str(folder.absolute()), tokens,
        ),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=actors),
        num_gpus=gpus_per_actor or None,
    )  # fmt: skip
    try:
        for row in scored.iter_rows():
            yield Done(row["number"], row["rows"], row["failed"], row["error"] or None)
    except ray.exceptions.RayError as error:
        raise RuntimeError(
            f"Ray stopped: {error}. Run the same command again to score the missing blocks"
        ) from error
