"""What the doctor says of runs that would fail, and one that works."""

import json
import subprocess
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from datasets import Dataset

from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.runs import compose, doctor
from lm_polygraph_asmi.runs.checks import CHECKS, findings_of, read_plan
from lm_polygraph_asmi.runs.compose import compose_run
from tests.composing import run_of
from tests.polygraph import run_forked

PROMPTS = ["Who built the ferry?", "Where do kites fly?", "What is red?"]
NAMES = ["config", *CHECKS]
SCRIPT = "import datasets\nclass Rows(datasets.GeneratorBasedBuilder):\n    pass\n"
USED = {"seconds": {"asmi": {"median": 0.5}}, "peak_memory_bytes": {"main": 2 * 10**9}}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> Path:
    """An empty working directory."""
    monkeypatch.setenv("COLUMNS", "400")  # so that no text is broken into lines
    monkeypatch.delenv("HYDRA_CONFIG", raising=False)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path


@pytest.fixture
def overrides(elsewhere, tiny) -> list[str]:
    """Of a run that works, the least there is."""
    rows = {"input": PROMPTS, "output": ["red"] * len(PROMPTS)}
    Dataset.from_dict(rows).save_to_disk(elsewhere / "rows")
    return [
        "estimators=asmi_only", "output_attentions=false", "max_new_tokens=3",
        "model=asmi_local", f"model.path={tiny}", f"data.source={elsewhere}/rows",
    ]  # fmt: skip


@pytest.fixture
def shown(overrides, monkeypatch):
    """Exit status and output of the command, for which two rows are made up."""
    # What it composes is made of what other tests have composed.
    monkeypatch.setattr(compose, "compose_run", lambda name, _, given: run_of(name, *given))

    def show(tried, *arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(doctor, "try_rows", tried)
        result = CliRunner().invoke(main, [
            "doctor", "--config-name", "asmi_offline", *overrides, *arguments
        ])  # fmt: skip
        return result.exit_code, result.output

    return show


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("asmi_coka", "model=asmi_local", r"--config-name asmi_coka is no config \(did you mean "
         r"asmi_coqa\?\): there are asmi_babiqa, [\w, ]*, own$"),
        ("asmi_coqa", "model=smollm2", r"no config \(did you mean asmi_smollm2\?\): there are a"),
        ("asmi_coqa", "benchmark=", "^benchmark= is no config: there are asmi_babiqa, "),
        ("asmi_coqa", "benchmarks=asmi_coqa", r"'benchmarks' \(did you mean benchmark\?\)\. "),
        ("asmi_coqa", "asmi.depht=0.6", r"'asmi.depht' \(did you mean asmi.depth\?\)\. To append"),
        ("asmi_coqa", "estimators=[{name: Perplexity}]", r"names of files .*, got estimators=\[\{"),
        ("own", "seed=[1]", r"cannot be read as YAML: .*/own.yaml\", line 1, column 4 "),
    ],
)  # fmt: skip
def test_overrides_that_do_not_fit(elsewhere, name, override, message):
    """One sentence without Hydra's search path; of a wrong name, with the nearest."""
    (elsewhere / "cwd" / "own.yaml").write_text("a: [1")
    with pytest.raises(ValueError, match=message) as raised:
        compose_run(name, ".", [override])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "words",
    [
        "", "--config-name a --model b", "--config-name a --depth 0.5", "--model a seed=[1]",
        "--model a --no-run", "--model a --config-dir .",
    ],
)  # fmt: skip
def test_options_that_do_not_fit(words):
    result = CliRunner().invoke(main, ["doctor", *words.split()])
    assert (result.exit_code, result.output.startswith("Usage: ")) == (2, True), result.output


def test_a_users_own_config(elsewhere, overrides):
    """On top of a shipped one, with values of Hydra's."""
    (elsewhere / "cwd" / "mine.yaml").write_text(
        "defaults: [asmi_offline, _self_]\nmine: ${hydra:run.dir}\n"
        "save_path: ${hydra:runtime.output_dir}/a/${hydra:sweep.subdir}\n"
    )
    plan = read_plan(compose_run("mine", ".", overrides))
    assert plan.config.mine.startswith("./workdir/output/mine/")
    assert plan.config.save_path == f"{plan.config.mine}/a/0"
    assert findings_of(plan) == {name: [] for name in NAMES}


@pytest.mark.parametrize("in_new_process", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_that_works(elsewhere, overrides, monkeypatch, in_new_process):
    if not in_new_process:
        monkeypatch.setattr(doctor.subprocess, "run", run_forked)
    monkeypatch.setattr(doctor.tempfile, "tempdir", str(elsewhere / "tmp"))
    (elsewhere / "tmp").mkdir()
    (elsewhere / "mine.yaml").write_text("defaults: [asmi_offline, _self_]")
    shown = CliRunner().invoke(main, [
        "doctor", "--config-name", "mine", f"--config-dir={elsewhere}", *overrides
    ])  # fmt: skip
    assert shown.exit_code == 0, shown.output
    text = " ".join(shown.output.split())
    assert text.count("│ ok │") == len(NAMES) + 1
    for row in (
        *(f"a row, {phase} │" for phase in ("greedy", "asmi", "other", "in total")),
        "peak memory, main │", "the whole run │ about 0:00:",
        f"rows │ ok │ 3 in 3 clusters; the first: {PROMPTS[0]}",
    ):  # fmt: skip
        assert row in text
    assert [*(elsewhere / "cwd").iterdir(), *(elsewhere / "tmp").iterdir()] == []


SEVERAL = {"seconds": 60_060.0, "seconds_to_first_row": 30.0, "seconds_a_row": 3.0,
           "seconds_a_row_by_phase": {"asmi": 0.5, "other": 2.5},
           "peak_memory_bytes": {"main": 2 * 10**9}}  # fmt: skip
"""Of 10,000 rows with two seeds."""


@pytest.mark.parametrize(
    ("times", "manifest", "rows", "seeds", "expected"),
    [
        ([30.0, 32.0, 36.0], USED, 10_000, 2, SEVERAL),
        ([30.0, 36.0], USED, 10_000, 2, SEVERAL),  # both in one batch
        ([1.0, 3.0, 5.0], {}, 3, 1, {"seconds": 7.0, "seconds_to_first_row": 1.0,
         "seconds_a_row": 2.0, "seconds_a_row_by_phase": {"other": 2.0}, "peak_memory_bytes": {}}),
        ([], USED, 10_000, 1, {}),
    ],
)  # fmt: skip
def test_costs_of_a_whole_run(times, manifest, rows, seeds, expected):
    assert doctor.costs(times, manifest, rows, seeds) == expected


def test_what_two_rows_show(shown):
    """In a table and in JSON, of a run that works and of one job of a sweep that is not run."""
    scores = pd.DataFrame({"ASMI": [0.1, 0.2], "Perplexity": [0.1, float("nan")]})
    tried = Mock(return_value=(scores, SEVERAL))
    code, text = shown(tried)
    for row in (
        "warning │ expected finite scores, got others from Perplexity", "a row, other │ 2.50 s",
        "the whole run │ about 16:41:00", "peak memory, main │ 2.0 GB",
    ):  # fmt: skip
        assert row in " ".join(text.split())
    as_json, text = shown(tried, "--json")
    content = json.loads(text)
    assert {check["check"]: check["state"] for check in content.pop("checks")} == (
        dict.fromkeys(NAMES, "ok") | {"two rows": "warning"}
    )
    assert content == {"config": "asmi_offline", "works": True, "cost": SEVERAL}
    not_run, text = shown(None, "--no-run", "hydra.mode=MULTIRUN")
    assert "asmi_offline, one job of its sweep" in " ".join(text.split())
    assert (code, as_json, not_run, "Rough estimate" in text) == (0, 0, 0, False)


@pytest.mark.parametrize(
    ("code", "printed", "said"),
    [
        (-9, "Loading", "signal 9"),
        (1, "0\nTrace:\n File a\n  assert x\nE: a\nb\n", "Trace:\n File a\n  assert x\nE: a\nb"),
        (None, "", "expected two rows or more, got 1"),  # so none is scored
    ],
)
def test_a_run_that_fails(shown, monkeypatch, code, printed, said):
    """In JSON, and in words."""
    run = Mock(return_value=subprocess.CompletedProcess([], code, "", printed))
    monkeypatch.setattr(doctor.subprocess, "run", run)
    override = "seed=[5,6]" if code else "subsample_eval_dataset=1"
    status, text = shown(doctor.try_rows, "--json", override)
    content = json.loads(text)
    (problem,) = (check["text"] for check in content["checks"] if check["state"] == "problem")
    assert said in problem
    assert (status, content["works"], content["cost"]) == (1, False, {})
    for call in (started := run.call_args_list):
        assert {"++seed=[5]", "hydra.mode=RUN"} <= {*call.args[0]}
    assert len(started) == bool(code)
    status, text = shown(doctor.try_rows, override)
    assert (status, said.splitlines()[0] in " ".join(text.split())) == (1, True)


@pytest.mark.parametrize(
    ("files", "own", "word"),
    [
        ({"src/src.py": SCRIPT}, ["data.source=src"], "dataset src: "),
        ({"x/a.jsonl": '{"a": 1}\n{"b'}, ["data.source=x"], "types would be guessed"),
        ({}, ["data.source=no.json"], "no.json does not exist"),
        ({}, ["data.size=x"], "data.size"),
        ({"a": ""}, ["dataset=a", "load_from_disk=true"], "a"),
    ],
)
def test_data_that_cannot_be_read_are_said_in_one_line(elsewhere, overrides, files, own, word):
    for name, content in files.items():
        file = elsewhere / "cwd" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(content)
    (text,) = read_plan(run_of("asmi_offline", *overrides, *own)).faults["rows"]
    assert (word in text, "Traceback" in text) == (True, False)


def test_times_in_a_log():
    lines = [
        f"[2026-01-01 00:00:{second:02},500][lm_polygraph][INFO] - {text}"
        for second, text in [
            (1, "Initializing stat calculators..."), (5, "Done intitializing stat calculators..."),
            (5, "Something else"), (7, "===== NEW BATCH ====="), (8, "===== NEW BATCH ====="),
            (9, "===== METRICS ====="),
        ]
    ]  # fmt: skip
    assert np.diff(doctor.batch_times("\n".join(lines))).tolist() == [2.0, 1.0]
    assert doctor.batch_times("[00:00:01] stat calculators...") == []
