"""Any score: a column of a table in place of a signal that was computed here.

No model is loaded. "column:NAME" is an uncertainty, higher = more uncertain; "column:-NAME" a
confidence, where higher is surer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_polygraph_asmi.decisions.calibration import Calibration
from lm_polygraph_asmi.decisions.decision import Decision
from lm_polygraph_asmi.decisions.labels import naming
from lm_polygraph_asmi.files import locked
from lm_polygraph_asmi.inputs import LABELS, text_of
from lm_polygraph_asmi.scoring.answer import UnmaskedAnswer
from lm_polygraph_asmi.scoring.output import Output, check_out
from lm_polygraph_asmi.scoring.rows import Outcome
from lm_polygraph_asmi.scoring.signals import column_of
from lm_polygraph_asmi.tables import Row, read_table
from lm_polygraph_asmi.validation import check_new

DECIDED = ("accept", "reason", "signal", "value", "threshold", "calibration")
"""Fields of a decision that are written beside a row."""


def column_answers(rows: Sequence[Row], signal: str) -> list[UnmaskedAnswer]:
    """Rows as answers with the one signal; ValueError, naming the row: no finite number."""
    answers = []
    for row in rows:
        with naming(row):
            answers.append(_answer(row.content, signal))
    if len(answers) > 1 and len({answer.signals[signal] for answer in answers}) == 1:
        raise ValueError(f"column {column_of(signal)[0]!r} has the same number in all rows")
    return answers


def _answer(content: Mapping[str, Any], signal: str) -> UnmaskedAnswer:
    name, sign = column_of(signal)
    if name in (*LABELS, *DECIDED, "id", "row", "cluster"):
        raise ValueError(f"column {name!r}: expected a score of another name, got this field")
    value = content.get(name)
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"column {name!r}: expected a number, got {value!r:.40}")
    answer = content.get("answer")
    return UnmaskedAnswer(
        signals={signal: sign * number},
        prompt=content.get("prompt") or "",
        answer=answer or "",
        scored_text=text_of(answer),
        answered=answer is None or bool(text_of(answer).strip()),
        ids=(),
        counted=0,
        settings={"closing_token": False},  # how the answer ends is unknown
        model="",
        warnings=(),
        content_end=len(text_of(answer)),
        ending="",
        prompt_tokens=0,
    )


def decide_table(
    calibration: Calibration,
    source: str | Path,
    out: str | Path,
    seen: Callable[[Row, Outcome], None],
) -> None:
    """Decide on the rows of a table by a calibration of one of its columns, into a new file.

    `seen`: called with each row and its decision, or why there is none.
    """
    check_new(out)
    rows = list(read_table(source, [column_of(calibration.signal)[0]]))
    check_out(rows, source, out, (*DECIDED, "digest", "error"))
    with locked(out):
        file = Output(Path(out))
        for row in rows:
            found, error, record = None, row.error, {"row": row.number, **row.content}
            try:
                found = None if error else calibration.decide(_answer(record, calibration.signal))
            except ValueError as failure:
                error = str(failure)
            if found is None:
                record["error"] = error
            else:
                record |= {name: getattr(found, name) for name in DECIDED}
                record |= {"correct": record.get("correct"), "digest": Decision.digest(record)}
            file.add(record)
            seen(row, Outcome(row.number - 1, row.content.get("id"), found, error))
        file.finish()
