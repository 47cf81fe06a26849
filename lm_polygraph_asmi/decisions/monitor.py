"""The monitor: do newly labelled decisions support the guarantee that they were made by?"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.analysis.risk_monitor import RiskMonitor, risk_monitor
from lm_polygraph_asmi.decisions.calibration import Calibration
from lm_polygraph_asmi.decisions.decision import EMPTY, Decision
from lm_polygraph_asmi.decisions.labels import (
    check_once,
    clusters_of,
    digest_of_texts,
    has_label,
    is_wrong,
    question_of,
)
from lm_polygraph_asmi.tables import Row, each

NEEDED = ("accept", "reason", "signal", "value", "threshold", "digest")
"""Fields of a saved decision that the monitor reads, besides the label."""


def monitor(
    calibration: Calibration, rows: Iterable[Row], right_from: float | None = None
) -> RiskMonitor:
    """Test the guarantee on rows of `decide --out` with labels, by `risk_monitor`.

    Only accepted answers need a label; those without one are left out. Answers without a decision
    (`accept` is null) count as abstained; blank ones and rows that failed are left out, as in the
    calibration. ValueError, naming row and field: a decision of another calibration, no label at
    all, an answer twice, or a question of the calibration.
    """
    right_from = calibration.right_from if right_from is None else right_from
    calibrated, known = set(calibration.question_digests), dict[str, int]()

    def read(row: Row) -> tuple[Row, bool, bool | None] | None:
        """A decided row, whether it was accepted, and whether it is wrong (None: no label).

        None: the row failed, or its answer is empty.
        """
        if row.content.get("error") and "digest" not in row.content:
            return None
        _check(row, calibration)
        if row.content["reason"] == EMPTY:
            return None
        accepted = bool(row.content["accept"])
        if accepted and not has_label(row.content):
            return row, accepted, None
        question, answer = question_of(row.content), row.content.get("answer") or ""
        if digest_of_texts(question) in calibrated:
            raise ValueError('"prompt": a question of the calibration: label new ones')
        tokens = tuple(answer) if isinstance(answer, list) else answer
        check_once(known, row, digest_of_texts(question, tokens))
        return row, accepted, accepted and is_wrong(row.content, right_from)

    decided = [found for found in each(rows, read) if found is not None]
    clusters = clusters_of([row for row, _, _ in decided])
    labels = [(shown, wrong, key) for (_, shown, wrong), key in zip(decided, clusters, strict=True)]
    counted = [label for label in labels if label[1] is not None]
    unlabelled = len(decided) - len(counted)
    if not counted or (unlabelled and not any(shown for shown, _, _ in counted)):
        raise ValueError(
            f"expected at least one accepted answer with a label, got none among {unlabelled}: "
            'fill "correct" (true or false), or name the sheet with --labels'
        )
    accepted, wrong, keys = zip(*counted, strict=True)
    return replace(
        risk_monitor(calibration.guarantee, accepted, Labelled(wrong, keys)),
        unlabelled=unlabelled,
        share=float(np.mean([shown for _, shown, _ in decided])),
        most=max(Counter(clusters).values()),
    )


def _check(row: Row, calibration: Calibration) -> None:
    line = row.content
    if missing := [name for name in NEEDED if name not in line]:
        raise ValueError(
            f'no field "{missing[0]}": expected a line of `polygraph_asmi decide --out`, labelled'
        )
    for name, value in calibration.made_with.items():
        if line.get(name) != value:
            raise ValueError(
                f'"{name}" is {line.get(name)!r}, the calibration\'s {value!r}: decide with this '
                "calibration"
            )
    if line["digest"] != Decision.digest(line):
        raise ValueError('"digest": the row was changed after its decision: decide again')
