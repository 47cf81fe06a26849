"""Scored rows in files and tables: JSON lines, CSV, Parquet, and batches of data engines."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from lm_polygraph_asmi.files import locked, to_json
from lm_polygraph_asmi.scoring.rows import (
    ROWS,
    TABLES,
    Outcome,
    Row,
    Rows,
    of_table,
    read_rows,
    row_parts,
    score_rows,
)

if TYPE_CHECKING:
    import pandas as pd

BATCH = 16
"""Rows written together: few, since a kill loses up to one batch."""
COPIED = {"prompt", "answer", "samples", "id", "correct"}
"""Fields of a written row that an input may have, too."""
DTYPES: Mapping[Any, str] = {float: "Float64", int: "Int64", bool: "boolean"}
"""Type of a column by that of the field; others are text."""


def columns_of(kind: type) -> dict[str, str]:
    """Columns that a result, `Score` or `Decision`, has in a row -> their types in pandas."""
    kinds: dict[str, Any] = {field.name: field.type for field in fields(kind)}
    kinds |= {"signals": str, "ids": str, "digest": str, "error": str}
    firsts = {name: (get_args(kind) or (kind,))[0] for name, kind in kinds.items()}
    return {name: DTYPES.get(first, "string") for name, first in firsts.items()}


def check_out(source: str | Path, out: str | Path, kind: type) -> list[Row]:
    """The rows of a file, if results of this kind can be written beside them; else ValueError."""
    if Path(out).suffix.lower() not in (*ROWS, *TABLES):
        raise ValueError(f"expected a .jsonl, .csv or .parquet file for the results, got {out}")
    if Path(out).resolve() == Path(source).resolve():
        raise ValueError(f"cannot write {out}: it is the file of prompts")
    rows = list(read_rows(source))
    used = {name for row in rows for name in row.content}
    if clashing := sorted(used & {*columns_of(kind), "row"} - COPIED):
        raise ValueError(
            f"{source}: expected no fields {clashing}, which the output uses: rename or remove them"
        )
    return rows


def score_file(
    scorer: Rows,
    source: str | Path,
    out: str | Path,
    *,
    change: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    seen: Callable[[Row, Outcome], None] | None = None,
) -> int:
    """Score the rows of a file into another one; a killed run, started again, resumes.

    Each row has the input's fields, an empty `correct` for a label, and the result's fields or an
    `error`. In CSV and Parquet, nested values are JSON. Rows with a result that OUT has already
    are kept, with their labels; those that failed are tried again.

    Args:
        scorer: a `Scorer`, or a `Decider`.
        source, out: JSON lines, CSV or Parquet by suffix; the source as for `read_rows`.
        change: of a row's content before it is scored.
        seen: called with each row that was scored.

    Returns:
        The number of rows that failed.

    Raises:
        ValueError: `out` is of other rows, settings or model; fields that the results would
            overwrite; or another program is writing it.

    Example:
        >>> _ = Path("rows.csv").write_text(f'prompt,answer\\n"{prompt}"," Edda Holm"\\n')
        >>> score_file(scorer, "rows.csv", "answers.csv")
        0
        >>> (row,) = read_rows("answers.csv")
        >>> row.content["correct"], row.content["score"] >= 0
        (None, True)
    """
    from lm_polygraph_asmi.scoring.unmasked import known_fingerprints

    types, rows = columns_of(scorer._result), check_out(source, out, scorer._result)
    rows = [row._replace(content=change(row.content)) for row in rows]
    known, failed = known_fingerprints(_scorer_of(scorer)), 0
    names = dict.fromkeys(["row", *(n for row in rows for n in row.content), "answer", "correct"])
    file = Output(Path(out), [*names, *(name for name in types if name not in names)], types)
    with locked(out):
        done = _resumed(file, source, rows, scorer) if Path(out).exists() else set()
        left = (row for row in rows if row.number not in done)
        while batch := list(islice(left, BATCH)):
            records = []
            for row, outcome in score_rows(scorer, batch):
                failed += outcome.result is None
                records.append(record_of(row, outcome, types, known))
                if seen is not None:
                    seen(row, outcome)
            file.append(records)
        file.sort()
    return failed


def _scorer_of(scorer: Rows) -> Any:
    """The `Scorer` itself, or that of a `Decider`."""
    return getattr(scorer, "scorer", scorer)


def record_of(
    row: Row, outcome: Outcome, columns: Iterable[str], known: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """A row with its result or error; `known`: `fingerprints` to be saved with the settings."""
    record = {"row": row.number, **row.content}
    record.setdefault("correct", None)
    result = outcome.result
    if result is None:
        return record | {"error": outcome.error}
    content = replace(result, settings=result.settings | (known or {})).to_dict()
    return record | {name: content[name] for name in columns if name in content}


def _resumed(file: "Output", source: str | Path, rows: Sequence[Row], scorer: Rows) -> set[int]:
    """Numbers of the rows that have a result in the file, from which others are removed."""
    from lm_polygraph_asmi.scoring.unmasked import other_settings

    written = [row.content for row in read_rows(file.path)]
    kept = [record for record in written if record.get("digest")]
    contents = {row.number: row.content for row in rows}
    for record in kept:
        number = record.get("row")
        if number not in contents or not _same_request(contents[number], record):
            raise ValueError(
                f"{file.path}: row {number} has another prompt or answer than in {source}: name "
                "another file"
            )
    for record in kept[:1]:
        made_with = getattr(scorer, "made_with", {})
        others = [n for n, value in made_with.items() if record.get(n) != value]
        others += other_settings(_scorer_of(scorer), record)
        if others:
            raise ValueError(
                f"{file.path} was written with another model or other settings "
                f"({'; '.join(others)}): name another file"
            )
    file.columns += [name for name in written[0] if name not in file.columns] if written else []
    if len(kept) < len(written) or list(written[0]) != file.columns:
        file.write(kept)
    file.records = kept
    return {record["row"] for record in kept}


def _same_request(content: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
    """Whether a written row is of this row's prompt and answer."""
    from lm_polygraph_asmi.scoring.text import parse_request

    try:
        prompt, answer, *_ = parse_request(*row_parts(content))
    except ValueError:
        return False
    as_chat = [{"role": "user", "content": prompt}]
    return record["prompt"] in (prompt, as_chat) and answer in (None, record["answer"])


class Output:
    """A file of results that grows; `columns` and `types` are those of a table."""

    def __init__(self, path: Path, columns: Sequence[str], types: Mapping[str, str]) -> None:
        self.path, self.columns, self.types = path, list(columns), types
        self.suffix, self.records = path.suffix.lower(), list[dict[str, Any]]()

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Add rows; a Parquet file is written anew, and replaces the old one when it is whole."""
        self.records += map(dict, records)
        if self.suffix == ".parquet":
            self.write(self.records)
            return
        new = not (self.path.exists() and self.path.stat().st_size)
        with self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(self._text(records, header=new))

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write the whole file, through a temporary one."""
        partial = self.path.with_name(f"{self.path.name}.partial")
        if self.suffix == ".parquet":
            self._frame(records).to_parquet(partial, index=False)
        else:
            partial.write_text(self._text(records, header=True), encoding="utf-8", newline="")
        partial.replace(self.path)

    def sort(self) -> None:
        """Put the rows into their order, where some were tried again."""
        numbers = [record["row"] for record in self.records]
        if numbers != sorted(numbers):
            self.write(sorted(self.records, key=lambda record: record["row"]))

    def _text(self, records: Sequence[Mapping[str, Any]], header: bool) -> str:
        if self.suffix == ".csv":
            frame = self._frame(records)
            return str(frame.to_csv(index=False, header=header, lineterminator="\n"))
        return "".join(f"{to_json(record, str)}\n" for record in records)

    def _frame(self, records: Sequence[Mapping[str, Any]]) -> "pd.DataFrame":
        return frame_of(records, self.columns, self.types)


def frame_of(
    records: Sequence[Mapping[str, Any]], columns: Sequence[str], types: Mapping[str, str]
) -> "pd.DataFrame":
    """Rows as a table, nested values as JSON."""
    import pandas as pd

    flat = [
        {
            name: to_json(value, str) if isinstance(value, Mapping | list | tuple) else value
            for name, value in record.items()
        }
        for record in records
    ]
    frame = pd.DataFrame(flat, columns=list(columns), dtype=object)
    return frame.astype({name: kind for name, kind in types.items() if name in frame})


class BatchScorer:
    """Scores batches of a data engine, as tables of pandas; for Ray Data's `map_batches`.

    Args:
        kind: `Scorer` or `Decider`. It loads the model when this is created: in each actor.
        *args, **settings: of `kind`.

    Example:
        >>> import pandas as pd
        >>> score_table = BatchScorer(Scorer, "smollm2", scope="response")
        >>> table = score_table(pd.DataFrame({"prompt": [prompt, None], "n": [7, 8]}))
        >>> table["n"].tolist(), table["score"].isna().tolist()
        ([7, 8], [False, True])
    """

    def __init__(self, kind: Callable[..., Rows], *args: Any, **settings: Any) -> None:
        self.scorer = kind(*args, **settings)

    def __call__(self, table: "pd.DataFrame") -> "pd.DataFrame":
        """The table with the fields of the results, and `error`; nested values are JSON."""
        import pandas as pd

        table, types = pd.DataFrame(table), columns_of(self.scorer._result)
        if clashing := sorted(types.keys() & set(table.columns) - COPIED):
            raise ValueError(f"columns {clashing} would be overwritten by the scores: rename them")
        rows = [Row(n, of_table(cells)) for n, cells in enumerate(table.to_dict("records"), 1)]
        records = [record_of(*found, types) for found in score_rows(self.scorer, rows)]
        added = frame_of(records, [name for name in types if name != "prompt"], types)
        kept = [name for name in table.columns if name not in added.columns]
        return pd.concat([table[kept].reset_index(drop=True), added], axis=1)
