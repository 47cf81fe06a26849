"""The monitor: do newly labelled decisions still support the risk guarantee they were made with?"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import compress

import numpy as np

from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.analysis.risk_monitor import RiskMonitor, risk_monitor
from lm_polygraph_asmi.decisions.calibration import Calibration
from lm_polygraph_asmi.decisions.decision import EMPTY, Decision
from lm_polygraph_asmi.decisions.labels import (
    check_once,
    clusters_of,
    digest_of_texts,
    is_wrong,
    question_of,
)
from lm_polygraph_asmi.tables import Row, each

NEEDED = ("accept", "reason", "signal", "value", "threshold", "digest")
"""Fields of a saved decision, besides its label, that the monitor reads."""


def monitor(
    calibration: Calibration, rows: Iterable[Row], right_from: float | None = None
) -> RiskMonitor:
    """Test the guarantee on labelled rows of `decide --out` with `risk_monitor`.

    Only accepted answers need a label; those without one are left out. An answer without a decision
    (`accept` is null) counts as abstained. Blank answers and rows that failed are left out, as in
    the calibration. Raises ValueError with row and field: a decision was made with another
    calibration; an answer occurs twice; a question was used in the calibration. Raises ValueError
    also if there is no label at all.
    """
    right_from = calibration.right_from if right_from is None else right_from
    calibrated, known, every = set(calibration.question_digests), dict[str, int](), list(rows)

    def label(row: Row) -> bool | None:
        """Whether an answer is accepted and wrong; None: it is accepted but has no label."""
        wrong = bool(row.content["accept"]) and is_wrong(row.content, right_from)
        if wrong is not None:
            question, answer = question_of(row.content), row.content.get("answer") or ""
            if digest_of_texts(question) in calibrated:
                raise ValueError('"prompt": a question of the calibration: label other questions')
            tokens = tuple(answer) if isinstance(answer, list) else answer
            check_once(known, row, digest_of_texts(question, tokens))
        return wrong

    decided = [row for row in every if "digest" in row.content or not row.content.get("error")]
    each(decided, lambda row: _check(row, calibration))
    rows = [row for row in decided if row.content["reason"] != EMPTY]
    accept, wrong = [row.content["accept"] for row in rows], each(rows, label)
    accepted, clusters = np.array(accept, dtype=bool), clusters_of(rows)
    counted = np.array([one is not None for one in wrong], dtype=bool)
    unlabelled = int((~counted).sum())
    if (unlabelled or not rows) and not (accepted & counted).any():
        raise ValueError(
            f"expected at least one accepted answer with a label, got none among {unlabelled}: "
            'write true or false into "correct" of the sheet, and name it with --labels'
        )
    labels = Labelled([one for one in wrong if one is not None], list(compress(clusters, counted)))
    return replace(
        risk_monitor(calibration.guarantee, accepted[counted], labels),
        unlabelled=unlabelled,
        without_decision=accept.count(None),
        blank=len(decided) - len(rows),
        failed=len(every) - len(decided),
        share=float(accepted.mean()),
        most=max(Counter(clusters).values()),
    )


def _check(row: Row, calibration: Calibration) -> None:
    line = row.content
    if missing := [name for name in NEEDED if name not in line]:
        raise ValueError(
            f'no field "{missing[0]}": expected a row of `polygraph_asmi decide --out`, with a '
            "label"
        )
    for name, value in calibration.made_with.items():
        if line.get(name) != value:
            raise ValueError(
                f'"{name}" is {line.get(name)!r}, but {value!r} in the calibration: decide with '
                "this "
                "calibration"
            )
    if line["digest"] != Decision.digest(line):
        raise ValueError('"digest": the row was changed after its decision: decide again')
