"""Any score: a column of a table in place of a signal that was computed here.

No model is loaded. "column:NAME" is an uncertainty, higher = more uncertain; "column:-NAME" a
confidence, where higher is surer.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lm_polygraph_asmi.decisions.labels import naming
from lm_polygraph_asmi.inputs import LABELS, text_of
from lm_polygraph_asmi.scoring.answer import UnmaskedAnswer
from lm_polygraph_asmi.scoring.signals import column_of
from lm_polygraph_asmi.tables import Row

DECIDED = ("accept", "reason", "signal", "value", "threshold", "calibration")
"""Fields of a decision that are written beside a row."""


def column_answers(rows: Sequence[Row], signal: str) -> list[UnmaskedAnswer]:
    """Rows as answers with the one signal; ValueError, naming the row: no finite number."""
    answers = []
    for row in rows:
        with naming(row):
            answers.append(column_answer(row.content, signal))
    if len(answers) > 1 and len({answer.signals[signal] for answer in answers}) == 1:
        raise ValueError(f"column {column_of(signal)[0]!r} has the same number in all rows")
    return answers


def column_answer(content: Mapping[str, Any], signal: str) -> UnmaskedAnswer:
    """A row as an answer with the one signal, of whose model, tokens and end nothing is known."""
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
