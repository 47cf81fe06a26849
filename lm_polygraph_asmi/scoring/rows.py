"""Many answers from a file: JSON lines in, JSON lines out, taken up again where it stopped."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lm_polygraph_asmi.scoring.call import Scorer
from lm_polygraph_asmi.scoring.result import Score


class Row(NamedTuple):
    """A line of the input.

    Attributes:
        number: from 0.
        content: `prompt`, and if given `answer`, `samples` and more, which is passed through;
            or, where the line cannot be read, `error` alone.
    """

    number: int
    content: dict[str, Any]


def read_rows(path: str | Path) -> list[Row]:
    """All rows of a JSON-lines file, blank lines left out; one of any other file, its prompt.

    A final line break is not part of the prompt of a text file.
    """
    text = Path(path).read_text(encoding="utf-8")
    if Path(path).suffix != ".jsonl":
        return [Row(0, {"prompt": text.removesuffix("\n")})]
    lines = (line for line in text.split("\n") if line.strip())
    return [Row(number, _parsed(line)) for number, line in enumerate(lines)]


def _parsed(line: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        return {"error": f"not JSON: {error}"}
    if not isinstance(content, dict) or "prompt" not in content:
        return {"error": 'wanted an object with a "prompt"'}
    return content


def rows_done(path: Path) -> set[int]:
    """Numbers of the rows an output file holds; a last line that was cut off is taken out of it.

    Raises:
        ValueError: the file holds something else.
    """
    if not path.exists():
        return set()
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:  # the process was killed while it wrote
        path.write_bytes(whole)
    try:
        return {json.loads(line)["row"] for line in whole.decode("utf-8").splitlines()}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is there already and holds no scored rows ({error!r}): name another file"
        ) from error


def score_rows(
    scorer: Scorer, rows: list[Row], out: Path | None = None
) -> Iterator[tuple[Row, Score | None, str | None]]:
    """Score rows one after the other, writing each as it is done.

    Args:
        scorer: with model and settings.
        rows: those that `out` has are passed over.
        out: JSON lines: the input's own fields, `row`, and the score as by `Score.to_dict`.

    Yields:
        The row, and its score or why there is none. A bad row does not stop the rest; it is not
        written, and so tried again the next time.
    """
    done = rows_done(out) if out else set()
    for row in rows:
        if row.number in done:
            continue
        score, error = None, row.content.get("error")
        if error is None:
            try:
                score = scorer.score(
                    row.content["prompt"], row.content.get("answer"), row.content.get("samples")
                )
            except (ValueError, TypeError, FloatingPointError) as failure:
                error = str(failure)
        if score is not None and out is not None:
            line = json.dumps(row.content | {"row": row.number} | score.to_dict())
            with out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        yield row, score, error
