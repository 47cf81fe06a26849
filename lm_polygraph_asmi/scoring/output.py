"""Scored rows: files of JSON lines or Parquet, and tables of data engines."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from lm_polygraph_asmi.files import locked, parse_json, partial_of, to_json
from lm_polygraph_asmi.inputs import as_chat
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

COPIED = {"prompt", "answer", "samples", "id", "correct"}
"""Fields of a written row that an input may have, too."""
DTYPES: Mapping[Any, str] = {float: "Float64", int: "Int64", bool: "boolean"}
"""Type of a field -> type of its column in a table; all other columns are texts."""


def fields_of(kind: type) -> dict[str, str]:
    """Fields that a written row has of its `Score` or `Decision` -> types of their columns."""
    kinds: dict[str, Any] = {field.name: field.type for field in fields(kind)}
    types = {n: DTYPES.get((get_args(kind) or (kind,))[0], "string") for n, kind in kinds.items()}
    return types | dict.fromkeys(("signals", "ids", "digest", "error"), "string")


def check_out(
    rows: Sequence[Row], source: str | Path, out: str | Path, names: Collection[str]
) -> None:
    """Raise ValueError unless results with these fields can be written beside a file's rows."""
    if Path(out).suffix.lower() not in (*LINES, ".parquet"):
        raise ValueError(
            f"expected a .jsonl or .parquet file for the results, got {out}: a table for people "
            "is written by --sheet FILE.csv"
        )
    if Path(out).resolve() == Path(source).resolve():
        raise ValueError(f"cannot write {out}: it is the file of prompts")
    used = {name for row in rows for name in row.content}
    if clashing := sorted(used & {*names, "row"} - COPIED):
        raise ValueError(
            f"{source}: expected no fields {clashing}, which the output uses: rename or remove them"
        )


def score_file(
    scorer: ScoresRows,
    source: str | Path | Sequence[Row],
    out: str | Path,
    *,
    seen: Callable[[Row, Outcome], None] | None = None,
) -> int:
    """Score the rows of a file into another one. After a stop, the same call resumes.

    Each row has the input's fields, an empty `correct` for a label, and the result's fields or an
    `error`. Each is written as soon as it is finished, so a stop loses none. Rows with a result
    that OUT has already are kept, with their labels; failed ones are tried again.

    Args:
        scorer: a `Scorer`, or a `Decider`.
        source: a file, or its rows.
        out: a file of JSON lines (.jsonl) or .parquet, which is written at the end, from
            OUT.partial.
        seen: called with each row that was scored.

    Returns:
        The number of rows that failed.

    Raises:
        ValueError: `out` is of other rows, settings or model, has fields of the source, or is being
            written.
        OSError: `out` cannot be written; the rows before are in it.

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
        done = _kept(file, name, rows, scorer)
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
    """A written row: the input's fields, then those of the result, or the error.

    Args:
        names: fields of the result that are written.
        fingerprints: hashes of model and tokenizer (`Scorer.known_fingerprints`), which are
            written among the settings.
    """
    record, result = {"row": row.number, "correct": None, **row.content}, outcome.result
    if result is None:
        return record | {"error": outcome.error}
    content = replace(result, settings=result.settings | (fingerprints or {})).to_dict()
    return record | {name: content[name] for name in names if name in content}


def _kept(file: "Output", source: str, rows: Sequence[Row], scorer: ScoresRows) -> set[int]:
    """Numbers of the rows that have a result in the file; written rows without one are removed."""
    contents, done = {row.number: row.content for row in rows}, set[int]()

    def kept(record: dict[str, Any]) -> bool:
        if not record.get("digest"):
            return False
        number = record.get("row")
        if number not in contents or not _same_request(contents[number], record):
            raise ValueError(
                f"{file.path}: row {number} has another prompt or answer than in {source}: name "
                "another file"
            )
        if not done and (others := scorer.differences(record)):
            raise ValueError(
                f"{file.path}: it has rows of other settings or another model "
                f"({'; '.join(others)}): name another file, or use the same"
            )
        done.add(int(number))
        return True

    file.keep(kept)
    return done


def _same_request(content: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
    """Whether a written row is of this row's prompt and answer."""
    try:
        request = request_of(content)
    except ValueError:
        return False
    return (
        record["prompt"] in (request.prompt, as_chat(str(request.prompt)))
        and request.answer in (None, record["answer"])
        and record["settings"].get("template", {}) == request.template
    )


class Output:
    """A file of results, to which each finished row adds a line of JSON.

    A .jsonl file has the lines itself. The lines of a Parquet file are collected in FILE.partial,
    from which it is made at the end. A row that is scored again is added at the end.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = path if path.suffix.lower() in LINES else partial_of(path)

    def records(self) -> Iterator[dict[str, Any]]:
        """The written rows. A last line that was cut is left out: its row is scored again."""
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

    def keep(self, good: Callable[[dict[str, Any]], bool]) -> None:
        """Remove all but the good rows of a file that exists, and a line that was cut."""
        written, partial = self.records(), Path(f"{self.lines}.kept")
        if not self.lines.exists() and self.path.exists():  # a Parquet file that was finished
            written = (row.content for row in read_table(self.path, ("row",)))
        elif not self.lines.exists():
            written = iter(())
        with self._named():
            try:
                with partial.open("w", encoding="utf-8") as file:
                    file.writelines(
                        f"{to_json(record, str)}\n" for record in written if good(record)
                    )
                partial.replace(self.lines)
            finally:
                partial.unlink(missing_ok=True)

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a row. If its line cannot be written whole, nothing of it remains."""
        line, written = f"{to_json(record, str)}\n".encode(), 0
        with self._named(), self.lines.open("ab", buffering=0) as file:
            start = file.seek(0, 2)
            try:
                while written < len(line):
                    written += file.write(line[written:])
            finally:
                if written < len(line):
                    file.truncate(start)

    def finish(self) -> None:
        """Make the Parquet file of the lines, if one is asked for."""
        if self.lines != self.path:
            with self._named():
                write_parquet(self.records, self.path)
            self.lines.unlink()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Turn an error of writing into one that says where the finished rows are."""
        try:
            yield
        except OSError as error:
            raise OSError(
                f"cannot write {self.path}: {(error.strerror or str(error)).lower()}. The rows "
                f"that were finished are in {self.lines}: make room, and run the same command again"
            ) from error


class BatchScorer:
    """Scores batches of a data engine, as tables of pandas; for Ray Data's `map_batches`.

    `kind`: `Scorer` or `Decider`, which loads the model when this is created: in each actor.

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
        """The table with the columns of the results, lists and objects as JSON, and `error`."""
        import pandas as pd

        table, types = pd.DataFrame(table), fields_of(self.scorer.result_type)
        del types["prompt"]  # that of the table stays
        if clashing := sorted({*types} & set(table.columns) - COPIED):
            raise ValueError(f"columns {clashing} would be overwritten by the scores: rename them")
        given = (dict(plain(cells)) for cells in table.to_dict("records"))
        rows = [Row(n, {str(k): v for k, v in row.items()}) for n, row in enumerate(given, 1)]
        scored = zip(rows, self.scorer.score_many(rows), strict=True)
        records = [record_of(*found, types) for found in scored]

        def cell(value: Any, failed: bool) -> Any:
            if isinstance(value, Mapping | list | tuple):
                value = str(value) if failed else to_json(value, str)
            if isinstance(value, str):  # pandas' texts hold no half of a surrogate pair
                return value.encode(errors="backslashreplace").decode()
            return value

        cells = [{n: cell(v, "error" in record) for n, v in record.items()} for record in records]
        added = pd.DataFrame(cells, columns=[*types], dtype=object).astype(types)
        kept = [name for name in table.columns if name not in types]
        return pd.concat([table[kept].reset_index(drop=True), added], axis=1)
