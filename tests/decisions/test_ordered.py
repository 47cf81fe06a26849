"""Labels from the surest answer on, as a person gives them: sheets, looks, and what is refused."""

import csv

import numpy as np
import pytest

from lm_polygraph_asmi.analysis.risk_control import ordered_threshold
from lm_polygraph_asmi.decisions import Calibration, calibrate_rows
from lm_polygraph_asmi.decisions.rows import scored_rows, surest_first, write_ordered_sheet
from lm_polygraph_asmi.scoring.scorer import Scorer
from lm_polygraph_asmi.scoring.sheet import key_of
from lm_polygraph_asmi.tables import read_table
from tests import tiny_lm
from tests.decisions.conftest import WORDS, labelled, lines_of, numbered, run, write
from tests.scoring.conftest import PROMPT

N = 60
ASK = ("--risk", 0.3, "--confidence", 0.9)


def questions(n=N, size=1):
    """Rows of different answers without labels, `size` a cluster."""
    draw = np.random.default_rng(1)
    return [
        {"prompt": f"Question {i}: {PROMPT}", "id": f"q{i}", "cluster": i // size,
         "answer": " " + " ".join(draw.choice(WORDS, 1 + i % 4))}
        for i in range(n)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def lines(scorer):
    return lines_of(scorer, questions())


@pytest.fixture
def place(tmp_path, lines):
    """A file of scores, its sheet by MSP, and how to label it."""
    write(tmp_path / "answers.jsonl", lines)
    assert write_ordered_sheet(tmp_path / "answers.jsonl", tmp_path / "s.csv", "msp") == N
    return tmp_path


def sheet_of(path):
    return [row.content for row in read_table(path)]


def save(path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        written = csv.DictWriter(file, rows[0])
        written.writeheader()
        written.writerows(rows)


def look(place, *more):
    code, said = run("calibrate", place / "answers.jsonl", "--labels", place / "s.csv", *ASK,
                     "--out", place / "c.json", *more)  # fmt: skip
    assert code == 0, said
    return Calibration.load(place / "c.json"), said


def test_as_a_person_does_it(tmp_path, monkeypatch):
    """Scored, labelled from the top, looked at, re-sorted, labelled on, until nothing helps."""
    tiny_lm.save(tmp_path / "model")
    write(tmp_path / "in.jsonl", questions())
    files = ("--out", tmp_path / "answers.jsonl", "--sheet", tmp_path / "s.csv")
    code, said = run("score", tmp_path / "in.jsonl", "--model", tmp_path / "model", *files,
                     "--surest-first", "msp", "--num-masks", 4, "--mask-rate", 0.3)  # fmt: skip
    assert code == 0, said
    monkeypatch.setattr(Scorer, "__init__", lambda *_, **__: pytest.fail("a model was loaded"))
    rows, scores = sheet_of(tmp_path / "s.csv"), list(read_table(tmp_path / "answers.jsonl"))
    values = {key_of(row.content): row.content["signals"]["msp"] for row in scores}
    order = [row["key"] for row in rows]
    assert [values[key] for key in order] == sorted(values.values())
    assert [row["rank by msp"] for row in rows] == list(map(str, range(1, N + 1)))
    ranks = np.arange(N)
    wrong = dict(zip(order, (ranks % 10 == 9) | (ranks >= 40), strict=True))
    seen, labels = list[Calibration](), np.full(N, np.nan)
    while True:
        found, said = look(tmp_path)  # the same --out each time
        rule, to_label = ordered_threshold([values[key] for key in order], labels, 0.3, 0.9)
        assert found.guarantee == rule
        assert f"{int((~np.isnan(labels)).sum())} of {N} answers, the surest first" in said
        seen.append(found)
        if not len(to_label):
            break
        first, last = to_label[[0, -1]] + 1
        assert f"label {len(to_label)} more, the rows of rank {first} to {last}" in said
        labels[to_label] = [wrong[order[at]] for at in to_label]
        given = {order[at]: not labels[at] for at in np.flatnonzero(~np.isnan(labels))}
        for row in rows:
            row["correct"] = given.get(row["key"], "")
        shuffled = np.random.default_rng(len(seen)).permutation(N)
        save(tmp_path / "s.csv", [rows[at] for at in shuffled])
    assert "No further label helps" in said
    coverages = [one.guarantee.coverage for one in seen]
    assert coverages == sorted(coverages)
    assert 0 < coverages[-1] < 1
    assert (seen[0].guarantee.threshold, seen[-1].guarantee.base_rate) == (None, None)
    assert len(seen) > 3
    assert np.isnan(labels).any()  # it ended before all were labelled


@pytest.mark.parametrize("largest", [None, 4])
def test_the_largest_cluster_is_named_where_the_sheet_is_written(tmp_path, largest):
    """Then the ranks that `calibrate` prints are those of the sheet; another one is refused."""
    tiny_lm.save(tmp_path / "model")
    write(tmp_path / "in.jsonl", questions(size=2))
    named = () if largest is None else ("--largest", largest)
    words = ("score", tmp_path / "in.jsonl", "--model", tmp_path / "model", "--num-masks", 2,
             "--mask-rate", 0.3, "--out", tmp_path / "answers.jsonl")  # fmt: skip
    code, said = run(*words, "--sheet", tmp_path / "s.csv", "--largest", 4)
    assert (code, "name a signal with --surest-first" in said) == (1, True), said
    code, said = run(*words, "--sheet", tmp_path / "s.csv", "--surest-first", "msp", *named)
    assert code == 0, said
    n = len(sheet_of(tmp_path / "s.csv"))
    assert (n == 30) == (largest is None)
    found, said = look(tmp_path, *named)
    assert (found.guarantee.answers, found.guarantee.largest) == (n, largest or 2)
    words = ("calibrate", tmp_path / "answers.jsonl", "--labels", tmp_path / "s.csv", *ASK)
    code, said = run(*words, "--largest", 3, "--out", tmp_path / "d.json")
    assert (code, "or --largest differs" in said) == (1, True), said


def labelled_sheet(place, labels):
    """The sheet with labels by rank; None: a gap."""
    rows = sheet_of(place / "s.csv")
    for row, label in zip(rows, labels, strict=False):
        row["correct"] = {None: "", 0: "true", 1: "false"}[label]
    save(place / "s.csv", rows)


def test_a_gap_counts_as_wrong_and_a_label_further_down_is_kept(place):
    few = look(place)[0].guarantee
    assert (few.threshold, few.labels) == (None, 0)
    labelled_sheet(place, [0] * 30)
    full = look(place)[0]
    for bad in (None, 1):
        labelled_sheet(place, [0, 0, bad, 0, 0, bad, *[0] * 24])
        found, said = look(place)
        assert found.guarantee.coverage < full.guarantee.coverage
        assert ("more, the rows of rank 3 to " in said) == (bad is None)
    labelled_sheet(place, [*[0] * 30, *[None] * 25, *[0] * 5])
    later = look(place)[0]
    assert later.guarantee.threshold == full.guarantee.threshold
    assert (full.guarantee.labels, later.guarantee.labels) == (30, 35)
    labelled_sheet(place, [0] * 60)
    assert look(place)[0].guarantee.coverage == 1


@pytest.mark.parametrize("signal", ["best", "learned", "entropy", "column:x"])
def test_only_its_own_signal_on_labels_in_order(place, signal):
    labelled_sheet(place, [0] * 30)
    words = ("calibrate", place / "answers.jsonl", "--labels", place / "s.csv", *ASK)
    code, said = run(*words, "--signal", signal, "--out", place / "c.json")
    assert (code, "sorted by msp" in said) == (1, True), said
    assert look(place, "--signal", "msp")[0].guarantee == look(place)[0].guarantee
    write(place / "others.jsonl", [{"prompt": "Who?"}])
    code, said = run(*words, "--unlabelled", place / "others.jsonl", "--out", place / "c.json")
    assert (code, "leave --unlabelled out" in said or "row 1" in said) == (1, True), said


@pytest.mark.parametrize("signal", ["best", "learned", "adapt", "magic"])
def test_what_no_sheet_is_sorted_by(place, signal):
    with pytest.raises(ValueError, match=f"expected a signal of .*got '{signal}'"):
        write_ordered_sheet(place / "answers.jsonl", place / "new.csv", signal)
    assert not (place / "new.csv").exists()
    if signal in ("best", "magic"):  # before a model is loaded
        code, said = run("score", write(place / "in.jsonl", labelled(2)), "--model", "none",
                         "--out", place / "o.jsonl", "--sheet", place / "new.csv",
                         "--surest-first", signal)  # fmt: skip
        assert (code, f"got '{signal}'" in said) == (1, True), said


def test_ties_are_tested_together(lines):
    """Whichever of the equal answers has the label."""
    rows = numbered(*(row | {"x": 1.0 + (i >= 40)} for i, row in enumerate(lines)))
    kept = surest_first(rows, "column:x", None)
    values = np.array([answer.signals["column:x"] for answer in kept.answers])
    assert values.tolist() == [1.0] * 40 + [2.0] * 20
    found = set()
    for seed in range(3):
        labels = np.full(N, np.nan)
        labels[np.random.default_rng(seed).permutation(40)[:39]] = 0
        rule, rest = ordered_threshold(values, labels, 0.3, 0.9)
        assert (rule.threshold, rule.coverage) == (1.0, 40 / N)
        assert len(kept.rows) == N
        found.add(len(rest))
    assert found == {21}  # the tied one without a label, and the others


@pytest.mark.parametrize("largest", [None, 3, 5])
def test_several_answers_a_cluster_are_thinned_as_they_were_written(tmp_path, scorer, largest):
    """The sheet has one answer a cluster, and each label of it counts."""
    blank = {"prompt": "?", "answer": "", "cluster": "blank"}
    rows = lines_of(scorer, [blank, *questions(size=3)])
    answers = write(tmp_path / "answers.jsonl", rows)
    n = write_ordered_sheet(answers, tmp_path / "s.csv", "msp", largest)
    of = {key_of(row): row["cluster"] for row in rows}
    sheet = sheet_of(tmp_path / "s.csv")
    clusters = [of[row["key"]] for row in sheet]
    assert len({*clusters}) == len(clusters) == n
    assert (n == 20) == (largest != 5)  # a larger one takes some of all clusters
    labelled_sheet(tmp_path, [0] * n)
    found = calibrate_rows(answers, 0.3, 0.9, labels=tmp_path / "s.csv", largest=largest)
    assert (found.n, found.guarantee.labels, found.guarantee.answers) == (n, n, n)
    assert (found.guarantee.coverage, found.guarantee.largest) == (1, largest or 3)
    labelled_sheet(tmp_path, [*[0] * (n - 3), *[None] * 3])
    for row in rows:  # labels of their own are none of these
        row["correct"] = False
    write(answers, rows)
    again = calibrate_rows(answers, 0.3, 0.9, labels=tmp_path / "s.csv", largest=largest)
    assert (again.n, again.errors) == (n - 3, 0)


def test_one_cluster_only(tmp_path, lines):
    answers = write(tmp_path / "answers.jsonl", [row | {"cluster": "one"} for row in lines])
    assert write_ordered_sheet(answers, tmp_path / "s.csv", "msp") == 1
    labelled_sheet(tmp_path, [0])
    with pytest.raises(ValueError, match="at least two clusters, got one"):
        calibrate_rows(answers, 0.3, labels=tmp_path / "s.csv")
    blank = write(tmp_path / "blank.jsonl", [row | {"digest": None} for row in lines])
    with pytest.raises(ValueError, match="expected a row with scores"):
        scored_rows(blank)
