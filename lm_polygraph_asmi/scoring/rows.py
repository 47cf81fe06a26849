"""Many answers from a file: JSON lines in, JSON lines out; a killed run resumes."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lm_polygraph_asmi.scoring.calibration import ROWS
from lm_polygraph_asmi.scoring.many import FIELDS
from lm_polygraph_asmi.scoring.result import DERIVED, Score
from lm_polygraph_asmi.validation import describe_fields

if TYPE_CHECKING:
    from lm_polygraph_asmi.scoring.scorer import Scorer

ROW_START = b'{"row": '
"""Start of each output line; identifies a cut-off last line."""


GIVEN = {"prompt", "answer", "offsets", "context"}
"""Fields of an output line that an input may have; they are copied unchanged."""
RESERVED = ({field.name for field in fields(Score)} | {*DERIVED, "row", "key"}) - GIVEN
"""Fields of an output line that an input must not have."""


TABLES = (".csv", ".tsv", ".xls", ".xlsx")
"""Tables that are not read: they would be taken for one prompt."""


class Row(NamedTuple):
    """A line of the input.

    Attributes:
        number: line number from 1, blank lines counted, as an editor shows it.
        content: `prompt`, optionally `answer`, `samples`, `context` (as for `score`), `offsets`
            (see `Score.with_spans`); other fields are passed through. If the line cannot be read,
            only `error`.
    """

    number: int
    content: dict[str, Any]


def read_rows(path: str | Path) -> list[Row]:
    """Read the rows of a JSON-lines (.jsonl, .ndjson) or Parquet file, or one prompt from text.

    Blank lines are skipped. A text file's final line break and byte order mark are removed.

    Raises:
        ValueError: a .json file, another kind of table, or a file that is not UTF-8.
    """
    suffix = Path(path).suffix.lower()
    if suffix == ".parquet":
        return _of_parquet(path)
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
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8: {error}") from error
    if suffix not in ROWS:
        return [Row(1, {"prompt": text.removesuffix("\n")})]
    lines = enumerate(text.split("\n"), start=1)
    return [Row(number, _parsed(line)) for number, line in lines if line.strip()]


def _of_parquet(path: str | Path) -> list[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(path).to_pylist()
    except pa.ArrowException as error:
        raise ValueError(f"{path}: expected a Parquet file: {error}") from error
    return [Row(number, row) for number, row in enumerate(rows, start=1)]


def misspelt(names: Iterable[str]) -> dict[str, str]:
    """Unknown field -> known field with a similar name that is missing."""
    present = set(names)
    meant = {
        name: get_close_matches(name, sorted(set(FIELDS) - present), n=1, cutoff=0.8)
        for name in sorted(present - set(FIELDS))
    }
    return {name: close[0] for name, close in meant.items() if close}


def in_chat(rows: list[Row]) -> None:
    """Turn text prompts into chat messages, in place."""
    for row in rows:
        if isinstance(row.content.get("prompt"), str):
            row.content["prompt"] = [{"role": "user", "content": row.content["prompt"]}]


def _parsed(line: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        return {"error": f"not JSON: {error}"}
    if not isinstance(content, dict) or "prompt" not in content:
        return {"error": f'expected an object with a "prompt", got {describe_fields(content)}'}
    return content


def rows_done(path: Path) -> dict[int, dict[str, Any]]:
    """Row number -> line of an output file; a cut-off last line is removed from the file.

    Raises:
        ValueError: the file holds something else.
    """
    if not path.exists():
        return {}
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    cut_off = content[len(whole) :]  # the process was killed while writing
    try:
        lines = map(json.loads, whole.decode("utf-8").splitlines())
        done = {int(line["row"]): line for line in lines}
        if cut_off and not cut_off.startswith(ROW_START[: len(cut_off)]):
            raise ValueError("the last line is not a row")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} exists and holds no scored rows ({error!r}): name another file"
        ) from error
    if cut_off:
        path.write_bytes(whole)
    return done


def key_of(scorer: "Scorer", row: Row) -> str:
    """Hash of everything that a row's score depends on, 16 hexadecimal digits."""
    described = json.dumps([row.content, scorer.identity], sort_keys=True, default=str)
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def rows_left(scorer: "Scorer", rows: list[Row], out: Path | None) -> list[Row]:
    """Rows that are not in `out` yet.

    Raises:
        ValueError: `out` holds something else, or rows of another input, model or settings.
    """
    done = rows_done(out) if out else {}
    keys = {row.number: key_of(scorer, row) for row in rows}
    for number, line in done.items():
        if line.get("key") != keys.get(number):
            raise ValueError(
                f"{out}: row {number} is of another input, model or settings: name another file"
            )
    return [row for row in rows if row.number not in done]


def score_rows(
    scorer: "Scorer", rows: list[Row], out: Path | None = None, tokens: str = "full"
) -> Iterator[tuple[Row, Score | None, str | None]]:
    """Score rows one by one; each is written to `out` at once.

    Args:
        scorer: model and settings.
        rows: those already in `out` are skipped.
        out: JSON lines: the input's fields, `row`, and `Score.to_dict` (nats, higher = more
            fragile).
        tokens: fields of each token to write: "none", "compact" or "full".

    Yields:
        The row, its score, and its error (one of the two is None). A bad row is not written; the
        next call tries it again.

    Raises:
        ValueError: as `rows_left`.
    """
    from lm_polygraph_asmi.model import PrefixCache  # imports torch
    from lm_polygraph_asmi.scoring.many import outcome, token_records

    prefix_cache = PrefixCache()
    for row in rows_left(scorer, rows, out):
        score, error = None, row.content.get("error")
        clashing = sorted(RESERVED & set(row.content))
        if error is None and clashing:
            error = f"expected no fields {clashing}, which the output uses: rename them"
        if error is None:
            result = outcome(scorer, row.number, row.content, prefix_cache, "return", "id")
            score, error = result.score, result.error
        if score is not None and out is not None:
            start = {"row": row.number, "key": key_of(scorer, row)}
            content = score.to_dict()
            if tokens != "full":
                content["tokens"] = token_records(score, tokens)
            line = json.dumps(start | content | row.content, default=str)  # the input's fields win
            with out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        yield row, score, error
