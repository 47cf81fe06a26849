"""Write scored rows: to files of JSON lines or Parquet, or into tables of data engines."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from lm_polygraph_asmi.files import locked, parse_json, partial_of, to_json
from lm_polygraph_asmi.inputs import LABELS, as_chat
from lm_polygraph_asmi.scoring.rows import (
    Outcome,
    Row,
    ScoresRows,
    read_rows,
    request_of,
)
from lm_polygraph_asmi.tables import LINES, plain, read_table, write_parquet

if TYPE_CHECKING:
    import pandas as pd

COPIED = {"prompt", "answer", "samples", "id", "correct"}  # which an input row may have, too
DTYPES: Mapping[Any, str] = {float: "Float64", int: "Int64", bool: "boolean"}
"""Type of a field -> type of its column in a table; all other columns are texts."""


def fields_of(kind: type) -> dict[str, str]:
    """Fields that a `Score` or `Decision` adds to a written row -> types of their columns."""
    types = {
        field.name: DTYPES.get((get_args(field.type) or (field.type,))[0], "string")
        for field in fields(kind)
    }
    return types | dict.fromkeys(("signals", "ids", "digest", "error"), "string")


def check_out(
    rows: Sequence[Row], source: str | Path, out: str | Path, names: Collection[str]
) -> None:
    """Raise ValueError unless rows with the result's fields `names` can be written to `out`."""
    if Path(out).suffix.lower() not in (*LINES, ".parquet"):
        raise ValueError(
            f"expected a .jsonl or .parquet file for the results, got {out}. For a CSV table to "
            "label by hand, use --sheet FILE.csv"
        )
    if Path(out).resolve() == Path(source).resolve():
        raise ValueError(f"cannot write {out}: it is the file of prompts. Name another file")
    used = {name for row in rows for name in row.content}
    if clashing := sorted(used & {*names, "row"} - COPIED):
        raise ValueError(
            f"{source}: the fields {clashing} have names of output fields: rename or remove them"
        )


def score_file(
    scorer: ScoresRows,
    source: str | Path | Sequence[Row],
    out: str | Path,
    *,
    seen: Callable[[Row, Outcome], None] | None = None,
) -> int:
    """Score the rows of a file into another file. If it is interrupted, the same call resumes.

    An output row has the input's fields, an empty `correct` to be filled with a label, and the
    result's fields or an `error`. It is written as soon as its row is finished. Rows that already
    have a result in OUT are kept with their labels, and get the input's other fields as they are
    now; rows that failed are tried again.

    Args:
        scorer: a `Scorer`, or a `Decider`.
        source: a file, or its rows.
        out: a .jsonl file, or a .parquet file, which is made at the end from OUT.partial.
        seen: called with each row after it was scored.

    Returns:
        The number of rows that failed.

    Raises:
        ValueError: `out` holds other rows, or rows of other settings or another model; or a field
            of the source has the name of an output field; or another process is writing `out`.
        OSError: `out` cannot be written. It holds the rows that were finished before.

    Example:
        >>> _ = Path("rows.csv").write_text(f'prompt,answer\\n"{prompt}"," Edda Holm"\\n')
        >>> score_file(scorer, "rows.csv", "answers.jsonl")
        0
        >>> from lm_polygraph_asmi.tables import read_table
        >>> (row,) = read_table("answers.jsonl")
        >>> row.content["correct"], row.content["score"] >= 0
        (None, True)
    """
    if isinstance(source, str | Path):
        rows, name = list(read_rows(source)), str(source)
    else:
        rows, name = list(source), "its source"
    names, failed = fields_of(scorer.result_type), 0
    check_out(rows, name, out, names)
    with locked(out):
        file = Output(Path(out))
        done = _keep_scored(file, name, rows, scorer)
        left = [row for row in rows if row.number not in done]
        for row, outcome in zip(left, scorer.score_many(left), strict=True):
            failed += outcome.result is None
            file.add(record_of(row, outcome, names, scorer.known_fingerprints()))
            if seen is not None:
                seen(row, outcome)
        file.finish()
    return failed


def record_of(
    row: Row, outcome: Outcome, names: Iterable[str], fingerprints: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """A row to be written: the input's fields, then those of the result, or the error.

    Args:
        names: fields of the result that are written.
        fingerprints: hashes of model and tokenizer (`Scorer.known_fingerprints`), written among
            the settings.
    """
    record, result = {"row": row.number, "correct": None, **row.content}, outcome.result
    if result is None:
        return record | {"error": outcome.error}
    content = replace(result, settings=result.settings | (fingerprints or {})).to_dict()
    return record | {name: content[name] for name in names if name in content}


def _keep_scored(file: "Output", source: str, rows: Sequence[Row], scorer: ScoresRows) -> set[int]:
    """Remove rows without a result from the file, and return the numbers of the others.

    Input fields that are only copied, such as `cluster`, may have changed: they are copied again.
    """
    contents, done = {row.number: row.content for row in rows}, set[int]()

    def kept(record: dict[str, Any]) -> dict[str, Any] | None:
        if not record.get("digest"):
            return None
        number = record.get("row")
        if number not in contents or not _same_request(contents[number], record):
            raise ValueError(
                f"{file.path}: row {number} has another prompt, answer or samples than in "
                f"{source}: name another file"
            )
        if not done and (others := scorer.differences(record)):
            raise ValueError(
                f"{file.path}: it has rows of other settings or another model "
                f"({'; '.join(others)}): name another file, or use the same settings and model"
            )
        done.add(int(number))
        copied = {
            n: v for n, v in contents[number].items() if n not in {"prompt", "answer", *LABELS}
        }
        return {  # without an id, context or cluster that the input no longer has
            n: v for n, v in record.items() if n in copied or n not in {"id", "context", "cluster"}
        } | copied

    file.keep(kept)
    return done


def _same_request(content: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
    """Whether a written row was made from this input row's prompt and answer."""
    try:
        request = request_of(content)
    except ValueError:
        return False
    return (
        record["prompt"] in (request.prompt, as_chat(str(request.prompt)))
        and request.answer in (None, record["answer"])
        and record.get("samples") == request.samples
        and record["settings"].get("template", {}) == request.template
    )


class Output:
    """A file of results. Each finished row adds one line of JSON.

    A .jsonl file consists of these lines. For a Parquet file, the lines are collected in
    FILE.partial, from which it is made at the end. If a row is scored again, its new line is added
    at the end.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = path if path.suffix.lower() in LINES else partial_of(path)

    def records(self) -> Iterator[dict[str, Any]]:
        """The written rows, without an incomplete last line, whose row is scored again."""
        with self.lines.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    record = parse_json(line)
                    record["row"]
                except (ValueError, TypeError, KeyError) as error:
                    if not line.endswith(b"\n"):
                        return
                    raise ValueError(
                        f"{self.lines}, line {number}: expected a row of results, got "
                        f"{line[:40]!r}: name another file"
                    ) from error
                yield record

    def keep(self, kept: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
        """Replace each row of an existing file by what `kept` makes of it; None: it is removed.

        An incomplete last line is removed, too.
        """
        written, partial = self.records(), Path(f"{self.lines}.kept")
        if not self.lines.exists() and self.path.exists():  # a finished Parquet file
            written = (row.content for row in read_table(self.path, ("row",)))
        elif not self.lines.exists():
            written = iter(())
        with self._naming_file():
            try:
                with partial.open("w", encoding="utf-8") as file:
                    file.writelines(
                        f"{to_json(record, str)}\n" for record in map(kept, written) if record
                    )
                partial.replace(self.lines)
            finally:
                partial.unlink(missing_ok=True)

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a row. If its line cannot be written completely, it is removed again."""
        line, written = f"{to_json(record, str)}\n".encode(), 0
        with self._naming_file(), self.lines.open("ab", buffering=0) as file:
            start = file.seek(0, 2)
            try:
                while written < len(line):
                    written += file.write(line[written:])
            finally:
                if written < len(line):
                    file.truncate(start)

    def finish(self) -> None:
        """Make the Parquet file from the lines, if `path` is one."""
        if self.lines != self.path:
            with self._naming_file():
                write_parquet(self.records, self.path)
            self.lines.unlink()

    @contextmanager
    def _naming_file(self) -> Iterator[None]:
        """Turn a write error into one that names the file with the finished rows."""
        try:
            yield
        except OSError as error:
            raise OSError(
                f"cannot write {self.path}: {(error.strerror or str(error)).lower()}. The rows "
                f"that were finished are in {self.lines}: make room, and run the same command again"
            ) from error


class BatchScorer:
    """Scores batches of a data engine as pandas tables, for example with Ray Data's `map_batches`.

    `kind` is `Scorer` or `Decider`. The model is loaded when this object is created, so each actor
    loads its own.

    Example:
        >>> import pandas as pd
        >>> score_table = BatchScorer(Scorer, "smollm2", scope="response")
        >>> table = score_table(pd.DataFrame({"prompt": [prompt, None], "n": [7, 8]}))
        >>> table["n"].tolist(), table["score"].isna().tolist()
        ([7, 8], [False, True])
    """

    def __init__(self, kind: Callable[..., ScoresRows], *args: Any, **settings: Any) -> None:
        self.scorer = kind(*args, **settings)

    def __call__(self, table: "pd.DataFrame") -> "pd.DataFrame":
        """The table with the results' columns and `error`. Lists and objects become JSON."""
        import pandas as pd

        table, types = pd.DataFrame(table), fields_of(self.scorer.result_type)
        del types["prompt"]  # the table's own prompt stays
        if clashing := sorted({*types} & set(table.columns) - COPIED):
            raise ValueError(f"columns {clashing} would be overwritten by the scores: rename them")
        given = (dict(plain(cells)) for cells in table.to_dict("records"))
        rows = [Row(n, {str(k): v for k, v in row.items()}) for n, row in enumerate(given, 1)]
        scored = zip(rows, self.scorer.score_many(rows), strict=True)
        records = [record_of(*pair, types) for pair in scored]

        def cell(value: Any, failed: bool) -> Any:
            if isinstance(value, Mapping | list | tuple):
                value = str(value) if failed else to_json(value, str)
            if isinstance(value, str):  # pandas' strings cannot hold a lone surrogate
                return value.encode(errors="backslashreplace").decode()
            return value

        cells = [{n: cell(v, "error" in record) for n, v in record.items()} for record in records]
        added = pd.DataFrame(cells, columns=[*types], dtype=object).astype(types)
        kept = [name for name in table.columns if name not in types]
        return pd.concat([table[kept].reset_index(drop=True), added], axis=1)
