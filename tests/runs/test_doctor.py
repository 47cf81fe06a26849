"""What the doctor says of runs that would fail, and one that works."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from click.testing import CliRunner
from datasets import Dataset
from lm_polygraph import WhiteboxModel
from lm_polygraph.stat_calculators.prompt import PromptCalculator, SamplingPromptCalculator
from omegaconf import OmegaConf
from rich.filesize import decimal

from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.host import window
from lm_polygraph_asmi.host.configs import configs_path
from lm_polygraph_asmi.runs import doctor, trial
from lm_polygraph_asmi.runs.compose import compose_run
from lm_polygraph_asmi.runs.preflight import CHECKS, check_config, findings_of
from lm_polygraph_asmi.runs.protocol import protocol
from lm_polygraph_asmi.runs.trial import Trial, costs, estimate
from tests import tiny_lm
from tests.composing import run_of
from tests.polygraph import run_forked

PROMPTS = ["Who built the ferry?", "Where do kites fly?", "What is red?"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_lm.save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> Path:
    """An empty working directory with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "400")  # so that no text is broken into lines
    monkeypatch.delenv("HYDRA_CONFIG", raising=False)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path


@pytest.fixture
def overrides(elsewhere, model) -> list[str]:
    """Of a run that works, the least there is."""
    rows = {"input": PROMPTS, "output": ["red"] * len(PROMPTS)}
    Dataset.from_dict(rows).save_to_disk(elsewhere / "rows")
    return [
        "estimators=asmi_only",
        "output_attentions=false",
        "max_new_tokens=3",
        "model=asmi_local",
        f"model.path={model}",
        f"data.source={elsewhere}/rows",
    ]


def findings(check: str, overrides: list[str], **changed: object) -> list[tuple[str, bool]]:
    """(text, fatal) of what a check finds."""
    config = run_of("asmi_offline", *overrides)
    for key, value in changed.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return findings_of(CHECKS[check], config)


def test_nothing_to_say_of_a_run_that_works(overrides):
    config = run_of("asmi_offline", *overrides)
    assert [findings_of(check, config) for check in CHECKS.values()] == [[]] * len(CHECKS)


@pytest.fixture
def composed_once(monkeypatch) -> None:
    """What the command composes is made of what other tests have composed."""
    for module in ("compose", "doctor"):
        monkeypatch.setattr(
            f"lm_polygraph_asmi.runs.{module}.compose_run",
            lambda name, _, overrides: run_of(name, *overrides),
        )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("asmi.detph=0.6", "Could not override 'asmi.detph'"),
        ("model=nowhere", "Could not find 'model/nowhere'\n\nAvailable options in 'model':"),
        ("model=asmi_local,asmi_smollm2", "Ambiguous value"),
    ],
)
def test_overrides_that_do_not_fit(override, message):
    with pytest.raises(ValueError, match=message):
        compose_run("asmi_offline", None, [override])


def test_a_config_that_does_not_exist(elsewhere):
    (elsewhere / "cwd" / "asmi_cobra.yaml").touch()
    arguments = ["doctor", "--config-name", "asmi_coca", "--config-dir", "."]
    shown = CliRunner().invoke(main, arguments)
    assert shown.exit_code == 1
    assert "expected a config among asmi_babiqa, " in shown.output
    assert "asmi_cobra, asmi_coqa, " in shown.output


def test_a_users_own_config(elsewhere, overrides):
    """On top of a shipped one, with values of Hydra's."""
    text = "defaults: [asmi_offline, _self_]\nsave_path: ${hydra:runtime.output_dir}/mine\n"
    (elsewhere / "cwd" / "mine.yaml").write_text(text)
    config = compose_run("mine", ".", overrides)
    assert config.save_path.startswith("./workdir/output/mine/")
    assert [findings_of(check, config) for check in CHECKS.values()] == [[]] * len(CHECKS)


def test_auto_wants_attention_maps(overrides):
    auto = {"output_attentions": True, "stat_calculators": ["auto"]}
    script = "model__path_to_load_script"
    arguments = "model__load_model_args__attn_implementation"
    default = {script: "model/default_causal.py"}
    for changed, expected in (
        ({}, []),
        ({arguments: None}, [True]),
        (default | {arguments: None}, [True]),
        (default, []),
        (default | {arguments: None, "output_attentions": False}, []),
        ({script: "mine.py", arguments: None}, [False]),
    ):
        found = findings("settings", overrides, **(auto | changed))
        assert [fatal for _, fatal in found] == expected, changed
        for text, _ in found:
            assert "attn_implementation=eager, or output_attentions=false" in text
    config = run_of("asmi_offline", *overrides)
    del config.model.load_model_args.attn_implementation
    config.output_attentions = True
    assert list(check_config(config)) == []  # our script asks for eager attention by itself


@pytest.mark.parametrize("in_new_process", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_that_works(elsewhere, overrides, monkeypatch, in_new_process):
    if not in_new_process:
        monkeypatch.setattr(trial.subprocess, "run", run_forked)
    monkeypatch.setattr(trial.tempfile, "tempdir", str(elsewhere / "tmp"))
    for folder in ("conf", "tmp"):
        (elsewhere / folder).mkdir()
    arguments = ["doctor", "--config-name", "asmi_offline", "--config-dir", f"{elsewhere}/conf"]
    shown = CliRunner().invoke(main, [*arguments, *overrides])
    assert shown.exit_code == 0, shown.output
    text = " ".join(shown.output.split())
    assert text.count("│ ok │") == len(CHECKS) + 1
    for phase in ("greedy │", "asmi │", "one row, in total │", "peak memory, main │"):
        assert phase in text
    assert "the whole run, 3 rows │ about" in text
    assert "ASMI │ 2: ASMI (60%, K=64), Sem-ASMI (60%, K=64)" in text
    assert list((elsewhere / "cwd").iterdir()) == []
    assert list((elsewhere / "tmp").iterdir()) == []


@pytest.mark.usefixtures("composed_once")
def test_scores_that_are_not_finite(overrides, monkeypatch):
    scores = pd.DataFrame({"ASMI": [0.1, 0.2], "Perplexity": [0.1, float("nan")]})
    monkeypatch.setattr(doctor, "try_rows", lambda *_: Trial(scores, [], {}, {}))
    shown = CliRunner().invoke(main, ["doctor", "--config-name", "asmi_offline", *overrides])
    assert shown.exit_code == 0
    assert "warning │ expected finite scores, got others from Perplexity" in shown.output


def test_rows_that_no_source_names_are_described(model):
    config = compose_run("asmi_demo", overrides=[f"model.path={model}", "model=asmi_local"])
    text = protocol(config)["rows"]  # the node hydra cannot be resolved outside a run
    assert text.startswith("40 of ")
    assert text.endswith("split test, in 20 clusters")


@pytest.mark.usefixtures("composed_once")
def test_as_json(overrides, model, monkeypatch):
    scores = pd.DataFrame({"ASMI": [0.1, 0.2]})
    trial = Trial(scores, [1.0, 3.0, 5.0], {"asmi": 0.5}, {"main": 7})
    monkeypatch.setattr(doctor, "try_rows", lambda *_: trial)
    arguments = ["doctor", "--config-name", "asmi_offline", "--json", *overrides]
    shown = CliRunner().invoke(main, arguments)
    assert shown.exit_code == 0
    content = json.loads(shown.stdout)
    assert (content["works"], content["config"]) == (True, "asmi_offline")
    names = [check["check"] for check in content["checks"]]
    assert names == [*CHECKS, "two rows"]
    assert content["cost"] == {
        "rows": 3, "seeds": 1, "phases": {"asmi": 0.5}, "seconds_a_row": 2.0,
        "seconds_to_first_row": 1.0, "seconds": 7.0, "peak_memory_bytes": {"main": 7},
    }  # fmt: skip
    found = content["protocol"]
    assert found["ASMI"] == "2: ASMI (60%, K=64), Sem-ASMI (60%, K=64)"
    assert found["baselines"] == "none"
    assert found["masks"] == (
        "depth 60.0% (layer 2 of 4): S = 47, p = 0.09, bernoulli masks, scope all, seed 0"
    )
    assert found["model"].startswith(f"{model}, revision sha256:")
    assert found["model"].endswith("float32; 4 layers, 4 heads, context window 256")
    assert found["generation"].startswith("greedy, at most 3 tokens, stop strings ['\\n'], batches")
    assert found["quality"] == "RougeMetric(rougeL), ReferenceInAnswer(), TokenF1()"
    assert found["rows"].endswith("rows, split validation, in 3 clusters")
    assert found["rows"].startswith("3 of ")
    assert found["attention maps"] == "none kept"
    assert found["first prompt"] == PROMPTS[0]
    shown = CliRunner().invoke(main, [*arguments, "subsample_eval_dataset=1"])
    assert shown.exit_code == 1
    content = json.loads(shown.stdout)
    assert content["works"] is False
    (problem,) = (check for check in content["checks"] if check["state"] == "problem")
    assert "expected two rows or more, got 1" in problem["text"]


@pytest.mark.usefixtures("composed_once")
def test_two_rows_that_fail(overrides, monkeypatch):
    def fail(*_):
        raise RuntimeError("E: no\nhint")

    monkeypatch.setattr(doctor, "try_rows", fail)
    shown = CliRunner().invoke(main, ["doctor", "--config-name", "asmi_offline", *overrides])
    assert shown.exit_code == 1
    assert "problem │ E: no" in shown.output


@pytest.mark.usefixtures("composed_once")
def test_without_two_rows(overrides, monkeypatch):
    monkeypatch.setattr(doctor, "try_rows", None)
    arguments = ["doctor", "--config-name", "asmi_offline", *overrides]
    shown = CliRunner().invoke(main, [*arguments, "--no-run", "hydra.mode=MULTIRUN"])
    assert shown.exit_code == 0, shown.output
    assert "asmi_offline, one job of its sweep" in " ".join(shown.output.split())
    assert "Estimate" not in shown.output
    # A problem found beforehand keeps them from being scored, too.
    shown = CliRunner().invoke(main, [*arguments, "subsample_eval_dataset=1"])
    assert shown.exit_code == 1
    assert "expected two rows or more, got 1" in shown.output
    shown = CliRunner().invoke(main, [*arguments, "asmi.depth=2"])
    assert shown.exit_code == 1
    assert "depth must lie in (0, 1)" in shown.output


@pytest.fixture
def no_hub(monkeypatch) -> None:
    """Neither models nor data sets of the hub, whatever is in the cache."""

    def missing(*_, **__):
        raise OSError("not here")

    monkeypatch.setattr(window.AutoConfig, "from_pretrained", missing)
    monkeypatch.setattr("lm_polygraph_asmi.runs.protocol.rows_of", missing)


@pytest.mark.usefixtures("no_hub")
def test_what_the_paper_will_run_is_known_without_a_hub():
    found = protocol(run_of("asmi_coqa"))
    assert found["baselines"].startswith("17: MaximumSequenceProbability, Perplexity, MeanToken")
    assert found["masks"] == (
        "depth 60.0% (layer 22 of 36): S = 40, p = 0.15, bernoulli masks, scope all, seed 0"
    )
    assert found["model"] == (
        "Qwen/Qwen3-4B-Base, revision main, not downloaded yet, bfloat16; 36 layers, 32 heads (by "
        "the table of shipped models, not read from the model)"
    )
    assert found["quality"].startswith("AlignScore(target_is_claims=True, ckpt_path=")
    assert found["rows"] == (
        "not read (not here). By the paper: about 8000 in 499 clusters of LM-Polygraph/coqa "
        "continuation, split test"
    )
    assert found["first prompt"].startswith("(not read from the data; as the paper lists it)\nThe ")
    assert found["first prompt"].endswith("\nStory: <story>\nQuestion: <question>\nAnswer:")
    assert "attention maps" in found


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize(
    ("name", "overrides", "rows", "prompt"),
    [
        ("squad", [], "about 5000 in 1934 clusters",
         "Read the following passage and answer the question.\nPassage:\n<passage>\n"
         "Question: <question>\nAnswer:"),
        ("squad_closed_book", [], "about 5000 in 1934 clusters",
         "Question: <question>\nAnswer:"),
        ("squad", ["data.sample=200"], "data.sample=200 of about 5000", "Read the"),
        ("triviaqa", [], "about 5000 in 4404 clusters", "(not read"),
        ("babiqa", ["data.num_shards=8"], "about 1000 in 999 clusters", "(not read"),
        ("coqa", ["data.source=nowhere/at-all"], None, "not read: complete in nowhere/at-all"),
        ("coqa", ["data.split=train"], None, "(not read"),
        ("coqa", ["data.size=20"], "data.size=20 of about 8000 of LM", "(not read"),
    ],
)  # fmt: skip
def test_rows_and_prompts_that_are_known_without_a_hub(name, overrides, rows, prompt):
    found = protocol(run_of(f"asmi_{name}", *overrides))
    if rows is None:
        assert found["rows"] == "not read (not here)"
    else:
        assert rows in found["rows"]
        assert ("clusters" in found["rows"]) is rows.startswith("about")
        assert ("shard 0 of 8" in found["rows"]) is any("shards" in text for text in overrides)
    assert found["first prompt"].startswith(prompt)


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("qwen3_8b_base", "(layer 22 of 36): S = 40, p = 0.15"),
        ("llama2_7b", "(layer 19 of 32): S = 40, p = 0.15"),
        ("mistral_7b", "(layer 19 of 32): S = 40, p = 0.15"),
    ],
)
def test_masks_of_shipped_models_are_known_without_a_hub(model, expected):
    path = OmegaConf.load(configs_path() / "model" / f"asmi_{model}.yaml").path
    assert expected in protocol(run_of("asmi_coqa", f"model.path={path}"))["masks"]


@pytest.mark.usefixtures("no_hub")
def test_of_other_models_nothing_is_guessed():
    found = protocol(run_of("asmi_coqa", "model.path=hub/other"))
    assert "depth 60.0%: S = from the number of heads" in found["masks"]
    assert "layers" not in found["model"]


def test_memory_of_attention_maps(overrides):
    config = run_of("asmi_offline", *overrides, "output_attentions=true")
    host = WhiteboxModel.tokenize(SimpleNamespace(tokenizer=tiny_lm.tokenizer(), instruct=False),
                                  [max(PROMPTS, key=len)])  # fmt: skip
    n = host["input_ids"].shape[1]
    size = 4 * 4 * 4 * (n * n + (n + 1) + (n + 2))  # layers, heads, bytes; three new tokens
    assert protocol(config)["attention maps"] == (
        f"about {decimal(size)} on the model's device for the longest prompt, {n} tokens"
    )


@pytest.mark.parametrize(
    "names", [["PTrue", "PTrueSampling"], ["PTrue"], ["Perplexity"]], ids=" and ".join
)
def test_questions_of_p_true_fit_the_window(overrides, elsewhere, names):
    """The text that asks about a row is longer than its prompt, by the answers."""
    host = SimpleNamespace(tokenizer=tiny_lm.tokenizer(), instruct=False)

    def tokens(text: str) -> int:
        return WhiteboxModel.tokenize(host, [text])["input_ids"].shape[1]

    calculator = SamplingPromptCalculator() if len(names) == 2 else PromptCalculator()
    new = 3 + 1 + (10 * (3 + 1) if len(names) == 2 else 0)
    size, words = 256, 1  # of the tiny model's window
    while tokens(calculator.prompt.format(q=" a" * (words + 1), s="", a="")) + new <= size:
        words += 1
    for more, expected in ((0, []), (1, [False])):
        prompts = ["Who?", " a" * (words + more)]
        Dataset.from_dict({"input": prompts, "output": ["b"] * 2}).save_to_disk(
            elsewhere / f"rows{more}"
        )
        chosen = [*overrides[:-1], f"data.source={elsewhere}/rows{more}"]
        changed = {"estimators": [{"name": name} for name in names]}
        found = findings("rows", chosen, **changed)
        if names == ["Perplexity"]:
            assert found == []
            continue
        assert [fatal for _, fatal in found] == expected
        if found:
            assert "P(True) asks about prompt and answers in one text" in found[0][0]
            assert "in 1 of 2 rows (" in found[0][0]
            assert f": its {size - new + 1} tokens and the {new} of an answer" in found[0][0]


@pytest.mark.parametrize(
    ("limit", "num_shards", "expected"), [(100, 1, 2), (100, 2, 4), (6, 1, None), (1e6, 1, 1)]
)
def test_shards_that_keep_each_job_below_its_limit(limit, num_shards, expected):
    """Five seconds of loading, two a row, and a margin of a fifth."""
    cost = costs(Trial(pd.DataFrame(), [5.0, 7.0, 9.0], {}, {}), 74, 1, limit, num_shards)
    assert cost["shards"] == expected
    if expected:
        assert 5 + 2 * math.ceil(74 * num_shards / expected) <= 0.8 * limit
        assert f"num_shards={expected}" in " ".join(map(str, estimate(cost).columns[1]._cells))


def test_a_missing_spacy_model_is_named_before_the_run(monkeypatch, elsewhere):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    config = OmegaConf.create({"generation_metrics": [{"name": "AlignScore"}]})
    ((text, fatal),) = findings_of(CHECKS["side models"], config)
    assert "python -m spacy download en_core_web_sm" in text
    assert not fatal
    config.generation_metrics[0].name = "TokenF1"
    assert findings_of(CHECKS["side models"], config) == []
    config.generation_metrics[0].name = "AlignScore"
    (elsewhere / "cwd" / "en_core_web_sm").mkdir()  # spaCy reads a folder, too
    assert findings_of(CHECKS["side models"], config) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+save_path=/proc/x", "save_path: cannot write /proc/x"),
        ("asmi.result_cache=/proc/x", "asmi.result_cache: cannot write /proc/x"),
        ("asmi.answers=/nowhere", "asmi.answers: /nowhere is neither a manager file nor a folder"),
        ("process_output_fn.fn_name=nope", "asmi_answers.py has no function 'nope'"),
        (
            "process_target_fn.path=/nowhere.py",
            "process_target_fn.path: /nowhere.py does not exist",
        ),
        ("batch_size=0", "expected batch_size of at least 1, got 0"),
        ("seed=[x]", "expected seed as a list of whole numbers, got ['x']"),
    ],
)
def test_what_would_fail_after_loading_the_model(overrides, override, message):
    ((text, fatal),) = findings("places", [*overrides, override])
    assert message in text
    assert fatal


SCRIPT = "import datasets\nclass Rows(datasets.GeneratorBasedBuilder):\n    pass\n"


@pytest.mark.parametrize(
    ("files", "settings", "message"),
    [
        ({"src/src.py": SCRIPT}, ["data.source=src"], "cannot read the dataset src: "),
        ({"x/a.parquet": "no parquet"}, ["data.source=x"], "x has no split 'validation', or is"),
        ({"x/a.jsonl": '{"a": 1}\n{"b'}, ["data.source=x", "data.split=train"], "dataset x: "),
        ({"x/a.txt": ""}, ["data.source=x", "data.split=train"], "cannot read the dataset x: "),
        ({"x/b.csv": "input,output\na,b\n"}, ["data.source=x"], "x has no split 'validation'"),
        ({"x/dataset_info.json": "{}"}, ["data.source=x"], "cannot read the dataset x: "),
        ({}, ["data.source=no.json"], "data.source: the file no.json does not exist"),
        ({"a.json": "[1]"}, ["data.source=a.json"], "a.json"),
        ({"a.json": "{"}, ["data.source=a.json"], "a.json"),
        ({"a.json": '{"data": [{"paragraphs": 3}]}'}, ["data.source=a.json"], "a.json"),
        ({}, ["data.source=some/gated"], "cannot reach the dataset some/gated"),
        ({}, ["data.source=[some,part]"], "cannot reach the dataset some part"),
        ({}, ["data.source=no folder"], "no folder"),
        ({}, ["data.text_column=nowhere"], "expected a column 'nowhere'"),
        ({}, ["data.cluster_regex='('"], "data.cluster_regex"),
        ({}, ["data.size=x"], "data.size"),
        ({"a.csv": ""}, ["dataset=a.csv", "load_from_disk=false"], "a.csv"),
        ({"a": ""}, ["dataset=a", "load_from_disk=true"], "a"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_read_are_said_in_one_line(
    elsewhere, overrides, files, settings, message
):
    for name, content in files.items():
        (elsewhere / "cwd" / name).parent.mkdir(exist_ok=True)
        (elsewhere / "cwd" / name).write_text(content)
    line = ["doctor", "--no-run", "--json", "--config-name", "asmi_offline", *overrides]
    done = CliRunner().invoke(main, [*line, *settings])
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    checks = json.loads(done.stdout)["checks"]
    (text,) = [check["text"] for check in checks if check["state"] == "problem"]
    assert message in text
    assert "Traceback" not in text
    assert not text.startswith(("TypeError", "KeyError", "AttributeError"))
