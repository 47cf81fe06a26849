"""Scored rows in files and tables: JSON lines, CSV, Parquet, and batches of data engines."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from lm_polygraph_asmi.files import locked, partial_of, to_json
from lm_polygraph_asmi.scoring.rows import (
    DETAILS,
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
NESTED = (Mapping, list, tuple)
"""Values that are JSON in a table."""
DTYPES: Mapping[Any, str] = {float: "Float64", int: "Int64", bool: "boolean", str: "string"}
"""Type of a table's column by that of the field; others are in `details` only."""


def columns_of(kind: type) -> dict[str, str | None]:
    """Fields that a result, `Score` or `Decision`, has in a row -> types of their columns."""
    kinds: dict[str, Any] = {field.name: field.type for field in fields(kind)}
    kinds |= {"signals": dict, "ids": list, "digest": str, "error": str}
    return {name: DTYPES.get((get_args(kind) or (kind,))[0]) for name, kind in kinds.items()}


def check_out(source: str | Path, out: str | Path, kind: type) -> list[Row]:
    """The rows of a file, if results of this kind can be written beside them; else ValueError."""
    if Path(out).suffix.lower() not in (*ROWS, *TABLES):
        raise ValueError(f"expected a .jsonl, .csv or .parquet file for the results, got {out}")
    if Path(out).resolve() == Path(source).resolve():
        raise ValueError(f"cannot write {out}: it is the file of prompts")
    rows = list(read_rows(source))
    used = {name for row in rows for name in row.content}
    if clashing := sorted(used & {*columns_of(kind), "row", DETAILS} - COPIED):
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
    `error`. In CSV and Parquet, all fields of a result are in the column `details`, as JSON. Rows
    with a result that OUT has already are kept, with their labels; failed ones are tried again.

    `scorer` may be a `Decider`; `change` is applied to a row's content first, and `seen` is called
    with each row that was scored. Returns the number of rows that failed. Raises ValueError: `out`
    is of other rows, settings or model, has fields of the source, or is being written.

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
    own: Any = getattr(scorer, "scorer", scorer)  # of a `Decider`
    known, failed = known_fingerprints(own), 0
    file = Output(Path(out), ["row", *(n for row in rows for n in row.content), "correct"], types)
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
    return failed


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


def _resumed(file: "Output", source: str | Path, rows: Sequence[Row], scorer: Any) -> set[int]:
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
        others += other_settings(getattr(scorer, "scorer", scorer), record)
        if others:
            raise ValueError(
                f"{file.path} was written with another model or other settings "
                f"({'; '.join(others)}): name another file"
            )
    file.given += [name for record in kept for name in record]
    file.records, done = kept, {record["row"] for record in kept}
    if len(kept) < len(written) or done < contents.keys():
        file.write()  # without failed rows; other programs write tables in their own way
    return done


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
    """A file of results that grows; `given` and `types` as for `frame_of`."""

    def __init__(self, path: Path, given: list[str], types: Mapping[str, str | None]) -> None:
        self.path, self.given, self.types = path, given, types
        self.suffix, self.records = path.suffix.lower(), list[dict[str, Any]]()

    def append(self, records: Sequence[dict[str, Any]]) -> None:
        """Add rows. Parquet is written anew; so is a file where rows are tried again, in order."""
        behind = bool(self.records) and self.records[-1]["row"] > records[0]["row"]
        self.records += records
        if self.suffix == ".parquet" or behind:
            self.write()
            return
        new = not (self.path.exists() and self.path.stat().st_size)
        with self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(self._text(records, header=new))

    def write(self) -> None:
        """Write the whole file, through a temporary one."""
        self.records.sort(key=lambda record: record["row"])
        partial = partial_of(self.path)
        if self.suffix == ".parquet":
            frame_of(self.records, self.given, self.types).to_parquet(partial, index=False)
        else:
            partial.write_text(self._text(self.records, True), encoding="utf-8", newline="")
        partial.replace(self.path)

    def _text(self, records: Sequence[Mapping[str, Any]], header: bool) -> str:
        if self.suffix == ".csv":
            frame = frame_of(records, self.given, self.types)
            return str(frame.to_csv(index=False, header=header, lineterminator="\n"))
        return "".join(f"{to_json(record, str)}\n" for record in records)


def frame_of(
    records: Iterable[Mapping[str, Any]], given: Iterable[str], types: Mapping[str, str | None]
) -> "pd.DataFrame":
    """Rows as a table: columns `given`, those of a result, and `details`.

    An answer of tokens is in `details`, too, which tells it from a text.
    """
    import pandas as pd

    def cells(record: Mapping[str, Any]) -> dict[str, Any]:
        nested = {n: to_json(v, str) for n, v in record.items() if isinstance(v, NESTED)}
        if "digest" not in record:
            return {**record, **nested}
        texts = {"prompt"} | {"answer"} - nested.keys()
        details = {n: v for n, v in record.items() if n in {"row", *types} - texts}
        return {**record, **nested, DETAILS: to_json(details, str)}

    kinds = {name: kind for name, kind in types.items() if kind} | {DETAILS: "string"}
    columns = list(dict.fromkeys(n for n in (*given, *kinds) if kinds.get(n) or n not in types))
    frame = pd.DataFrame(map(cells, records), columns=columns, dtype=object)
    return frame.astype(kinds)


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

    def __init__(self, kind: Callable[..., Rows], *args: Any, **settings: Any) -> None:
        self.scorer = kind(*args, **settings)

    def __call__(self, table: "pd.DataFrame") -> "pd.DataFrame":
        """The table with the columns of the results, `details` and `error`."""
        import pandas as pd

        table, types = pd.DataFrame(table), columns_of(self.scorer._result)
        if clashing := sorted({*types, DETAILS} & set(table.columns) - COPIED):
            raise ValueError(f"columns {clashing} would be overwritten by the scores: rename them")
        rows = [Row(n, of_table(cells)) for n, cells in enumerate(table.to_dict("records"), 1)]
        records = [record_of(*found, types) for found in score_rows(self.scorer, rows)]
        added = frame_of(records, (), types).drop(columns="prompt")
        kept = [name for name in table.columns if name not in added.columns]
        return pd.concat([table[kept].reset_index(drop=True), added], axis=1)
