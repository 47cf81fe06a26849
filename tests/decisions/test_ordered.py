"""Labels from the surest answer on, as a person gives them: sheets, looks, and what is refused."""

import shutil
from functools import partial

import numpy as np
import pytest
from simulate_guarantee import Case, labels_used

from lm_polygraph_asmi.analysis.risk_control import ordered_threshold
from lm_polygraph_asmi.decisions import Calibration, calibrate_rows
from lm_polygraph_asmi.decisions.rows import write_ordered_sheet
from lm_polygraph_asmi.scoring.scorer import Scorer
from lm_polygraph_asmi.scoring.sheet import key_of, write_sheet
from lm_polygraph_asmi.tables import read_table
from tests.decisions.conftest import done, labelled, lines_of, refused, run, table, write

N = 36
ASK = ("--risk", 0.3, "--confidence", 0.9)


@pytest.fixture(scope="module")
def asked(tmp_path_factory, scorer, scored):
    """A blank answer and others without labels, each a cluster, with their sheet."""
    place = tmp_path_factory.mktemp("ordered")
    blank = lines_of(scorer, [{"prompt": "?", "answer": "", "cluster": "blank"}])
    rows = [row | {"correct": None, "cluster": i} for i, row in enumerate(scored[: 2 * N : 2])]
    write(place / "answers.jsonl", [*blank, *rows])
    assert write_ordered_sheet(place / "answers.jsonl", place / "s.csv", "msp")[0] == N
    return place


@pytest.fixture
def place(asked, tmp_path):
    return shutil.copytree(asked, tmp_path / "place")


def sheet_of(path):
    return [row.content for row in read_table(path)]


def look(place, *more):
    said = done("calibrate", place / "answers.jsonl", "--labels", place / "s.csv", *ASK,
                "--out", place / "c.json", *more)  # fmt: skip
    return Calibration.load(place / "c.json"), said


def test_as_a_person_does_it(place, monkeypatch):
    """Labelled from the top, looked at, re-sorted, labelled on, until nothing helps."""
    monkeypatch.setattr(Scorer, "__init__", lambda *_, **__: pytest.fail("a model was loaded"))
    rows, (_, *scores) = sheet_of(place / "s.csv"), sheet_of(place / "answers.jsonl")
    values = {key_of(row, "msp"): row["signals"]["msp"] for row in scores}
    order, ranks = [row["key"] for row in rows], np.arange(N)
    assert [values[key] for key in order] == sorted(values.values())
    assert [row["rank by msp"] for row in rows] == list(map(str, range(1, N + 1)))
    wrong = (ranks % 10 == 9) | (ranks >= 26)  # so that one of the last test may be wrong
    seen, labels, to_label = list[Calibration](), np.full(N, np.nan), ranks
    while len(to_label):
        found, said = look(place)  # the same --out each time
        rule, to_label, spare = ordered_threshold([values[key] for key in order], labels, 0.3, 0.9)
        assert found.guarantee == rule
        seen.append(found)
        if len(to_label):
            first, last = to_label[[0, -1]] + 1
            assert f"label {len(to_label)} more, of rank {first} to {last}. It" in said
            assert (
                f"most {spare} of them {'is' if spare == 1 else 'are'} wrong"
                + ("." if rule.threshold is None else "; if not, this threshold stays.")
                in said
            )
        labels[to_label] = wrong[to_label]
        given = {order[at]: not labels[at] for at in np.flatnonzero(~np.isnan(labels))}
        shuffled = np.random.default_rng(len(seen)).permutation(N)
        kept = ["key", "correct"] if len(seen) % 2 else [*rows[0]]  # people remove columns
        changed = [rows[at] | {"correct": given.get(order[at], "")} for at in shuffled]
        table(place / "s.csv", [{name: row[name] for name in kept} for row in changed])
    assert "No further label helps: the sequence of tests has ended." in said
    coverages = [one.guarantee.coverage for one in seen]
    assert coverages == sorted(coverages)
    assert 0 == coverages[0] < coverages[-1] < 1
    # It ended before all were labelled.
    wanted = labels_used(Case("steep", N, 1, 0.3, 0.9), np.sort([*values.values()]), wrong)
    assert found.n <= wanted < N


def labelled_sheet(place, labels):
    """The sheet with labels by rank; None: a gap."""
    rows = sheet_of(place / "s.csv")
    for row, label in zip(rows, labels, strict=False):
        row["correct"] = {None: "", 0: "true", 1: "false"}[label]
    table(place / "s.csv", rows)


def test_another_look_is_at_the_same_labels(place, monkeypatch):
    """With another risk, of other answers or of random labels, it takes another file."""
    labelled_sheet(place, [1] * 30)
    assert "are wrong to show a rate of at most 0.3" in look(place)[1]
    labelled_sheet(place, [0] * 30)
    seen = look(place)[0]
    monkeypatch.chdir(place)
    rows = enumerate(read_table("answers.jsonl"))
    write_sheet([row.content | {"correct": n % 2 == 0} for n, row in rows], "random.csv")
    for change in (
        ("--labels", "s.csv", "--risk", 0.2), ("--labels", "s.csv", "--confidence", 0.8),
        (), ("--labels", "random.csv"),
    ):  # fmt: skip
        code, said = run("calibrate", "answers.jsonl", *ASK, *change, "--out", "c.json")
        assert (code, "c.json exists" in said) == (1, True), said
    assert Calibration.load("c.json") == seen


def test_only_its_own_signal_on_labels_in_order(place):
    labelled_sheet(place, [0] * 30)
    words = ("calibrate", place / "answers.jsonl", "--labels", place / "s.csv", *ASK)
    for more, told in (
        *(
            (("--signal", signal), "sorted by msp")
            for signal in ("best", "learned", "entropy", "column:x")
        ),
        (("--unlabelled", place / "answers.jsonl"), "leave --unlabelled out"),
    ):
        code, said = run(*words, *more, "--out", place / "c.json")
        assert (code, told in said) == (1, True), said
    assert look(place, "--signal", "msp")[0].guarantee == look(place)[0].guarantee


@pytest.mark.parametrize("signal", ["best", "learned", "adapt", "magic"])
def test_what_no_sheet_is_sorted_by(place, signal):
    with pytest.raises(ValueError, match=f"got '{signal}'"):
        write_ordered_sheet(place / "answers.jsonl", place / "new.csv", signal)
    assert not (place / "new.csv").exists()
    words = ("score", write(place / "in.jsonl", labelled(2)), "--model", "none", "--out")
    files = (place / "o.jsonl", "--sheet", place / "new.csv")
    code, said = run(*words, *files, "--surest-first", signal)
    assert (code, f"got '{signal}'" in said) == (1, True), said  # before a model is loaded


@pytest.mark.parametrize("largest", [None, 3, 5])
def test_several_answers_a_cluster_are_thinned_as_they_were_written(tmp_path, asked, largest):
    """The sheet has one answer a cluster, and each label of it counts."""
    blank, *rows = sheet_of(asked / "answers.jsonl")
    rows = [blank, *(row | {"cluster": i // 3} for i, row in enumerate(rows))]
    answers = write(tmp_path / "answers.jsonl", rows)
    of = {key_of(row, "msp"): row["cluster"] for row in rows}
    n, why = write_ordered_sheet(answers, tmp_path / "s.csv", "msp", largest)
    assert f"1 in {largest or 3}," in why
    assert ("rows 2, 3" in why) == (largest != 5)
    clusters = [of[row["key"]] for row in sheet_of(tmp_path / "s.csv")]
    assert len({*clusters}) == len(clusters) == n
    assert (n == N // 3) == (largest != 5)  # a larger one takes some of all clusters
    labelled_sheet(tmp_path, [*[0] * (n - 3), *[None] * 3])
    shuffled = np.random.default_rng(0).permutation(len(rows))  # with labels not of the sheet
    write(answers, [rows[at] | {"correct": False} for at in shuffled])
    found = calibrate_rows(answers, 0.3, 0.9, labels=tmp_path / "s.csv", largest=largest)
    rule = found.guarantee
    counts = found.n, found.errors, rule.labels, rule.answers, rule.largest
    assert counts == (n - 3, 0, n - 3, n, largest or 3)
    with pytest.raises(ValueError, match="--largest"):
        calibrate_rows(answers, 0.3, 0.9, labels=tmp_path / "s.csv", largest=50)


def test_one_cluster_and_no_answer(tmp_path, asked):
    lines = sheet_of(asked / "answers.jsonl")
    answers = write(tmp_path / "answers.jsonl", [row | {"cluster": "one"} for row in lines])
    unscored = write(tmp_path / "blank.jsonl", [row | {"digest": None} for row in lines])
    nothing, sheet = write(tmp_path / "none.jsonl", []), tmp_path / "s.csv"
    assert write_ordered_sheet(answers, sheet, "msp")[0] == 1
    labelled_sheet(tmp_path, [0])
    refused(
        (partial(calibrate_rows, answers, 0.3, labels=sheet), "two clusters"),
        (partial(write_ordered_sheet, unscored, sheet, "msp"), "row 1: .* with scores"),
        (partial(write_ordered_sheet, nothing, sheet, "msp"), "answers to label"),
    )
