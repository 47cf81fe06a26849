"""What is found before a model is loaded."""

from subprocess import CompletedProcess
from types import SimpleNamespace
from unittest.mock import Mock

import nltk
import pytest
from datasets import load_from_disk
from lm_polygraph.estimators import Perplexity, SemanticEntropy
from omegaconf import OmegaConf

from lm_polygraph_asmi.runs import checks, needs, rows
from lm_polygraph_asmi.runs.checks import CHECKS, Plan, findings_of, read_plan
from lm_polygraph_asmi.runs.rows import DataRow, RunRows
from tests.composing import composed, run_of
from tests.runs.test_rows import saved


def of_data(*overrides: str):
    """What is found in the rows of a run, or their answers."""
    return list(CHECKS["rows"](read_plan(composed("asmi_babiqa", *overrides))))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("+asmi.detph=0.7", "unknown setting detph (did you mean depth?)"),
        ("asmi.depth=1.5", "depth must lie in (0, 1), got 1.5: "),
    ],
)
def test_a_setting_that_asmi_does_not_take_is_said_once(setting, said):
    """Of all estimators together, without what OmegaConf adds; nothing else can be checked."""
    plan = read_plan(run_of("asmi_coqa", "estimators=asmi_only", setting))
    ((finding,),) = findings_of(plan).values()
    names = "lm_polygraph_asmi.estimators.asmi, lm_polygraph_asmi.estimators.sem_asmi"
    assert finding.text.startswith(f"cannot build {names}: {said}")
    assert (finding.text.count("\n"), finding.fatal) == (0, True)


def test_values_that_must_be_given():
    plan = read_plan(composed("asmi_coqa", "model=asmi_local", "+data.more={a: ???}"))
    assert plan.faults["config"] == [
        "data.more.a is missing: add data.more.a=... to the command",
        "model.path is missing: add model.path=... to the command",
    ]
    (fault,) = read_plan(composed("asmi_stability")).faults["config"]
    assert fault.startswith("answers is missing")  # of which others are made


def test_a_run_reads_its_rows_and_builds_its_estimators_once(tiny, tmp_path, monkeypatch):
    read, build = Mock(wraps=rows.read_data), checks.FactoryEstimator.__call__
    built = Mock(side_effect=lambda *how: build(checks.FactoryEstimator(), *how))
    monkeypatch.setattr(rows, "read_data", read)
    monkeypatch.setattr(checks.FactoryEstimator, "__call__", built)
    overrides = [f"model.path={tiny}", "model=asmi_local", "data.sample=5", "hydra.run.dir=x"]
    monkeypatch.chdir(tmp_path)
    config = run_of("asmi_demo", *overrides)
    plan = read_plan(config)
    assert findings_of(plan) == {name: [] for name in ("config", *CHECKS)}
    assert not (tmp_path / "x").exists()  # LM-Polygraph's asking for them saves them
    for _ in range(2):
        assert len(load_from_disk(config.dataset)) == len(plan.asked) == 5
    assert (read.call_count, built.call_count) == (1, len(config.estimators))


TWO = {"input": ["a", "b"], "output": ["x", "y"]}


@pytest.mark.parametrize(
    ("columns", "overrides", "message"),
    [
        (TWO, [], None),
        (TWO | {"output": ["北", "🙂"]}, ["generation_metrics=[{name: ReferenceInAnswer}]"], None),
        (TWO | {"output": ["北", "!"]}, ["generation_metrics=[{name: R,kwargs: {lang: a}}]"], None),
        (TWO, ["process_target_fn={path: x.py,fn_name: f}"], "only process_target_fn is set"),
        (TWO | {"output": ["x", "Huế"]}, ["generation_metrics=[{name: RougeMetric}]"],
         "(test:1: 'Huế' has 'ế', which this metric drops): use generation_metrics=[{name: "),
        (TWO | {"output": [["x"], ["Hue", "Huế"]]},
         ["+multiref=true", "generation_metrics=[{name: RougeMetric}]"], "1: 'Huế' has 'ế', which"),
        (TWO | {"output": [["x"], ["y", "z"]]}, ["+multiref=true"], None),
        (TWO | {"output": [["x"], ["y", "z"]]}, [], "test:0 (its answer is a list: set +multiref"),
        (TWO, ["+multiref=true"], "test:1 (its answer is a text, but multiref expects"),
        (TWO | {"output": ["x", ""]}, [], "test:1 (its answer is empty)"),
        (TWO | {"output": ["x", ""]}, ["data.label_column=null"], None),
        (TWO, ["data.label_column=null", "+multiref=true"], "multiref needs gold answers"),
        (TWO, ["subsample_eval_dataset=1"], "expected two rows or more, got 1"),
        (TWO, ["subsample_eval_dataset=0.1"], ", got 0"),
        ({"question": ["a", "b"], "output": ["x", "y"]},
         ["text_column=question", "data.text_column=question"],
         "name the source's columns with data.text_column"),
    ],
)  # fmt: skip
def test_data(tmp_path, columns, overrides, message):
    found = of_data(f"data.source={saved(tmp_path, **columns)}", *overrides)
    assert [(message in text, fatal) for text, fatal in found] == [(True, True)] * bool(message)


@pytest.mark.parametrize(
    ("content", "messages"),
    [
        ("input,output\na,x\nb,c\n", []),
        ("input,output\na,007\n", ["row 1 (read as ('a', 7), written ('a', '007'))"]),
        ("input,output\na,None\n", ["row 1 (read as ('a', None), written ('a', 'None'))"]),
        ("input,output\na,b,\nc,d,\n", ["row 1 (expected 2 cells, as in the header, got 3"]),
        ("input,output,output\na,b,c\n", ["the column 'output' occurs twice"]),
        ("input;output\na;b\n", ["expected a column 'input'"]),
        ("input,output\na,b\n,c\nd,\n", ["1 (its prompt is null); test:2 (its answer is null)"]),
        ("", ["No columns to parse"]),
    ],
)
def test_a_csv_file(tmp_path, content, messages):
    """Named directly, or by its folder: without the node `data`, as LM-Polygraph's own configs."""
    (tmp_path / "d.csv").write_text(content)
    if not messages:
        config = composed("asmi_coqa", "subsample_eval_dataset=0.5", "eval_split=train")
        config.dataset = [str(tmp_path), "default"]
        assert len(read_plan(config).asked) == 1
    own = f"dataset={tmp_path / 'd.csv'}", "load_from_disk=false"
    (finding,) = of_data(*own, "data.num_shards=2", "data.shard=1")
    assert finding.text.startswith("data.num_shards splits only the rows of data.source")
    findings = of_data(*own)
    for finding, message in zip(findings, messages, strict=True):
        assert message in finding.text
        assert finding.fatal


@pytest.mark.parametrize(
    ("gold", "metric", "fatal"),
    [
        ("Хольм 1931", "RougeMetric", True),
        ("the", "ReferenceInAnswer", True),
        ("?!", "TokenF1", True),
        ("A", "AccuracyMetric", True),
        ("القاهرة", "AlignScore", False),
    ],
)
def test_gold_answers_that_a_metric_cannot_judge(tmp_path, gold, metric, fatal):
    source = saved(tmp_path, input=["Who?", "When?"], output=["Holm 1931", gold])
    own = f"data.source={source}", f"generation_metrics=[{{name: {metric}}}]"
    config = composed("asmi_babiqa", *own)
    for name in ("process_output_fn", "process_target_fn"):
        config[name] = composed("asmi_demo")[name]  # drops articles
    (finding,) = CHECKS["rows"](read_plan(config))
    assert f"1 of 2 rows (test:1: {gold!r}" in finding.text
    both = ({"name": "BertScoreMetric", "kwargs": {"lang": "ru"}}, *config.generation_metrics)
    config.generation_metrics = list(both)  # of its model nothing is known
    assert list(CHECKS["rows"](read_plan(config))) == [finding]
    advised = "AccuracyMetric" if gold in ("the", "?!", "A") else "ReferenceInAnswer"
    assert f"{{name: {advised}}}" in finding.text
    assert finding.fatal == fatal


def test_few_rows_without_a_label_do_not_end_a_run(tmp_path):
    """SQuAD has a few names with accents; ROUGE is mended so that it gives them none."""
    for size, fatal in ((20, False), (8, True)):
        output = ["Holm"] * (size - 1) + ["Beyoncé"]
        source = saved(tmp_path / f"{size}", input=[f"{i}?" for i in range(size)], output=output)
        metric = "generation_metrics=[{name: RougeMetric}]"
        ((text, is_fatal),) = of_data(f"data.source={source}", metric)
        assert f"1 of {size} rows (test:{size - 1}: 'Beyoncé' has 'é'" in text
        assert is_fatal == fatal


def test_a_prompt_beyond_the_context_window(tiny, tmp_path):
    source = saved(tmp_path, input=["Who?", "Who built the ferry? " * 400], output=["x", "y"])
    own = "model=asmi_local", f"model.path={tiny}", f"data.source={source}"
    ((text, fatal),) = CHECKS["window"](read_plan(composed("asmi_babiqa", *own)))
    assert ("1 of 2 rows: test:1 (its 2" in text, fatal) == (True, True)


def test_models_that_a_run_needs_are_named_before_it(monkeypatch, tmp_path):
    """Those of LM-Polygraph's own list of metrics, and of an estimator through other statistics."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(nltk.data, "path", [])
    found = list(CHECKS["side models"](Plan(OmegaConf.create({}), [Perplexity()])))
    names = ("roberta-large, ", "sentence-transformers/all-mpnet-base-v2, ", "yzha/AlignScore ",
             "roberta-large, ", "en_core_web_sm, ", "punkt_tab, ")  # fmt: skip
    for name, (text, fatal) in zip(names, found, strict=True):
        assert fatal
        assert text.startswith(name)
    for (text, _), command in zip(found[-2:], ("spacy download", "nltk.downloader"), strict=True):
        assert f"run `python -m {command} " in text
    config = composed("asmi_coqa", "generation_metrics=[{name: RougeMetric}]")
    assert list(CHECKS["side models"](Plan(config, [Perplexity()]))) == []
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "own/base"}')
    adapted = composed("asmi_coqa", "model=asmi_local", f"model.path={tmp_path}")
    assert Plan(adapted).needs[0].name == "model own/base"
    (finding,) = CHECKS["side models"](Plan(config, [SemanticEntropy()]))
    assert finding.text.startswith("the NLI model 'microsoft/deberta-large-mnli' ")


def test_a_command_of_a_library_that_fails_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    data = needs.SENTENCES[0]
    done = CompletedProcess([], 1, "Collecting\n", "Traceback\nERROR: no matching distribution\n")
    monkeypatch.setattr(needs.subprocess, "run", run := Mock(return_value=done))
    problem = data.problem()
    assert list(needs.download([needs.Need(data.name, "AlignScore", data, problem)])) == [
        "`python -m spacy download en_core_web_sm` failed: ERROR: no matching distribution"
    ]
    assert run.call_args[0][0][1:] == ["-m", "spacy", "download", "en_core_web_sm"]


def test_folders_that_cannot_be_written_or_hold_the_results(monkeypatch, tmp_path):
    config = run_of("asmi_demo", "++save_path=/proc/x", "++asmi.result_cache=/proc/y")
    found = [text for text, _ in CHECKS["output folder"](Plan(config))]
    assert ["/proc/x" in found[0], "/proc/y" in found[1]] == [True, True]
    long = RunRows([DataRow("1", "c", "x" * 10**6, "x")] * 400)  # 0.8 GB of prompts a seed
    new = f"+save_path={tmp_path}/new/run"
    source = Mock(spec=needs.Repository, size=lambda: 10**10)
    source.missing = source.size
    for seeds, free, expected in (
        ("[1]", 10**9, ["HF_HOME"]),
        ("[1,2,3]", 10**9, ["save_path", "asmi.result_cache", "HF_HOME"]),
        ("[1]", 10**11, []),
    ):
        monkeypatch.setattr(checks.shutil, "disk_usage", lambda _, n=free: SimpleNamespace(free=n))
        plan = Plan(run_of("asmi_demo", new, f"seed={seeds}"), rows=long)
        vars(plan)["needs"] = [needs.Need("model a/b", "the run", source)] * 2
        texts = [text for text, _ in CHECKS["disk"](plan)]
        assert [text.partition(":")[0] for text in texts] == expected
        if expected:
            assert "20.0 GB" in texts[-1]


@pytest.mark.parametrize(
    ("overrides", "message", "fatal"),
    [
        (["generation_params.do_sample=true"], "would sample the greedy answers", True),
        (["generation_params.num_beams=3"], "num_beams is 3, but ASMI scores greedy", True),
        (["batch_size=4"], "Use batch_size: 1", False),
        (["batch_size=4", "generation_params.stop_strings=null"], None, False),
    ],
)
def test_generation(tiny, overrides, message, fatal):
    config = composed("asmi_coqa", "model=asmi_local", f"model.path={tiny}", *overrides)
    found = [(message in text, is_fatal) for text, is_fatal in CHECKS["generation"](Plan(config))]
    assert found == ([(True, fatal)] if message else [])
