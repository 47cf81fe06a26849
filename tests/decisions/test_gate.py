"""The gate on saved decisions: outcomes with their exit status, and rows that do not fit."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.decisions.decider import Decider
from lm_polygraph_asmi.decisions.decision import EMPTY, Decision
from lm_polygraph_asmi.decisions.gate import gate
from lm_polygraph_asmi.scoring.rows import Row
from tests.decisions.conftest import labelled, limited, model, tokenizer  # noqa: F401 - fixtures


@pytest.fixture
def limit(calibration):
    return limited(calibration, 1.0)


def decided(calibration, n, wrong=0):
    """Lines of `decide --out` with labels, the first of them wrong."""
    lines = []
    for i in range(n):
        line = {
            "id": i, "cluster": i, "prompt": f"New question {i}", "answer": " x", "accept": True,
            "reason": "", "value": 0.5, "calibration": calibration.name,
            "signal": calibration.signal, "threshold": calibration.guarantee.threshold,
            "settings": {}, "model": "tiny",
        }  # fmt: skip
        lines.append(line | {"digest": Decision.digest(line), "correct": i >= wrong})
    return lines


@pytest.mark.parametrize(
    ("n", "wrong", "outcome", "status"),
    [(60, 0, "holds", 0), (60, 60, "violated", 3), (4, 1, "inconclusive", 4)],
)
def test_outcomes_and_exit_status(limit, tmp_path, n, wrong, outcome, status):
    limit.save(tmp_path / "calibration.json")
    lines = decided(limit, n, wrong)
    for name, part in (("a.jsonl", lines[:2]), ("b.jsonl", lines[2:])):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in part))
    files = [str(tmp_path / name) for name in ("calibration.json", "a.jsonl", "b.jsonl")]
    ran = CliRunner().invoke(main, ["gate", *files, "--json"])
    assert ran.exit_code == status, ran.output
    printed = json.loads(ran.output)
    assert (printed["outcome"], printed["answers"], printed["errors"]) == (outcome, n, wrong)
    ran = CliRunner().invoke(main, ["gate", *files])
    assert ran.output.startswith(f"{outcome}: {wrong} of {n} accepted answers are wrong")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accept": None}, 'row 2: "digest"'),
        ({"threshold": 2.0}, 'row 2: "threshold" is 2.0'),
        ({"calibration": "other"}, 'row 2: "calibration" is'),
        ({"answer": " y"}, 'row 2: "digest"'),
        ({"correct": 0.5}, 'row 2: "correct": expected true or false'),
        ({"correct": None, "quality": float("nan")}, "row 2: quality must be a number"),
        ({"correct": None}, 'row 2: expected "correct"'),
        ({"id": 0}, 'row 2: "id": row 1 has 0, too'),
    ],
)
def test_rows_that_do_not_fit(limit, change, message):
    first, second = decided(limit, 2)
    with pytest.raises(ValueError, match=message):
        gate(limit, [Row(1, first), Row(2, second | change)])


def changed(line, **change):
    """A line of `decide --out` with another decision."""
    return line | change | {"digest": Decision.digest(line | change)}


def test_rows_without_a_decision_and_answers_seen_before(limit, tmp_path):
    """Only accepted answers need a label; those without a decision count as abstained."""
    first, second, third = decided(limit, 3)
    seen = {name: labelled()[3][name] for name in ("prompt", "answer")}
    for other, message in (
        ({"prompt": "p", "answer": "a", "correct": True}, 'row 2: no field "accept"'),
        (first | {"id": 7}, 'row 2: "answer": row 1 has the same'),
        (changed(second, **seen), 'row 2: "answer": the calibration has seen it'),
        ({"error": "no prompt"}, r"row 2: it failed in .*: remove it"),
        ({n: v for n, v in second.items() if n != "cluster"}, "in all rows or in none, .* row 2"),
    ):
        with pytest.raises(ValueError, match=message):
            gate(limit, [Row(1, first), Row(2, other)])
    unclear = changed(second, accept=None, reason="It answered nothing.")
    abstained = changed(third, accept=False)
    del abstained["correct"], unclear["correct"]
    rows = [Row(n, row) for n, row in enumerate((first, unclear, abstained), start=1)]
    result = gate(limit, rows)
    assert (result.answers, result.accepted, result.errors) == (3, 1, 0)
    rows.append(Row(4, changed(unclear, answer="\n", id=4, reason=EMPTY)))
    assert gate(limit, rows) == result
    with pytest.raises(ValueError, match="expected at least one labelled row with an answer"):
        gate(limit, rows[3:])
    limit.save(tmp_path / "calibration.json")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row.content) + "\n" for row in rows))
    files = [str(tmp_path / name) for name in ("calibration.json", "rows.jsonl")]
    ran = CliRunner().invoke(main, ["gate", *files, "--json"])
    assert json.loads(ran.output)["without_decision"] == 1
    ran = CliRunner().invoke(main, ["gate", *files])
    assert "Without a decision, so counted as abstained: 1." in ran.output
    assert "Left out 1 empty answers: they are never accepted." in ran.output


def test_lines_that_decide_writes(calibration, model, tokenizer):  # noqa: F811
    """Real decisions, written and read; one on an answer of the calibration is recognised."""
    limit, rows = limited(calibration, 100.0), labelled(4)
    decider = Decider(model, limit, tokenizer=tokenizer)
    lines = []
    for row in [row | {"prompt": "Later. " + row["prompt"]} for row in rows[:3]] + rows[3:]:
        decision = decider.decide(row["prompt"], row["answer"])
        line = json.loads(json.dumps(decision.to_dict()))
        lines.append(Row(len(lines) + 1, row | line))
    with pytest.raises(ValueError, match='row 4: "answer": the calibration has seen it'):
        gate(limit, lines)
    result = gate(limit, lines[:3])
    assert (result.answers + result.left_out, result.outcome) == (3, "inconclusive")


def test_a_quality_of_another_scale(limit):
    rows = [line | {"correct": None, "quality": 90 - 80 * (i < 5)}
            for i, line in enumerate(decided(limit, 20))]  # fmt: skip
    numbered = [Row(n, row) for n, row in enumerate(rows, start=1)]
    with pytest.raises(ValueError, match="row 1: expected quality between 0 and 1, got 10"):
        gate(limit, numbered)
    assert gate(limit, numbered, right_from=50).errors == 5
    assert gate(replace(limit, right_from=50), numbered).errors == 5  # the calibration's
    with pytest.raises(ValueError, match="right_from must be a number, got nan"):
        gate(limit, numbered, right_from=float("nan"))
