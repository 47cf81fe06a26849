"""Many answers from a file: JSON lines in, JSON lines out, taken up again where it stopped."""

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
"""How a line of the output begins, and that of no other file should it be cut off."""


GIVEN = {"prompt", "answer", "offsets", "context"}
"""Fields of an output line that an input may have; they stay as they were given."""
RESERVED = ({field.name for field in fields(Score)} | {*DERIVED, "row", "key"}) - GIVEN
"""Fields of an output line that an input must not have."""


TABLES = (".csv", ".tsv", ".xls", ".xlsx")
"""Files that hold many rows and would be read as one prompt."""


class Row(NamedTuple):
    """A line of the input.

    Attributes:
        number: of its line, from 1, blank ones counted: what an editor shows.
        content: `prompt`, and if given `answer`, `samples`, `context` (as `score` takes it),
            `offsets` (see `Score.with_spans`) and more, which is passed through; or, where the line
            cannot be read, `error` alone.
    """

    number: int
    content: dict[str, Any]


def read_rows(path: str | Path) -> list[Row]:
    """All rows of a JSON-lines file (.jsonl, .ndjson), blank lines left out, or of a Parquet file;
    of another, its text.

    A final line break is not part of the prompt of a text file, nor is a byte order mark.

    Raises:
        ValueError: a .json file, a table of another kind, or a file that is not UTF-8.
    """
    suffix = Path(path).suffix.lower()
    if suffix == ".parquet":
        return _of_parquet(path)
    if suffix == ".json":
        raise ValueError(
            f"{path} is JSON: rows are read from .jsonl, one object a line, and a prompt from .txt"
        )
    if suffix in TABLES:
        raise ValueError(
            f"{path} is a table: rows are read from .parquet, or from .jsonl, one object a line "
            f"(pandas: to_json(FILE, orient='records', lines=True)), and a prompt from .txt"
        )
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: save it as such ({error})") from error
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
        raise ValueError(f"{path} is no Parquet file: {error}") from error
    return [Row(number, row) for number, row in enumerate(rows, start=1)]


def misspelt(names: Iterable[str]) -> dict[str, str]:
    """Fields that nobody reads and that are written almost as one is that does not occur."""
    given = set(names)
    meant = {
        name: get_close_matches(name, sorted(set(FIELDS) - given), n=1, cutoff=0.8)
        for name in sorted(given - set(FIELDS))
    }
    return {name: close[0] for name, close in meant.items() if close}


def in_chat(rows: list[Row]) -> None:
    """Make messages of the prompts that are texts."""
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
    """Rows an output file holds, by number; a last line that was cut off is taken out of it.

    Raises:
        ValueError: the file holds something else.
    """
    if not path.exists():
        return {}
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    cut_off = content[len(whole) :]  # the process was killed while it wrote
    try:
        lines = map(json.loads, whole.decode("utf-8").splitlines())
        done = {int(line["row"]): line for line in lines}
        if cut_off and not cut_off.startswith(ROW_START[: len(cut_off)]):
            raise ValueError("its last line is no row")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is there already and holds no scored rows ({error!r}): name another file"
        ) from error
    if cut_off:
        path.write_bytes(whole)
    return done


def key_of(scorer: "Scorer", row: Row) -> str:
    """Key of all that a row's score depends on."""
    described = json.dumps([row.content, scorer.identity], sort_keys=True, default=str)
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def rows_left(scorer: "Scorer", rows: list[Row], out: Path | None) -> list[Row]:
    """Rows that `out` does not hold yet.

    Raises:
        ValueError: it holds something else, or rows of another input, model or settings.
    """
    done = rows_done(out) if out else {}
    keys = {row.number: key_of(scorer, row) for row in rows}
    for number, line in done.items():
        if line.get("key") != keys.get(number):
            raise ValueError(
                f"{out} holds a row {number} of another input, or scored with another model or "
                "other settings: name another file"
            )
    return [row for row in rows if row.number not in done]


def score_rows(
    scorer: "Scorer", rows: list[Row], out: Path | None = None, tokens: str = "full"
) -> Iterator[tuple[Row, Score | None, str | None]]:
    """Score rows one after the other, writing each as it is done.

    Args:
        scorer: with model and settings.
        rows: those that `out` has are passed over.
        out: JSON lines: the input's own fields, `row`, and the score as by `Score.to_dict`.
        tokens: "none", "compact" or "full": what is written of each token.

    Yields:
        The row, and its score or why there is none. A bad row does not stop the rest; it is not
        written, and so tried again the next time.

    Raises:
        ValueError: as `rows_left`.
    """
    from lm_polygraph_asmi.model import PrefixCache  # torch: there by now
    from lm_polygraph_asmi.scoring.many import outcome, token_records

    prefix_cache = PrefixCache()
    for row in rows_left(scorer, rows, out):
        score, error = None, row.content.get("error")
        clashing = sorted(RESERVED & set(row.content))
        if error is None and clashing:
            error = f"has the fields {clashing}, which the output uses: rename them"
        if error is None:
            found = outcome(scorer, row.number, row.content, prefix_cache, "return", "id")
            score, error = found.score, found.error
        if score is not None and out is not None:
            own = {"row": row.number, "key": key_of(scorer, row)}
            made = score.to_dict()
            if tokens != "full":
                made["tokens"] = token_records(score, tokens)
            line = json.dumps(own | made | row.content, default=str)  # what was given stays
            with out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        yield row, score, error
