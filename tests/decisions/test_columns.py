"""Any column as a signal: from another library's table to decisions and their test, by no model."""

import json
import math

import numpy as np
import pytest

from lm_polygraph_asmi.analysis import Labelled
from lm_polygraph_asmi.decisions import Calibration, calibrate_rows, risk_threshold
from lm_polygraph_asmi.scoring.scorer import Scorer
from lm_polygraph_asmi.scoring.sheet import key_of
from lm_polygraph_asmi.tables import read_table
from tests.decisions.conftest import done, run, table, write
from tests.scoring.conftest import PROMPT

N = 150


@pytest.fixture(autouse=True)
def no_model(monkeypatch, few_resamples):  # noqa: ARG001 - no test below asks for intervals
    monkeypatch.setattr(Scorer, "__init__", lambda *_, **__: pytest.fail("a model was loaded"))


def drawn(seed, n=N, first=0):
    """Rows with an uncertainty and the confidence that is as much; the surer, the more right."""
    rng = np.random.default_rng(seed)
    unsure = rng.normal(size=n).round(6)
    wrong = rng.random(n) < 1 / (1 + np.exp(2 - 2 * unsure))
    return [
        {"id": f"q{i}", "prompt": f"Question {i}: {PROMPT}", "answer": f" {i}", "unsure": float(u),
         "sure": float(-u), "correct": bool(not w), "model": "their-model", "text": "kept"}
        for i, (u, w) in enumerate(zip(unsure, wrong, strict=True), start=first)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("suffix", "column", "left_out", "sample"),
    [
        ("csv", "unsure", (), None),
        ("jsonl", "-sure", ("prompt", "answer"), None),
        ("csv", "-sure", ("prompt",), 30),
    ],
)
def test_from_a_table_of_scores_to_the_monitor(tmp_path, suffix, column, left_out, sample):
    """A confidence, its sign turned, decides as the uncertainty does; an id is a question, too. A
    sample to label has the accepted answers of the least keys, which are hashes."""

    def saved(name, rows):
        kept = [{n: v for n, v in row.items() if n not in left_out} for row in rows]
        return table(tmp_path / f"{name}.{suffix}", kept)

    rows, later = drawn(0), drawn(1, 80, first=N)
    out, decided, sheet = (tmp_path / name for name in ("c.json", "d.jsonl", "s.csv"))
    words = ("--risk", 0.1, "--signal", f"column:{column}", "--out", out)
    said = done("calibrate", saved("rows", rows), *words)
    unsure, wrong = [row["unsure"] for row in rows], [not row["correct"] for row in rows]
    expected = risk_threshold(unsure, Labelled(wrong, [row["id"] for row in rows]), 0.1, 0.95)
    assert Calibration.load(out).guarantee == expected
    assert (f"{expected.error_rate:.0%} are wrong" in said, "nats" in said) == (True, False)
    new = saved("new", [row | {"correct": ""} for row in later])
    drawn_by = ("--sample", sample) if sample else ()
    done("decide", new, "--calibration", out, "--out", decided, "--sheet", sheet, *drawn_by)
    taken = [row["unsure"] <= expected.threshold for row in later]
    lines, labels = ([row.content for row in read_table(path)] for path in (decided, sheet))
    assert [(line["accept"], line["text"]) for line in lines] == [(one, "kept") for one in taken]
    keys = list(map(key_of, lines))
    given = {k: row["correct"] for k, row, one in zip(keys, later, taken, strict=True) if one}
    expected = sorted(given)[:sample] if sample else keys
    assert [label["key"] for label in labels] == expected
    table(sheet, [label | {"correct": given.get(label["key"], "")} for label in labels][::-1])
    found = json.loads(run("monitor", out, decided, "--labels", sheet, "--json")[1])
    right = [given[key] for key in expected if key in given]
    assert (found["accepted"], found["errors"]) == (len(right), right.count(False))
    same = saved("same", [row | {"answer": "another"} for row in rows])
    again = tmp_path / "again.jsonl"  # the questions of the calibration
    done("decide", same, "--calibration", out, "--out", again)
    code, said = run("monitor", out, again)
    assert (code, "a question of the calibration" in said) == (1, True)


def spoiled(at=None, **change):
    return [row | change if at in (None, i) else row for i, row in enumerate(drawn(0, 30))]


@pytest.mark.parametrize(
    ("rows", "signal", "words"),
    [
        (spoiled(4, unsure="high"), "column:unsure", r"row 5: column 'unsure':"),
        (spoiled(4, unsure=""), "column:unsure", r"row 5: column 'unsure': "),
        (spoiled(4, unsure=None), "column:-unsure", "row 5: column 'unsure':"),
        (spoiled(4, unsure=math.nan), "column:unsure", "row 5: column 'unsure':"),
        (spoiled(4, unsure="inf"), "column:unsure", "row 5: column 'unsure':"),
        (spoiled(4, unsure=True), "column:unsure", "row 5: column 'unsure':"),
        (spoiled(unsure=0.5), "column:unsure", "column 'unsure' has the same number in all rows"),
        (spoiled(), "column:nothing", "row 1: column 'nothing':"),
        (spoiled(), "column:", "column:NAME; got 'column:'"),
        (spoiled(4, id=None, prompt=None), "column:unsure", 'row 5: .*"prompt"'),
        (spoiled(4, id="q0"), "column:unsure", 'row 5: "id": row 1'),
        (spoiled(correct=None), "column:unsure", "labelled answers, got none"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_columns_that_are_refused(rows, signal, words):
    with pytest.raises(ValueError, match=words):
        calibrate_rows(rows, 0.2, signal=signal)


def test_a_row_without_the_number_is_not_decided(tmp_path):
    """It has an error; the others are decided, and a blank answer never is accepted."""
    out, decided = tmp_path / "c.json", tmp_path / "d.jsonl"
    calibrate_rows(drawn(0), 0.3, signal="column:unsure").save(out)
    later = [row | {"unsure": -9.0} for row in drawn(1, 4, first=N)]
    later[1]["unsure"], later[2]["answer"] = "none", " \n"
    code, said = run(
        "decide", table(tmp_path / "in.csv", later), "--calibration", out, "--out", decided
    )
    assert (code, "column 'unsure': expected a number, got 'none'" in said) == (1, True)
    assert [row.content.get("accept") for row in read_table(decided)] == [True, None, None, True]
    code, said = run("monitor", out, decided)
    words = "the accepted share is unknown", "1 rows that failed. Left out 1 empty answers"
    assert (code, [part for part in words if part not in said]) == (4, []), said


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({"accept": "yes"}, (), "accept"),
        ({"digest": "0"}, (), "digest"),
        ({"value": 1}, (), "value"),
        ({"row": 1}, (), "row"),
        ({}, ("--out", "in.csv"), "in.csv exists"),
        ({}, ("--out", "out.csv"), ".jsonl or .parquet"),
        ({}, ("--sheet", "sheet.csv"), "sheet.csv exists"),
        ({}, ("--model", "m", "--chat"), "leave out --model, --chat"),
    ],
)
def test_files_that_decide_refuses(tmp_path, monkeypatch, change, options, words):
    """Before a row is decided: nothing is written."""
    monkeypatch.chdir(tmp_path)
    calibrate_rows(drawn(0), 0.3, signal="column:unsure").save("c.json")
    table(tmp_path / "in.csv", [row | change for row in drawn(1, 3, first=N)])
    (tmp_path / "sheet.csv").write_text("labels")
    code, said = run("decide", "in.csv", "--calibration", "c.json", "--out", "d.jsonl", *options)
    assert (code, words in said) == (1, True), said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.json", "in.csv", "sheet.csv"]
    assert (tmp_path / "sheet.csv").read_text() == "labels"


@pytest.mark.parametrize(("size", "void"), [(2, False), (3, True)])
def test_a_cluster_larger_than_the_promise(tmp_path, size, void):
    """Decided at once as void, and left out by the monitor."""
    rows = [row | {"cluster": i // 2} for i, row in enumerate(drawn(0, 400))]
    found = calibrate_rows(rows, 0.3, signal="column:unsure")
    larger = calibrate_rows(rows, 0.3, signal="column:unsure", largest=3)
    assert (found.guarantee.largest, "no cluster has more than 2" in str(found)) == (2, True)
    assert larger.guarantee.tested < found.guarantee.tested
    out, decided = tmp_path / "c.json", tmp_path / "d.jsonl"
    found.save(out)
    later = [
        row | {"cluster": f"new {i // size}", "unsure": -9 + 18 * (i % 3 == 0)}
        for i, row in enumerate(drawn(1, 12, first=1000))
    ]
    source = write(tmp_path / "in.jsonl", later)
    for command, words in (
        (("decide", source, "--out", decided, "--calibration", out), "allows 2, so it is void"),
        (("monitor", out, decided), "void for them: 4 are left out"),
    ):
        assert (words in (said := run(*command)[1]), "Guarantee: with" in said) == (
            void, not void and "decide" in command,
        )  # fmt: skip
