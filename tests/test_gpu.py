"""The script for a machine with a GPU, rehearsed on a processor."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from lm_polygraph.utils.common import load_external_module

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu.py"


@pytest.fixture(scope="module")
def gpu():
    return load_external_module(str(SCRIPT))


@pytest.mark.slow
def test_a_rehearsal_runs_to_its_end(tmp_path):
    out = tmp_path / "gpu.md"
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--rehearse", "--out", str(out)],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    written = out.read_text()
    assert written.startswith("# A rehearsal: no number here means anything")
    assert written.count("\npassed, ") == 4
    for shown in (
        "Numerical tests", "shape of qwen3-4b", "shape of llama-2-7b", "rows of asmi_coqa",
        "masked passes equal full passes, bfloat16 |", "out of memory halves the batch",
        "parts of a model elsewhere", "peak MB",
        "| cross_encoder |", "| loading, other baselines, quality |", "Peak memory: main",
    ):  # fmt: skip
        assert shown in written


def test_a_part_that_fails_costs_no_other(gpu, tmp_path, monkeypatch):
    def failing(title, summary):
        code = "import sys; print('a number'); sys.exit('CUDA out of memory')"
        return gpu.run(title, [sys.executable, "-c", code], tmp_path / f"{title}.log", summary)

    part = failing("first", gpu.fenced)
    assert part.outcome == "failed (exit 1)"
    assert "a number" in part.text
    assert "CUDA out of memory" in part.text
    assert "No summary: ZeroDivisionError" in failing("second", lambda _: 1 / 0).text

    good = gpu.Part("good", "true", "passed", 1.0, "kept")
    for name in ("tests", "cost", "benchmark"):
        monkeypatch.setattr(gpu, name, lambda *_: good)
    out = tmp_path / "gpu.md"
    arguments = ["--rehearse", "--out", str(out)]
    assert CliRunner().invoke(gpu.main, arguments).exit_code == 0
    monkeypatch.setattr(gpu, "tests", lambda *_: part)
    assert CliRunner().invoke(gpu.main, arguments).exit_code == 1
    assert out.read_text().count("kept") == 3
    assert "- first: failed (exit 1)" in out.read_text()
