"""A gate on newly labelled decisions: does a calibration's guarantee still hold?"""

from collections.abc import Iterable

from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.decisions.calibration import Calibration
from lm_polygraph_asmi.decisions.decision import Decision
from lm_polygraph_asmi.decisions.labels import (
    answer_digest,
    check_once,
    check_right_from,
    clusters_of,
    identity_of,
    is_left_out,
    is_wrong,
    naming,
)
from lm_polygraph_asmi.decisions.monitoring import GroupRisk, RiskGate, risk_by_group, risk_gate
from lm_polygraph_asmi.scoring.rows import Row

NEEDED = ("prompt", "answer", "accept", "reason", "signal", "value", "threshold", "digest")
"""Fields of a saved decision that the gate reads, besides the label."""


def gate(
    calibration: Calibration,
    rows: Iterable[Row],
    by: str | None = None,
    right_from: float | None = None,
) -> tuple[RiskGate, tuple[GroupRisk, ...]]:
    """`risk_gate` and `risk_by_group`, by the field `by`, of rows of `decide --out` with labels.

    Only accepted answers need a label. One without a decision (`accept` is null) counts as
    abstained; blank ones are left out, as in the calibration. ValueError, naming row and field: no
    decision of this calibration, no label or group, or an answer seen twice, or by the calibration.
    """
    check_right_from(right_from)
    right_from = calibration.right_from if right_from is None else right_from
    calibrated, known = set(calibration.answer_digests), dict[str, int]()
    wrong, accepted, groups, counted = [], [], [], []
    for row in rows:
        with naming(row):
            _check(row, calibration)
            content = row.content
            digest = answer_digest(content["prompt"], content["answer"])
            if digest in calibrated:
                raise ValueError('"answer": the calibration has seen it; label new answers')
            check_once(known, row, digest)
            if is_left_out(content):
                continue
            counted.append(row)
            accepted.append(bool(content["accept"]))
            wrong.append(accepted[-1] and is_wrong(content, right_from))
            if by is not None:
                group = content.get(by)
                groups.append(str(group) if isinstance(group, bool) else identity_of(by, group))
    if not counted:
        raise ValueError("expected at least one labelled row with an answer, got none")
    answers = Labelled(wrong, clusters_of(counted))
    result = risk_gate(calibration.guarantee, accepted, answers)
    if by is None:
        return result, ()
    return result, risk_by_group(calibration.guarantee, accepted, groups, answers)


def _check(row: Row, calibration: Calibration) -> None:
    line = row.content
    if error := line.get("error"):
        raise ValueError(f"it failed in `polygraph_asmi decide` ({error}): remove it")
    if row.error is not None:
        raise ValueError(row.error)
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
    if line["accept"] not in (True, False, None):
        raise ValueError(f'"accept": expected true, false or null, got {line["accept"]!r}')
