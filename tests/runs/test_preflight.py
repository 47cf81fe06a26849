"""What is found before a model is loaded."""

import logging

import pytest
from datasets import Dataset, DatasetDict

from lm_polygraph_asmi.runs.preflight import check_config, check_data, rows_of
from tests.composing import composed
from tests.runs.test_squad import QUESTION, write


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def of_config(*overrides: str, estimators: list | None = None):
    config = composed("asmi_coqa", *overrides)
    if estimators:
        config.estimators = estimators
    return list(check_config(config))


def of_data(*overrides: str):
    return list(check_data(composed("asmi_babiqa", *overrides)))


def saved(folder, **columns):
    Dataset.from_dict(columns).save_to_disk(folder)
    return f"data.source={folder}"


def test_shipped_configs_are_sound():
    for name in ("asmi_coqa", "asmi_depth_sweep", "asmi_only", "asmi_offline"):
        overrides = ["data.source=x"] if name == "asmi_offline" else []
        assert list(check_config(composed(name, *overrides))) == []


RAUQ = {"name": "RAUQ", "cfg": {"alpha": 0.2, "use_entropy": False}}


@pytest.mark.parametrize(
    ("estimators", "message"),
    [
        ([RAUQ, RAUQ], "2 estimators have the name 'RAUQ'"),
        ([{"name": "Perplexitee"}], "cannot build Perplexitee"),
    ],
)
def test_estimators(estimators, message):
    (finding,) = of_config(estimators=estimators)
    assert message in finding.text
    assert finding.fatal


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("+asmi.detph=0.7", "unknown setting detph; did you mean depth?"),
        ("asmi.top_k=0", "top_k (K) must be at least 1, got 0"),
    ],
)
def test_a_setting_that_asmi_does_not_take_is_said_once(setting, message):
    (finding,) = of_config("estimators=asmi_only", "output_attentions=false", setting)
    names = "lm_polygraph_asmi.estimators.asmi, lm_polygraph_asmi.estimators.sem_asmi"
    assert finding.text.startswith(f"cannot build {names}: ")
    assert message in finding.text
    assert finding.fatal


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (
            "{name: RougeMetric, rouge_name: rougeL}",
            "write {name: RougeMetric, kwargs: {rouge_name: rougeL}}",
        ),
        ("{name: RougeMetric}", "metric RougeMetric: missing a required argument"),
        ("{name: RougeMetric, kwargs: {rogue: rougeL}}", "metric RougeMetric: "),
        ("{name: RougMetric}", "unknown quality metric 'RougMetric'"),
    ],
)
def test_quality_metrics_that_cannot_be_built(metric, message):
    (finding,) = of_config(f"generation_metrics=[{metric}]")
    assert message in finding.text
    assert finding.fatal


def test_a_quality_metric_with_its_arguments_by_name():
    metrics = "generation_metrics=[{name: RougeMetric, kwargs: {rouge_name: rougeL}}]"
    assert of_config(metrics) == []


def test_values_that_must_be_given():
    config = composed("asmi_coqa", "model=asmi_local", "+data.more={a: ???}")
    assert list(check_config(config)) == [
        ("data.more.a is missing: add data.more.a=... to the command", True),
        ("model.path is missing: add model.path=... to the command", True),
    ]
    assert list(check_data(config)) == []
    (finding,) = check_config(composed("asmi_stability"))  # where others are made of it
    assert finding.text.startswith("answers is missing")


@pytest.mark.parametrize(
    ("overrides", "message", "fatal"),
    [
        (["output_attentions=false"], "RAUQ, RAUQ (entropy) read attention maps, but outp", True),
        (["asmi.answers=run"], "saved answers of asmi.answers lack", True),
        (
            ["model.load_model_args.attn_implementation=sdpa"],
            "loaded with sdpa attention, which returns no attention maps",
            True,
        ),
        (["generation_params.do_sample=true"], "would sample the greedy answers", True),
        (["generation_params.do_sample=null"], "do_sample is not set", False),
        (["batch_size=4"], "Use batch_size: 1", False),
        (["ignore_exceptions=true"], "loses all its scores", False),
        (["seed=[1,2]"], "the runs will be equal", False),
        (["asmi.method=asmi"], "asmi.method=asmi has no effect in a benchmark: set est", True),
        (["asmi.depths=[0.3,0.9]"], "read depths [0.6], asmi.depths has [0.3, 0.9]: add", True),
        (["asmi.stop=[x]"], "set generation_params.stop_strings", True),
        (["asmi.max_new_tokens=5"], "set max_new_tokens", True),
    ],
)
def test_settings(overrides, message, fatal):
    (finding,) = of_config(*overrides)
    assert message in finding.text
    assert finding.fatal == fatal


def test_larger_batches_without_stop_strings_are_fine():
    assert of_config("batch_size=4", "generation_params.stop_strings=null") == []


@pytest.mark.parametrize(
    ("columns", "overrides", "message"),
    [
        ({"input": ["a", "b"], "gold": ["x", "y"]}, [], "expected a column 'output'"),
        ({"input": [], "output": []}, [], "is empty or damaged"),
        ({"input": ["a"], "output": ["x"]}, [], "expected two rows or more, got 1"),
        ({"input": ["a", "b"], "output": ["x", "y"]}, ["subsample_eval_dataset=1"], ", got 1"),
        ({"input": ["a", "b"], "output": ["x", "y"]}, ["data.num_shards=2"], ", got 1"),
        ({"input": ["a", "b"], "output": ["x", "y"]}, ["subsample_eval_dataset=0.1"], ", got 0"),
        ({"input": ["a", "b"], "output": ["x", None]}, [], "1 row: test:1 (its answer is null)"),
        ({"input": ["a", "b"], "output": ["x", "y"]}, ["data.shard=1"], "expected data.shard in"),
    ],
)
def test_data(tmp_path, columns, overrides, message):
    (finding,) = of_data(saved(tmp_path / "d", **columns), *overrides)
    assert message in finding.text
    assert finding.fatal


def test_subsamples_of_shards(tmp_path):
    rows = {"input": list("abcdefgh"), "output": list("abcdefgh")}
    split = ["data.num_shards=2", "subsample_eval_dataset=3"]
    (finding,) = of_data(saved(tmp_path / "d", **rows), *split)
    assert "would differ from an unsplit run" in finding.text
    assert finding.fatal


def test_columns_of_the_source_are_named_below_data(tmp_path):
    rows = {"question": ["a", "b"], "output": ["x", "y"]}
    columns = ["text_column=question", "data.text_column=question"]
    (finding,) = of_data(saved(tmp_path / "d", **rows), *columns)
    assert "name the columns of the source with data.text_column" in finding.text
    assert of_data(saved(tmp_path / "e", **rows), columns[1]) == []


def test_sound_data(tmp_path):
    assert of_data(saved(tmp_path / "d", input=["a", "b"], output=["x", "y"])) == []
    squad = f"data.source={write(tmp_path / 'q.json', [QUESTION, QUESTION])}"
    assert of_data("benchmark=asmi_squad", squad) == []


def test_a_dataset_that_cannot_be_reached():
    (finding,) = of_data("data.source=nowhere/at-all")
    assert "cannot reach the dataset nowhere/at-all" in finding.text
    assert finding.fatal


def test_a_dataset_named_directly(tmp_path):
    """Without the node `data`, as in configs of LM-Polygraph's own."""
    Dataset.from_dict({"input": ["a"], "gold": ["x"]}).save_to_disk(tmp_path / "d")
    (finding,) = of_data(f"dataset={tmp_path / 'd'}")
    assert "expected a column 'output'" in finding.text
    one = Dataset.from_dict({"input": ["a", "b"], "output": ["x", "y"]})
    DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "splits")
    (finding,) = of_data(f"dataset={tmp_path / 'splits'}")
    assert f"reads a folder of one: name {tmp_path / 'splits' / 'test'}" in finding.text
    assert finding.fatal
    assert of_data(f"dataset={tmp_path / 'splits' / 'test'}") == []
    (tmp_path / "two").mkdir()
    Dataset.from_dict({"input": ["a", "b"], "output": ["x", "y"]}).to_csv(tmp_path / "two/t.csv")
    config = composed("asmi_coqa", "subsample_eval_dataset=0.5", "eval_split=train")
    config.dataset = [str(tmp_path / "two"), "default"]
    assert len(rows_of(config)) == 1


@pytest.mark.parametrize(
    ("content", "messages"),
    [
        ("input,output\na,007\nb,c\n", ["'007' into 7"]),
        ("input,output\na,007\n", ["7, not a text", "'007' into 7", "two rows or more, got 1"]),
        ("input,output\na,b\n,c\nd,\n", ["2 rows: 1 (its prompt is nan, not a text); 2", "007"]),
        ("input,gold\na,x\nb,y\n", ["got ['input', 'gold']: set text_c"]),
        ("", ["No columns to parse"]),
    ],
)
def test_a_csv_file(tmp_path, content, messages):
    (tmp_path / "d.csv").write_text(content)
    findings = of_data(f"dataset={tmp_path / 'd.csv'}", "load_from_disk=false")
    for finding, message in zip(findings, messages, strict=True):
        assert message in finding.text
        assert finding.fatal == ("007" not in message)


def test_repeated_prompts_are_said_once(tmp_path, caplog):
    source = saved(tmp_path / "d", input=["a", "b", "a"], output=["x", "y", "z"])
    with caplog.at_level(logging.WARNING, "lm_polygraph"):
        assert of_data(source) == []
    assert caplog.text.count("repeat an earlier prompt") == 1


@pytest.mark.parametrize(
    ("gold", "metric", "fatal"),
    [
        ("Эдда", "RougeMetric", True),
        ("Хольм 1931", "RougeMetric", True),
        ("北京", "RougeMetric", True),
        ("🙂", "RougeMetric", True),
        ("the", "ReferenceInAnswer", True),
        ("?!", "TokenF1", True),
        ("A", "AccuracyMetric", True),
        ("القاهرة", "AlignScore", False),
    ],
)
def test_gold_answers_that_a_metric_cannot_judge(tmp_path, gold, metric, fatal):
    data = saved(tmp_path / "data", input=["Who?", "When?"], output=["Holm 1931", gold])
    arguments = ", args: [rougeL]" if metric == "RougeMetric" else ""
    config = composed("asmi_babiqa", data, f"generation_metrics=[{{name: {metric}{arguments}}}]")
    config.process_target_fn = composed("asmi_demo").process_target_fn  # drops articles
    findings = list(check_data(config))
    (finding,) = [each for each in findings if "cannot judge" in each.text]
    assert f"1 of 2 rows (test:1: {gold!r}" in finding.text
    advised = (
        "{name: AccuracyMetric}" if gold in ("the", "?!", "A") else "{name: ReferenceInAnswer}"
    )
    assert advised in finding.text
    assert finding.fatal == fatal


def test_gold_answers_of_other_scripts_have_a_metric(tmp_path):
    data = saved(tmp_path / "data", input=["Who?", "When?", "?"], output=["Эдда", "北京", "🙂"])
    findings = of_data(data, "generation_metrics=[{name: ReferenceInAnswer}]")
    assert not [each for each in findings if "cannot judge" in each.text]


@pytest.mark.parametrize("cluster", [None, "", " "])
def test_a_cluster_that_is_missing(tmp_path, cluster):
    columns = {"input": ["Who?", "When?"], "output": ["Holm", "1931"], "cluster": ["a", cluster]}
    findings = of_data(saved(tmp_path / "data", **columns))
    assert any("test:1 (its cluster is missing)" in each.text for each in findings)
