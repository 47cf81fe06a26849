"""What the doctor says of runs that would fail, and one that works."""

import json
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner
from datasets import Dataset
from omegaconf import OmegaConf

from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.runs import doctor, trial
from lm_polygraph_asmi.runs.compose import compose_run
from lm_polygraph_asmi.runs.preflight import CHECKS, check_config, findings_of
from lm_polygraph_asmi.runs.trial import Trial
from tests import tiny_lm
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
    config = compose_run("asmi_offline", None, overrides)
    for key, value in changed.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return findings_of(CHECKS[check], config)


def test_nothing_to_say_of_a_run_that_works(overrides):
    for check in CHECKS:
        assert findings(check, overrides) == []


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
    assert "asmi_cobra, asmi_controls, asmi_coqa, " in shown.output


def test_a_users_own_config(elsewhere, overrides):
    """On top of a shipped one, with values of Hydra's."""
    text = "defaults: [asmi_offline, _self_]\nsave_path: ${hydra:runtime.output_dir}/mine\n"
    (elsewhere / "cwd" / "mine.yaml").write_text(text)
    config = compose_run("mine", ".", overrides)
    assert config.save_path.startswith("./workdir/output/mine/")
    assert [findings_of(check, config) for check in CHECKS.values()] == [[], []]


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
    config = compose_run("asmi_offline", None, overrides)
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
    assert list((elsewhere / "cwd").iterdir()) == []
    assert list((elsewhere / "tmp").iterdir()) == []


def test_scores_that_are_not_finite(overrides, monkeypatch):
    scores = pd.DataFrame({"ASMI": [0.1, 0.2], "Perplexity": [0.1, float("nan")]})
    monkeypatch.setattr(doctor, "try_rows", lambda *_: Trial(scores, [], {}, {}))
    shown = CliRunner().invoke(main, ["doctor", "--config-name", "asmi_offline", *overrides])
    assert shown.exit_code == 0
    assert "warning │ expected finite scores, got others from Perplexity" in shown.output


def test_as_json(overrides, monkeypatch):
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
    shown = CliRunner().invoke(main, [*arguments, "subsample_eval_dataset=1"])
    assert shown.exit_code == 1
    content = json.loads(shown.stdout)
    assert content["works"] is False
    (problem,) = (check for check in content["checks"] if check["state"] == "problem")
    assert "expected two rows or more, got 1" in problem["text"]


def test_two_rows_that_fail(overrides, monkeypatch):
    def fail(*_):
        raise RuntimeError("E: no\nhint")

    monkeypatch.setattr(doctor, "try_rows", fail)
    shown = CliRunner().invoke(main, ["doctor", "--config-name", "asmi_offline", *overrides])
    assert shown.exit_code == 1
    assert "problem │ E: no" in shown.output


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
