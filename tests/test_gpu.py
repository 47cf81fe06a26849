"""The script for a machine with a GPU, rehearsed on a processor."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu.py"


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
        "Numerical tests", "shape of qwen3-4b", "rows of asmi_coqa", "peak MB",
        "masked passes equal full passes, bfloat16 |", "| loading, other baselines, quality |",
    ):  # fmt: skip
        assert shown in written
