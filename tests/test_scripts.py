"""The scripts that measure, on models and data small enough for a test."""

import os
import subprocess
import sys
from pathlib import Path

import bench_suffix
import build_babi
import click
import pytest
import torch
from click.testing import CliRunner
from datasets import load_from_disk

from lm_polygraph_asmi.core.maths import sample_head_masks
from lm_polygraph_asmi.core.model import masked_model
from tests.benchmarks import babi_prompt
from tests.families import tiny_model


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
def test_the_benchmark_checks_what_it_times(dtype, monkeypatch):
    model = tiny_model("llama").to(dtype)
    masks = sample_head_masks(6, 4, 0.4, torch.Generator().manual_seed(0))
    with torch.no_grad(), masked_model(model) as f:
        contenders = bench_suffix.Contenders(f, torch.arange(3, 20), 11, 2, masks)
        found = contenders.check()
        unmasked = contenders.scoring_pass().expand_as(contenders.exact())
        if dtype == torch.float32:
            assert max(found["exact"], found["response"]) < 1e-5
        assert found["between masks"] > max(1e-2, 4 * found["rounding"])
        for contender in ("exact", "response"):
            monkeypatch.setattr(contenders, contender, lambda: unmasked)
            with pytest.raises(click.ClickException, match="outputs differ"):
                contenders.check()
            monkeypatch.undo()


BABI = """1 Mary went to the office.
2 Where is Mary? |office|1
3 John went to the garden.
4 Where is John?\tgarden\t3
1 Sandra moved to the hallway.
2 Where is Sandra? |hallway|1
"""


def test_build_babi(tmp_path):
    (tmp_path / "babi.txt").write_text(BABI)
    done = CliRunner().invoke(build_babi.main, [str(tmp_path / "babi.txt"), str(tmp_path / "babi")])
    assert done.exit_code == 0, done.output
    rows = load_from_disk(tmp_path / "babi")
    first, second, third = "Mary went to the office.", "John went to the garden.", "Sandra moved to"
    for row, (context, who) in zip(rows["input"], (
        (first, "Mary"), (f"{first} {second}", "John"), (f"{third} the hallway.", "Sandra")
    ), strict=True):  # fmt: skip
        assert row == babi_prompt(context, f"Where is {who}?")
    assert (rows["output"], rows["facts"]) == (["office", "garden", "hallway"], [1, 2, 1])


@pytest.mark.slow
def test_a_rehearsal_runs_to_its_end(tmp_path):
    """The script for a machine with a GPU, on a processor."""
    script, out = Path(__file__).parents[1] / "scripts" / "gpu.py", tmp_path / "gpu.md"
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(
        [sys.executable, str(script), "--rehearse", "--out", str(out)],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    written = out.read_text()
    assert written.startswith("# A rehearsal: no number here means anything")
    assert written.count("\npassed, ") == 5
    for shown in (
        "| milliseconds | this commit | compiled | 4779b0d |", '["ten samples", ',
        "masked passes equal full passes, bfloat16 |", "| loading, other baselines, quality |",
        "--- docs/results/demo.txt", "not run: name --folder and --squad",
    ):  # fmt: skip
        assert shown in written
