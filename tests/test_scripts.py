"""The scripts that measure, on models and data small enough for a test."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import click
import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from datasets import load_from_disk
from lm_polygraph.utils.common import load_external_module
from lm_polygraph.utils.dataset import Dataset as HostDataset

from lm_polygraph_asmi.analysis import normalised_prr
from lm_polygraph_asmi.analysis.risk_control import RiskThreshold
from lm_polygraph_asmi.calibration import calibrate_run
from lm_polygraph_asmi.maths import sample_head_masks
from lm_polygraph_asmi.model import scoring_session
from lm_polygraph_asmi.results.runs import load_run
from lm_polygraph_asmi.runs.rows import cluster_key
from lm_polygraph_asmi.runs.squad import DEMO_DATA, read_squad
from tests import tiny_lm
from tests.benchmarks import babi_prompt
from tests.families import tiny_model
from tests.polygraph import polygraph_eval_here
from tests.report import runs as saved_runs
from tests.runs.test_squad import QUESTION, write

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


def test_the_papers_numbers_are_read_from_latex():
    script = load_external_module(str(SCRIPTS / "paper_numbers.py"))
    latex = r"""
        \begin{tabular}{lcc} \toprule
        \multirow{2}{*}{Method} & CoQA & SQuAD \\ \midrule
        \multicolumn{3}{l}{\textit{Ours}} \\
        Sem-ASMI (60\%, K=64) & \underline{0.52$\pm$0.02} & $-.05^{*}\ [-0.10, +0.01]$ \\\midrule
        MSP & \textbf{$1{,}934$} & 4 \\ % a comment & 9
        \bottomrule \end{tabular}\label{tab:x}
        It falls by ($-0.041$, 95\% CI $[-0.055, -0.025]$)."""
    assert script.table(latex, "tab:x")[1:] == [
        ["Sem-ASMI (60%, K=64)", "0.52±0.02", "-.05 [-0.10, +0.01]"],
        ["MSP", "1934", "4"],
    ]
    assert script.method_of("Sem-ASMI (60%, K=64)") == ("Sem-ASMI", "0.6")
    assert script.numbers("-.05 [-0.10, +0.01]") == ["-.05", "-0.10", "+0.01"]
    assert [script.normalised(n) for n in ("+.046", "-.05", "9.70")] == ["0.046", "-0.05", "9.70"]
    text = script.cleaned(latex)
    assert script.numbers_in(text, "by (⟨N⟩, 95% CI ⟨I⟩)") == ("-0.041", "-0.055", "-0.025")
    for absent in ("by (⟨N⟩)", "⟨N⟩"):  # missing, and more than once
        with pytest.raises(click.ClickException, match="expected this sentence once"):
            script.numbers_in(text, absent)
    with pytest.raises(click.ClickException, match="no table tab:y"):
        script.table(latex, "tab:y")


def test_the_papers_coverage_is_of_as_many_answers_as_its_tokens():
    script = load_external_module(str(SCRIPTS / "paper_numbers.py"))
    latex = r"""
        We analyze the first $500$ examples of each split, which yields $2{,}000$, $5{,}000$,
        $1{,}000$, and $1{,}500$ generated tokens on CoQA, SQuAD, BabiQA, and TriviaQA.
        \begin{tabular}{lrc} Benchmark & $n$ & $K{=}8$ & $16$ \\
        CoQA & $1570$ & $0.8$ & $0.9$ \\ TriviaQA & $298$ & $0.5$ & $0.6$ \\
        \end{tabular}\label{tab:topk-highmi}
        TriviaQA reaches 77.3\% and remains at 88.5\% even at $K = 256$."""
    rows = script.coverage(latex, script.cleaned(latex))
    assert [(row.dataset, row.n, row.value) for row in rows] == [
        ("CoQA", "4000", "0.8"), ("CoQA", "4000", "0.9"),
        ("TriviaQA", "1000", "0.5"), ("TriviaQA", "1000", "0.6"), ("TriviaQA", "1000", "0.885"),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def bench():
    return load_external_module(str(SCRIPTS / "bench_suffix.py"))


@pytest.mark.slow
def test_benchmark(bench, monkeypatch):
    monkeypatch.setattr(bench, "matmul_rate", lambda *_: 1e9)  # seconds by itself
    arguments = ["--model", "tiny", "--prompt-tokens", "20", "--repeats", "1"]
    shown = CliRunner().invoke(bench.main, arguments).output
    for contender in ("naive, 40 passes", "Algorithm 1, batched", "ours, response", "10 samples"):
        assert contender in shown
    assert "of the measured matmul rate" in shown
    rows = [line.split("│") for line in shown.splitlines() if "│" in line]
    flops = {row[1].strip(): float(row[4]) for row in rows}
    naive, batched, exact, response = (
        next(value for name, value in flops.items() if name.startswith(start))
        for start in ("naive", "Algorithm 1, batched", "ours, exact", "ours, response")
    )
    assert naive > 40 > batched > exact > response > flops["one scoring pass"] == 1


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16])
def contenders(request, bench):
    model = tiny_model("llama").to(request.param)
    masks = sample_head_masks(6, 4, 0.4, torch.Generator().manual_seed(0))
    with torch.no_grad():
        return bench.Contenders(model, torch.arange(3, 20), 11, 2, masks)


def test_the_benchmark_checks_what_it_times(contenders):
    with torch.no_grad():
        found = contenders.check()
    if contenders.model.dtype == torch.float32:
        assert max(found[name] for name in found if name != "between masks") < 1e-5
    assert found["between masks"] > 1e-2


@pytest.mark.parametrize(
    "contender", ["algorithm_1", "algorithm_1_one_by_one", "exact", "response"]
)
def test_benchmark_times_nothing_that_is_wrong(contenders, monkeypatch, contender):
    with torch.no_grad():
        right = getattr(contenders, contender)()
        unmasked = contenders.scoring_pass().expand_as(right)
        for wrong in (right.flip(0), right.flip(1), unmasked):
            monkeypatch.setattr(contenders, contender, lambda wrong=wrong: wrong)
            with pytest.raises(click.ClickException, match="outputs differ"):
                contenders.check()


@pytest.mark.parametrize("strategy", ["reuse", "stream"])
def test_benchmark_times_no_other_score_of_an_answer(contenders, monkeypatch, strategy):
    if contenders.model.dtype == torch.float32:
        with scoring_session(contenders.model):
            assert max(contenders.check_answered().values()) < 1e-5
    own = contenders.answered
    changed = lambda asked, **settings: own(asked, **settings) + (asked == strategy)  # noqa: E731
    monkeypatch.setattr(contenders, "answered", changed)
    with (
        scoring_session(contenders.model),
        pytest.raises(click.ClickException, match="MI differs"),
    ):
        contenders.check_answered()


BABI = """1 Mary went to the office.
2 Where is Mary? |office|1
3 John went to the garden.
4 Where is John?\tgarden\t3
1 Sandra moved to the hallway.
2 Where is Sandra? |hallway|1
"""


def test_build_counterfactual(tmp_path):
    def article(passage, *pairs):
        qas = [
            {"id": f"{q}{a}", "question": q, "answers": [{"text": a, "answer_start": 0}]}
            for q, a in pairs
        ]
        return {"title": passage[:5], "paragraphs": [{"context": passage, "qas": qas}]}

    file = tmp_path / "squad.json"
    built, bought = "Edda Holm built it in 1931, for coal.", "In 1950 Piet Rell bought it. 1950!"
    content = [
        article(
            built, ("Who?", "Edda Holm"), ("When?", "1931"), ("Built by Edda Holm?", "Edda Holm")
        ),
        article(bought, ("Who bought?", "Piet Rell"), ("When?", "1950"), ("What?", "it")),
    ]
    file.write_text(json.dumps({"data": content}))
    run_here("build_counterfactual.py", str(file), str(tmp_path / "answer"))
    rows = {row["id"]: row for row in load_from_disk(str(tmp_path / "answer"))}
    # The third names its answer, and of the last one's kind there is no other.
    assert {row["output"] for row in rows.values()} == {"Piet Rell", "1950", "Edda Holm", "1931"}
    assert "Piet Rell built it in 1931, for coal.\nQuestion: Who?" in rows["Who?Edda Holm"]["input"]
    assert "In 1931 Piet Rell bought it. 1931!" in rows["When?1950"]["input"]
    assert rows["When?1931"]["cluster"] == rows["Who?Edda Holm"]["cluster"] == cluster_key(built)
    run_here("build_counterfactual.py", str(file), str(tmp_path / "passage"), "--change", "passage")
    exchanged = {row["id"]: row for row in load_from_disk(str(tmp_path / "passage"))}
    assert bought in exchanged["Who?Edda Holm"]["input"]
    assert exchanged["Who?Edda Holm"]["output"] == "Edda Holm"
    assert "What?it" not in exchanged  # "it" stands in the other passage, too
    few = ("--limit", "1", "--except-limit", "3")
    run_here("build_counterfactual.py", str(file), str(tmp_path / "few"), *few)
    assert len(load_from_disk(str(tmp_path / "few"))) == 1


def test_build_babi(tmp_path):
    (tmp_path / "babi.txt").write_text(BABI)
    run_here("build_babi.py", str(tmp_path / "babi.txt"), str(tmp_path / "babi"))
    rows = load_from_disk(tmp_path / "babi")
    assert rows["output"] == ["office", "garden", "hallway"]
    moves = "Mary went to the office. John went to the garden."
    assert rows["input"][1] == babi_prompt(moves, "Where is John?")
    assert "Mary went" not in rows["input"][2]
    assert rows["facts"] == [1, 2, 1]


def test_bench_stops(tmp_path):
    """The script compares the answers itself."""
    arguments = ["--vocabulary", "2000", "--rows", "1", "--stop", "e", "--stop", "ai"]
    run_here("bench_stops.py", *arguments, "--out", str(tmp_path / "stops.csv"))
    table = pd.read_csv(tmp_path / "stops.csv")
    assert list(table["calls a row"]) == [13, 13]
    assert (table["processor seconds a row"] > 0).all()


def test_build_squad(tmp_path):
    """Both twins hold the rows of the shipped configs, in the same order."""
    rows = [QUESTION._replace(id=str(i), question=f"Whose mill {i}?") for i in range(9)]
    source = ["--source", str(write(tmp_path / "squad.json", rows)), "--size", "4"]
    run_here("build_squad.py", str(tmp_path / "open"), *source)
    run_here("build_squad.py", str(tmp_path / "closed"), *source, "--closed-book")
    opened, closed = (load_from_disk(tmp_path / name) for name in ("open", "closed"))
    host = HostDataset([q.id for q in rows], ["" for _ in rows], batch_size=1)
    host.subsample(4, seed=1)
    assert opened["id"] == closed["id"] == host.x
    assert opened["input"][0].startswith("Read the following passage and answer the question.\n")
    assert closed["input"][0] == f"Question: Whose mill {closed['id'][0]}?\nAnswer:"
    with pytest.raises(AssertionError, match="exists already: name a new folder"):
        run_here("build_squad.py", str(tmp_path / "open"), *source)


@pytest.mark.slow
def test_compare_masks_scores_what_the_run_scored(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    passages = [f"Passage {i}: the kite is {c}." for i, c in enumerate(["red", "blue", "green"])]
    rows = [
        QUESTION._replace(id=str(i), passage=passages[i % 3], answer=answer)
        for i, answer in enumerate(["red", "Who", "a passage", "The kite", "in 1931", "question"])
    ]
    folder = tmp_path / "run"
    polygraph_eval_here(
        "--config-name",
        "asmi_demo",
        "estimators=asmi_only",
        f"model.path={tiny_lm.save(tmp_path / 'tiny', max_position_embeddings=1024)}",
        "model.load_model_args.gguf_file=null",
        "model.load_tokenizer_args.gguf_file=null",
        f"data.source={write(tmp_path / 'questions.json', rows)}",
        "data.prompt_style=paper",
        "max_new_tokens=4",
        "asmi.mask_rate=0.15",
        "asmi.num_masks=40",
        f"hydra.run.dir={folder}",
    )
    compare = load_external_module(str(SCRIPTS / "compare_masks.py"))
    model, tokenizer, run, clusters = compare.load(folder)
    assert len(set(clusters)) == 3
    kept: dict = {}
    table = compare.score_run(model, tokenizer, run, kept, compare.designs(2), "sdpa")
    assert len(kept) == len(rows) * len(compare.designs(2))
    other_seeds = compare.SeedScores(table, run.quality.iloc[:, 0].to_numpy(), clusters)
    for score in ("ASMI", "Sem-ASMI"):
        (column,) = [name for name in run.scores if name.startswith(f"{score} (")]
        exact = other_seeds.scores(score, "all", "bernoulli", 40)
        np.testing.assert_allclose(exact[0], run.scores[column], rtol=1e-4, atol=1e-7)
        assert not np.allclose(exact[0], exact[1], rtol=1e-2)
        response = other_seeds.scores(score, "response", "bernoulli", 40)
        assert response.shape == (5, len(rows))
        assert not np.allclose(exact[0], response[0], rtol=1e-2)
    # A second start finds everything kept.
    monkeypatch.setattr(compare, "score_answer", None)
    again = compare.score_run(model, tokenizer, run, kept, compare.designs(2), "sdpa")
    assert again["ASMI"].equals(table["ASMI"])
    assert load_run(folder).settings()[0]["scope"] == "all"


@pytest.mark.usefixtures("few_resamples")
def test_compare_masks_tables():
    """Scores with known ranks: response seed 0 ranks as scope all does, the others reversed."""
    compare = load_external_module(str(SCRIPTS / "compare_masks.py"))
    quality = np.arange(12.0)
    right, wrong = -quality, quality
    rows = []
    for design in compare.designs(2):
        scores = {"all": (right, right), "response": (right, wrong, wrong, wrong, wrong)}
        if design.sampler == "balanced":
            scores = {"response": (right,) * 5}
        for answer, score in enumerate(scores[design.scope][design.mask_seed]):
            mi = np.array([score + 20, score + 20])
            rows.append(
                {"answer": answer, "mi": mi, "ASMI": score, "Sem-ASMI": -score} | design._asdict()
            )
    other_seeds = compare.SeedScores(pd.DataFrame(rows), quality, [str(i) for i in range(12)])
    found = compare.compare_scopes(other_seeds, "ASMI")
    assert found["PRR, scope all"] == "+1.00 [+1.00, +1.00]"
    mean = (1 + normalised_prr(wrong, quality)) / 2
    assert found["PRR, scope response"].startswith(f"{mean:+.2f} [")
    assert found["difference, response - all"].startswith(f"{mean - 1:+.2f} [")
    assert found["rank correlation of scopes, same masks"] == "0.000 (2)"  # of +1 and -1
    assert found["rank correlation of scopes, other masks"] == "-0.750 (8)"  # of 1 and 7
    assert found["rank correlation of seeds, scope all"] == "1.000 (1)"
    assert found["rank correlation of seeds, scope response"] == "0.200 (10)"  # of 6 and 4
    reverse = compare.compare_scopes(other_seeds, "Sem-ASMI")
    assert float(reverse["PRR, scope all"].split()[0]) < -0.9
    shown = {
        column.header: list(column.cells) for column in compare.scope_table(other_seeds).columns
    }
    assert shown["ASMI"] == list(found.values())
    assert "same masks: 1.000" in compare.scope_table(other_seeds).caption
    samplers = compare.sampler_table(other_seeds)
    assert list(samplers.columns[0].cells) == ["10", "20", "40", "80"]
    first = [next(iter(column.cells)) for column in samplers.columns[1:]]
    assert first[1] == "0.200"
    assert first[4:6] == ["+1.000 ± 0.000", "1.000"]


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


def test_memory_of_many_rows(capsys):
    script = load_external_module(str(SCRIPTS / "memory_of_many.py"))
    script.main(["--rows", "20"], standalone_mode=False)
    *_, last = capsys.readouterr().out.splitlines()
    done, failed, resident, rate = map(float, last.split())
    assert (done, failed) == (20, 1)  # row 1 has no prompt
    assert resident > 0 < rate


def test_a_step_by_count(capsys):
    """Masked rows meet the layers above the masked one, of four, and the tokens."""
    script = load_external_module(str(SCRIPTS / "bench_stream.py"))
    layer, tokens = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32, 100 * 32
    model = script.bench_suffix.load("tiny", torch.bfloat16, "meta")
    assert layer == sum(p.numel() for p in model.model.layers[0].parameters())
    rows = script._distinct(8, num_masks=40, mask_rate=0.15)
    assert 10 < rows < 40  # equal masks are run once
    script.main(["--count", "--model", "tiny"], standalone_mode=False)
    _, masked = [
        [group.strip() for group in line.split("│")[2:-1]]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(("│ greedy", "│ stream, S = 40"))
    ]
    products = 4 * layer + tokens + rows * (layer + tokens)
    read = 2 * (4 * layer + tokens) + 4 * (1 + rows) * 100 * script.PASSES
    assert masked[0] == str(1 + rows)
    assert float(masked[-1]) == pytest.approx(products / read, abs=0.051)
    with pytest.raises(click.BadParameter, match="got smollm2"):
        script.main(["--count"], standalone_mode=False)


@pytest.mark.slow
def test_cost_of_own_answers():
    """Every row is timed, and the kinds of work add up to what the answer takes."""
    arguments = ["--model", "tiny", "--prompt-tokens", "20", "--repeats", "1", "--shares"]
    shown = run_here("bench_stream.py", *arguments, "--response-tokens", "3")
    for row in ("greedy answer", "greedy with reuse, 20 balanced", "stream, S = 40"):
        assert row in shown
    whole = next(line for line in shown.splitlines() if line.startswith("│ all"))
    assert whole.split("│")[2].strip() == "1.00"


def test_tools_are_compared(tmp_path):
    script = load_external_module(str(SCRIPTS / "compare_tools.py"))
    tiny = tiny_lm.whitebox(max_position_embeddings=1024)
    questions = read_squad(DEMO_DATA)[::15]
    rows = [script.answer_question(tiny.model, tiny.tokenizer, one) for one in questions]
    for number, row in enumerate(rows):
        assert len(row["log_probs"]) == len(row["entropy"]) == len(row["tokens"])
        assert max(row["log_probs"]) <= max(top[0] for top in row["top"]) < 0  # greedy
        row["correct"] = number % 2
    perplexity = [-np.mean(row["log_probs"]) for row in rows]
    assert script.lm_polygraph(rows)["Perplexity"] == pytest.approx(perplexity)
    (tmp_path / "answers.json").write_text(json.dumps(rows))
    for package in ("lm_polygraph_asmi", "uqlm"):  # as another environment left them
        saved = {"version": "7.0", "scores": {"oracle": [1 - row["correct"] for row in rows]}}
        (tmp_path / f"{package}.json").write_text(json.dumps(saved))
    shown = run_here("compare_tools.py", str(tmp_path))
    assert "6 answers, 6 passages, 50% correct" in shown
    assert "| this plugin 7.0 | oracle | +1.00" in shown
    assert "| uqlm 7.0 | oracle | +1.00" in shown
    assert ("TruthTorchLM: not installed here" in shown) == (not find_spec("TruthTorchLM"))


def silent_choices():
    return load_external_module(str(SCRIPTS / "silent_choices.py"))


def test_figures_of_the_page_on_open_choices_are_those_of_its_command():
    kept = pd.read_csv(SCRIPTS.parent / "docs/reference/open-choices-evidence.csv")
    pd.testing.assert_frame_equal(
        pd.DataFrame(silent_choices().of_tables()), kept, check_exact=False, atol=0.0051
    )


def test_scores_without_closing_token_and_of_a_sum():
    answers = pd.DataFrame({
        "asmi_mi_d60": [[0.4, 0.2], [0.5], [0.1, 0.3]],
        "asmi_agreement_d60": [[0.5, 0.0], [0.0], [0.0, 0.0]],
        "closing": [True, True, False],
    })  # fmt: skip
    sem_asmi = silent_choices().sem_asmi
    np.testing.assert_allclose(sem_asmi(answers), [0.2, 0.5, 0.2])
    np.testing.assert_allclose(sem_asmi(answers, closing=False), [0.2, 0.5, 0.2])
    answers.loc[0, "asmi_mi_d60"][1] = 0.6
    np.testing.assert_allclose(sem_asmi(answers, closing=False), [0.2, 0.5, 0.2])
    np.testing.assert_allclose(sem_asmi(answers, aggregation="sum"), [0.8, 0.5, 0.4])


def test_prr_of_at_most_half():
    """By hand: means over the kept answers after 0, 1, ... rejections."""
    uncertainty, quality = np.array([0.1, 0.4, 0.2, 0.3]), np.array([1.0, 0.0, 0.25, 0.75])
    kept = [np.mean([1, 0.25, 0.75, 0]), np.mean([1, 0.25, 0.75])]
    best = [np.mean([1, 0.75, 0.25, 0]), np.mean([1, 0.75, 0.25])]
    assert silent_choices().prr_half(uncertainty, quality) == pytest.approx(
        (np.mean(kept) - 0.5) / (np.mean(best) - 0.5)
    )
    swapped = np.array([0.1, 0.2, 0.4, 0.3])
    assert silent_choices().prr_half(swapped, quality) < 1


def test_what_the_token_of_the_gate_moves():
    """Equal samples at one token leave Sem-ASMI, different ones at the other leave ASMI."""
    records = [
        {"answer": answer, "gold": "red", "diversity": [0.0, 1.0], "mi": [mi], "agreement": [a]}
        for answer, mi, a in (("red", 0.4, 0.9), ("blue", 0.3, 0.1), ("red", 0.2, 0.1))
    ]
    last, second_last, sem = silent_choices().of_gate(records)
    assert (last["median alpha"], second_last["share of alpha below 0.5"]) == (
        pytest.approx(1 / (1 + np.exp(-3))), 1,
    )  # fmt: skip
    assert last["PRR"] == sem["PRR"] == 1
    assert second_last["PRR"] < 1
