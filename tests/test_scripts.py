"""The scripts that measure, on models and data small enough for a test."""

import json
from dataclasses import replace
from pathlib import Path

import click
import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from datasets import load_from_disk
from lm_polygraph.utils.common import load_external_module

from lm_polygraph_asmi.analysis.risk_control import RiskThreshold
from lm_polygraph_asmi.calibration import calibrate_run
from lm_polygraph_asmi.maths import sample_head_masks
from lm_polygraph_asmi.results.runs import load_run
from tests.benchmarks import babi_prompt
from tests.families import tiny_model
from tests.report import runs as saved_runs

SCRIPTS = Path(__file__).parents[1] / "scripts"


def run_here(name: str, *arguments: str) -> str:
    """What the script does, without the seconds a process takes to start."""
    script = load_external_module(str(SCRIPTS / name))
    done = CliRunner().invoke(script.main, list(arguments))
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("file", sorted(SCRIPTS.glob("*.py")), ids=lambda file: file.name)
def test_as_a_program_a_script_is_its_command(file):
    assert file.read_text().endswith('\n\nif __name__ == "__main__":\n    main()\n')


@pytest.fixture(scope="module")
def bench():
    return load_external_module(str(SCRIPTS / "bench_suffix.py"))


@pytest.mark.slow
def test_benchmark(bench):
    arguments = ["--model", "tiny", "--prompt-tokens", "20", "--repeats", "1"]
    shown = CliRunner().invoke(bench.main, arguments).output
    for contender in ("naive, 40 passes", "Algorithm 1, batched", "ours, response", "10 samples"):
        assert contender in shown
    rows = [line.split("│") for line in shown.splitlines() if "│" in line]
    flops = {row[1].strip(): float(row[4]) for row in rows}
    naive, batched, exact, response = (
        next(value for name, value in flops.items() if name.startswith(start))
        for start in ("naive", "Algorithm 1, batched", "ours, exact", "ours, response")
    )
    assert naive > 40 > batched > exact > response > flops["one scoring pass"] == 1


CONTENDERS = ["algorithm_1", "algorithm_1_one_by_one", "exact", "response"]


def remembered(compute):
    """As functools.cache, which takes no slice before Python 3.12."""
    known: dict = {}

    def found(*given):
        if str(given) not in known:
            known[str(given)] = compute(*given)
        return known[str(given)]

    return found


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16])
def contenders(request, bench):
    model = tiny_model("llama").to(request.param)
    masks = sample_head_masks(6, 4, 0.4, torch.Generator().manual_seed(0))
    with torch.no_grad():
        made = bench.Contenders(model, torch.arange(3, 20), 11, 2, masks)
    for name in ("naive", *CONTENDERS):  # compared again and again
        setattr(made, name, remembered(getattr(made, name)))
    return made


def test_the_benchmark_checks_what_it_times(contenders):
    with torch.no_grad():
        found = contenders.check()
    if contenders.model.dtype == torch.float32:
        assert max(found[name] for name in found if name != "between masks") < 1e-5
    assert found["between masks"] > 1e-2


@pytest.mark.parametrize("contender", CONTENDERS)
def test_benchmark_times_nothing_that_is_wrong(contenders, monkeypatch, contender):
    with torch.no_grad():
        right = getattr(contenders, contender)()
        unmasked = contenders.scoring_pass().expand_as(right)
        wrongs = [unmasked, right.flip(0), right.flip(1)]
        for wrong in wrongs if contenders.model.dtype == torch.float32 else wrongs[:1]:
            monkeypatch.setattr(contenders, contender, lambda wrong=wrong: wrong)
            with pytest.raises(click.ClickException, match="outputs differ"):
                contenders.check()


BABI = """1 Mary went to the office.
2 Where is Mary? |office|1
3 John went to the garden.
4 Where is John?\tgarden\t3
1 Sandra moved to the hallway.
2 Where is Sandra? |hallway|1
"""


def test_build_babi(tmp_path):
    (tmp_path / "babi.txt").write_text(BABI)
    run_here("build_babi.py", str(tmp_path / "babi.txt"), str(tmp_path / "babi"))
    rows = load_from_disk(tmp_path / "babi")
    assert rows["output"] == ["office", "garden", "hallway"]
    moves = "Mary went to the office. John went to the garden."
    assert rows["input"][1] == babi_prompt(moves, "Where is John?")
    assert "Mary went" not in rows["input"][2]
    assert rows["facts"] == [1, 2, 1]


def test_promise_on_other_questions(tmp_path):
    """What is asked, labelled, held out and counted; what lies between are commands."""
    questions = [
        {"id": f"q{p}{q}", "question": f"Who {q}?", "answers": [{"text": "Edda Holm"}]}
        for p in range(6)
        for q in range(3)
    ]
    paragraphs = [
        {"context": f"Passage number {p}.", "qas": questions[3 * p : 3 * p + 3]} for p in range(6)
    ]
    (tmp_path / "squad.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("ask", "said", "some", "rest")}
    run_here("try_guarantee.py", "ask", str(tmp_path / "squad.json"), files["ask"])
    asked = [json.loads(line) for line in Path(files["ask"]).read_text().splitlines()]
    assert [row["id"] for row in asked] == [question["id"] for question in questions]
    assert all(f"Passage number {row['cluster']}." in row["prompt"] for row in asked)
    halves = []
    for draw in (("--passages", "2"), ("--skip", "2")):
        run_here("try_guarantee.py", "ask", str(tmp_path / "squad.json"), files["some"], *draw)
        halves.append(
            {json.loads(line)["id"] for line in Path(files["some"]).read_text().splitlines()}
        )
    assert halves[0] | halves[1] == {row["id"] for row in asked}
    assert (len(halves[0]), len(halves[1])) == (6, 12)
    said = [
        row | {"answer": " Edda Holm" if i % 2 else " nobody", "answered": i != 0}
        for i, row in enumerate(asked)
    ]
    Path(files["said"]).write_text("".join(json.dumps(row) + "\n" for row in said))
    run_here("try_guarantee.py", "correctness", files["said"], files["some"], "--first", "5")
    tested = [json.loads(line)["correct"] for line in Path(files["some"]).read_text().splitlines()]
    assert tested == [False, True, False, True, False]
    run_here("try_guarantee.py", "label", files["said"], files["some"], files["rest"],
             "--labelled", "4")  # fmt: skip
    some, rest = (
        [json.loads(line) for line in Path(files[name]).read_text().splitlines()]
        for name in ("some", "rest")
    )
    assert len(some) == 4
    assert not {row["cluster"] for row in some} & {row["cluster"] for row in rest}
    assert all(row["correct"] == ("Edda" in row["answer"]) for row in some + rest)
    decided = [row | {"accept": i < 5, "reason": ""} for i, row in enumerate(rest)]
    Path(files["rest"]).write_text("".join(json.dumps(row) + "\n" for row in decided))
    wrong = sum(not row["correct"] for row in rest[:5])
    shown = run_here("try_guarantee.py", "check", files["rest"])
    assert f"accepted: 5 of {len(rest)}, {wrong} wrong: {wrong / 5:.3f} [" in shown


def test_promise_from_a_finished_run(tmp_path):
    """Rows of a run, and a run in two parts, are of the same draw and hold the same."""
    saved, about = saved_runs.content(metric="ReferenceInAnswer"), saved_runs.manifest(60)
    about["config"] = {"generation_params": {"stop_strings": ["\n"]}}
    saved["stats"]["greedy_texts"][:3] = ["\n", " two lines\n\n", " cut off"]
    run = str(saved_runs.save(tmp_path / "run", saved, about))
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("said", "some", "rest", "decided")}
    draw = ("--labelled", "40", "--per-passage", "9", "--seed", "1")
    run_here("try_guarantee.py", "take", run, files["said"])
    run_here("try_guarantee.py", "label", files["said"], files["some"], files["rest"], *draw)
    said, some, rest = (
        [json.loads(line) for line in Path(files[name]).read_text().splitlines()]
        for name in ("said", "some", "rest")
    )
    assert [row["answer"] for row in said[:4]] == [
        "\n",
        " two lines\n\n",
        " cut off",
        "answer 3 0.0",
    ]
    quality = saved["gen_metrics"]["sequence", "ReferenceInAnswer"]
    assert [row["correct"] for row in said] == [value >= 0.5 for value in quality]
    assert said[0]["prompt"] == saved["stats"]["input_texts"][0]
    parts = [str(tmp_path / "own"), str(tmp_path / "others")]
    run_here("try_guarantee.py", "part", run, *parts, *draw)
    for folder, rows in zip(parts, (some, rest), strict=True):
        one = load_run(folder)
        assert one.recorded("rows")["ids"] == [row["id"] for row in rows]
        assert one.stats["input_texts"] == [row["prompt"] for row in rows]
    metric = {"metric": "ReferenceInAnswer", "resamples": 20}
    found = calibrate_run(parts[0], None, 0.3, 0.9, signal="perplexity", **metric)
    limit = RiskThreshold(0.5, 0.5, 0.1, 0.3, 0.9, 0.4, 40, 20)
    found = replace(found, guarantee=limit)
    found.save(tmp_path / "calibration.json")
    given = (parts[1], str(tmp_path / "calibration.json"), files["decided"])
    run_here("try_guarantee.py", "decide", *given)
    decided = [json.loads(line) for line in Path(files["decided"]).read_text().splitlines()]
    place = {row["id"]: number for number, row in enumerate(said)}
    for row, own in zip(rest, decided, strict=True):
        number = place[row["id"]]
        value = -saved["stats"]["asmi_log_likelihood"][number].mean()
        assert own["correct"] == row["correct"]
        assert own["accept"] == (None if number == 0 else value <= 0.5)
    assert {row["accept"] for row in decided} >= {True, False}
    moved = replace(found, settings=found.settings | {"closing_token": False})
    moved.save(tmp_path / "calibration.json")
    script = load_external_module(str(SCRIPTS / "try_guarantee.py"))
    done = CliRunner().invoke(script.main, ["decide", *given])
    assert done.exit_code == 1
    assert "closing_token False there, True here" in done.output


def test_learned_scores_are_simulated_as_the_page_says(tmp_path, monkeypatch):
    script = load_external_module(str(SCRIPTS / "try_learned.py"))
    monkeypatch.setattr(script, "SIZES", ((500, 1),))
    monkeypatch.setattr(script, "SIMULATED_RISK", 0.4)  # attained by some
    out = tmp_path / "simulations.csv"
    done = CliRunner().invoke(script.main, ["simulate", str(out), "--draws", "2"])
    assert done.exit_code == 0, done.output
    table = pd.read_csv(out).set_index("way")["accepted, %"]
    assert len(table) == 7
    assert table["learned"] > 0 == table["learned, collapses"]
    docs = SCRIPTS.parent / "docs/concepts"
    saved = pd.read_csv(docs / "learned-simulations.csv")
    ways = {way: rows.set_index(["clusters", "answers per cluster"]) for way, rows in
            saved.groupby("way")}  # fmt: skip
    page = (docs / "learned.md").read_text()
    for size, learned in ways["learned"].iterrows():
        columns = (
            f"{size[0]} × {size[1]}",
            f"{ways['simple'].loc[size, 'accepted, %']} %",
            f"{learned['accepted, %']} %",
            f"{learned['no threshold, %']:.0f} %",
            f"{learned['guarantee violated, %']:.0f} %",
        )
        assert f"| {' | '.join(columns)} |" in page
