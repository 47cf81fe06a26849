"""What is found before a model is loaded."""

from subprocess import CompletedProcess
from types import SimpleNamespace
from unittest.mock import Mock

import nltk
import pytest
from lm_polygraph.estimators import Perplexity, SemanticEntropy
from omegaconf import OmegaConf

from lm_polygraph_asmi.runs import checks, needs
from lm_polygraph_asmi.runs.checks import CHECKS, Plan, findings_of, read_plan
from lm_polygraph_asmi.runs.rows import DataRow, RunRows
from tests.composing import composed, run_of
from tests.runs.test_rows import saved

FEW = "estimators=asmi_only"  # which are built in half the time


def of_data(*overrides: str):
    """What is found in the rows of a run, or their answers."""
    return list(CHECKS["rows"](read_plan(composed("asmi_babiqa", FEW, *overrides))))


OURS = "cannot build lm_polygraph_asmi.estimators.asmi, lm_polygraph_asmi.estimators.sem_asmi: "


@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        ("asmi_coqa", ["estimators=asmi_only", "+asmi.detph=0.7"],
         [f"{OURS}unknown setting detph (did you mean depth?)"]),
        ("asmi_coqa", ["estimators=asmi_only", "asmi.depth=1.5"],
         [f"{OURS}depth must lie in (0, 1), got 1.5: "]),
        ("asmi_coqa", ["model=asmi_local", "+data.more={a: ???}"],
         ["data.more.a is missing: add data.more.a=", "model.path is missing"]),
        ("asmi_stability", [], ["answers is missing"]),  # of which others are made
        ("asmi_coqa", ["generation_params.stop_strings=['']"], ["stop must not contain an empty"]),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_read(name, overrides, said):
    """A sentence for all estimators together, without what OmegaConf adds; nothing else."""
    (findings,) = findings_of(read_plan(run_of(name, *overrides))).values()
    for (text, fatal), start in zip(findings, said, strict=True):
        assert text.startswith(start)
        assert (text.count("\n"), fatal) == (0, True)


TWO = {"input": ["a", "b"], "output": ["x", "y"]}
RUSSIAN = {"name": "BertScoreMetric", "kwargs": {"lang": "ru"}}  # the user's choice of a model


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
        (TWO | {"output": ["a", "b"]}, [], "are the prompts"),
        (TWO, ["subsample_eval_dataset=1"], "expected two rows or more, got 1"),
        (TWO, ["subsample_eval_dataset=0.1"], ", got 0"),
        ({"question": ["a", "b"], "output": ["x", "y"]},
         ["text_column=question", "data.text_column=question"],
         "name the source's columns with data.text_column"),
    ],
)  # fmt: skip
def test_data(tmp_path, columns, overrides, message):
    found = of_data(f"data.source={saved(tmp_path, **columns)}", *overrides)
    assert [(message in text, fatal) for text, fatal in found] == (
        [(True, message != "are the prompts")] * bool(message)
    )


@pytest.mark.parametrize(
    ("content", "messages"),
    [
        ("input,output\na,x\nb,c\n", []),
        ("input,output\na,007\n", ["row 1 (read as 7, written '007')"]),
        ("input,output\na,None\n", ["row 1 (read as None, written 'None')"]),
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
    (sharded,) = of_data(*own, "data.num_shards=2", "data.shard=1")
    assert sharded.text.startswith("data.num_shards splits only the rows of data.source")
    for (text, fatal), message in zip(of_data(*own), messages, strict=True):
        assert (message in text, fatal) == (True, True)


@pytest.mark.parametrize(
    ("gold", "metric", "size", "fatal", "advised"),
    [
        ("Хольм 1931", "RougeMetric", 2, True, "ReferenceInAnswer"),
        ("the", "ReferenceInAnswer", 2, True, "AccuracyMetric"),
        ("?!", "TokenF1", 2, True, "AccuracyMetric"),
        ("A", "AccuracyMetric", 2, True, "AccuracyMetric"),
        ("القاهرة", "AlignScore", 2, False, "ReferenceInAnswer"),
        # SQuAD has a few names with accents; ROUGE is mended so that it gives them no label.
        *(("Beyoncé", "RougeMetric", size, size < 10, "ReferenceInAnswer")
          for size in (20, 11, 10, 9, 8)),
    ],
)  # fmt: skip
def test_gold_answers_that_a_metric_cannot_judge(tmp_path, gold, metric, size, fatal, advised):
    """One in ten without a label does not end a run."""
    golds = [*["Holm 1931"] * (size - 1), gold]
    source = saved(tmp_path, input=[f"{i}?" for i in range(size)], output=golds)
    config = composed("asmi_babiqa", FEW, f"data.source={source}")
    drops_articles = OmegaConf.masked_copy(
        composed("asmi_demo"), ["process_output_fn", "process_target_fn"]
    )
    config.merge_with(drops_articles)
    # Of a model of the user's own choice nothing is known.
    config.generation_metrics = [RUSSIAN, {"name": metric}]
    (finding,) = CHECKS["rows"](read_plan(config))
    assert f"1 of {size} rows (test:{size - 1}: {gold!r}" in finding.text
    assert f"{{name: {advised}}}" in finding.text
    assert finding.fatal == fatal


def test_a_prompt_beyond_the_context_window(tiny, tmp_path):
    source = saved(tmp_path, input=["Who?", "Who built the ferry? " * 400], output=["x", "y"])
    own = "model=asmi_local", f"model.path={tiny}", f"data.source={source}"
    ((text, fatal),) = CHECKS["window"](read_plan(composed("asmi_babiqa", *own)))
    assert ("1 of 2 rows: test:1 (its 2" in text, fatal) == (True, True)


def test_models_that_a_run_needs_are_named_before_it(monkeypatch, tmp_path):
    """Those of LM-Polygraph's own list of metrics, and of an estimator through other statistics."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(nltk.data, "path", [])
    spacy, nltks = "run `python -m spacy download ", "run `python -m nltk.downloader "
    missing = [
        ("roberta-large, ", ""), ("sentence-transformers/all-mpnet-base-v2, ", ""),
        ("yzha/AlignScore ", ""), ("roberta-large, ", ""), ("en_core_web_sm, ", spacy),
        ("punkt_tab, ", nltks),
    ]  # fmt: skip
    rouge = composed("asmi_coqa", "generation_metrics=[{name: RougeMetric}]")
    for config, estimator, expected in (
        (OmegaConf.create({}), Perplexity(), missing),
        (OmegaConf.create({"generation_metrics": [RUSSIAN]}), Perplexity(), []),
        (rouge, Perplexity(), []),
        (rouge, SemanticEntropy(), [("the NLI model 'microsoft/deberta-large-mnli' ", "")]),
    ):
        found = CHECKS["side models"](Plan(config, [estimator]))
        for (text, fatal), (start, command) in zip(found, expected, strict=True):
            assert (text.startswith(start), command in text, fatal) == (True, True, True)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "own/base"}')
    base, *_ = Plan(composed(
        "asmi_coqa", "model=asmi_local", f"model.path={tmp_path}",
        "+model.load_model_args.cache_dir=mine",
    )).needs  # fmt: skip
    assert (base.name, base.source.cache) == ("model own/base", "mine")


def test_a_command_of_a_library_that_fails_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    data = needs.SENTENCES[0]
    done = CompletedProcess([], 1, "Collecting\n", "Traceback\nERROR: no matching distribution\n")
    monkeypatch.setattr(needs.subprocess, "run", run := Mock(return_value=done))
    assert list(needs.download([needs.Need(data.name, "AlignScore", data, data.problem())])) == [
        "`python -m spacy download en_core_web_sm` failed: ERROR: no matching distribution"
    ]
    assert run.call_args[0][0][1:] == ["-m", "spacy", "download", "en_core_web_sm"]


FOLDERS = ["save_path", "asmi.result_cache"]


@pytest.mark.parametrize(
    ("prompt", "overrides", "free", "full"),
    [
        (10**6, [], 10**9, []),  # 0.8 GB of prompts a seed
        (10**6, ["seed=[1,2,3]"], 10**9, FOLDERS),
        (10**6, ["seed=[1,2,3]"], 10**11, []),
        # 400 answers of 1000 tokens, 2000 bytes each, and a third depth
        (1, ["max_new_tokens=1000"], 10**9, []),
        (1, ["max_new_tokens=1000", "+asmi.depths=[0.6,0.7]"], 10**9, FOLDERS),
    ],
)
def test_folders_that_cannot_hold_the_results(monkeypatch, tmp_path, prompt, overrides, free, full):
    source = Mock(spec=needs.Repository, size=lambda: 10**10)
    source.missing = source.size
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    config = run_of("asmi_demo", f"+save_path={tmp_path}/new/run", *overrides)
    plan = Plan(config, rows=RunRows([DataRow("1", "c", "x" * prompt, "x")] * 400))
    vars(plan)["needs"] = [needs.Need("model a/b", "the run", source)] * 2
    texts = [text for text, _ in CHECKS["disk"](plan)]
    assert [text.partition(":")[0] for text in texts] == [*full, *(["HF_HOME"] * (free < 10**11))]
    assert [text for text in texts if "20.0 GB" in text] == texts[len(full) :]


@pytest.mark.parametrize(
    ("check", "overrides", "expected"),
    [
        ("generation", ["generation_params.do_sample=true"], {"would sample the greedy": True}),
        ("generation", ["generation_params.num_beams=3"], {"num_beams is 3": True}),
        ("generation", ["generation_params.num_beams=null", "generation_params.do_sample=null"],
         {}),
        ("generation", ["batch_size=4"], {"Use batch_size: 1": False}),
        ("generation", ["batch_size=4", "generation_params.stop_strings=null"], {}),
        ("output folder", ["++save_path=/proc/x", "++asmi.result_cache=/proc/y"],
         {"/proc/x": True, "/proc/y": True}),
    ],
)  # fmt: skip
def test_what_a_config_alone_tells(tiny, check, overrides, expected):
    config = run_of("asmi_coqa", "model=asmi_local", f"model.path={tiny}", *overrides)
    for found, (word, fatal) in zip(CHECKS[check](Plan(config)), expected.items(), strict=True):
        assert (word in found.text, found.fatal) == (True, fatal)
