"""The scripts that measure, on models and data small enough for a test."""

import json
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from datasets import load_from_disk
from lm_polygraph.utils.common import load_external_module

from lm_polygraph_asmi.maths import sample_head_masks
from tests.benchmarks import babi_prompt
from tests.families import tiny_model

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture(scope="module")
def bench():
    return load_external_module(str(SCRIPTS / "bench_suffix.py"))


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
def test_the_benchmark_checks_what_it_times(bench, dtype, monkeypatch):
    model = tiny_model("llama").to(dtype)
    masks = sample_head_masks(6, 4, 0.4, torch.Generator().manual_seed(0))
    with torch.no_grad():
        contenders = bench.Contenders(model, torch.arange(3, 20), 11, 2, masks)
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
    script = load_external_module(str(SCRIPTS / "build_babi.py"))
    done = CliRunner().invoke(script.main, [str(tmp_path / "babi.txt"), str(tmp_path / "babi")])
    assert done.exit_code == 0, done.output
    rows = load_from_disk(tmp_path / "babi")
    assert rows["output"] == ["office", "garden", "hallway"]
    moves = "Mary went to the office. John went to the garden."
    assert rows["input"][1] == babi_prompt(moves, "Where is John?")
    assert "Mary went" not in rows["input"][2]
    assert rows["facts"] == [1, 2, 1]


@pytest.fixture(scope="module")
def golden():
    return load_external_module(str(SCRIPTS / "golden.py"))


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({"a": [1.0, 2.0], "gone": 2, "old": 3}, {"a": [1.0, 2.0], "new": 3, "b": 4}, None),
        ({"a": float("nan")}, {"a": float("nan")}, None),
        ({"a": {"seconds": 1}}, {"a": {"seconds": 2}}, None),
        ({"a": 1.0}, {"a": 1.0 + 1e-13}, None),  # a tolerance of 1e-12
        ({"a": [1.0, 2.0]}, {"a": [1.0]}, "missing: 1"),
        ({"old": 1.0}, {"old": 1.0}, "missing: 1"),
        ({"a": 1.0}, {"a": 1.0 + 1e-9}, "differ: 1"),
        ({"a": 1.0}, {"a": float("nan")}, "differ: 1"),
    ],
)
def test_golden_values_are_compared(golden, tmp_path, monkeypatch, before, after, said):
    """What `golden.py compare` says of these values before and after, and its exit status."""
    monkeypatch.setattr(golden, "RENAMED", {"/old$": "/new"})
    monkeypatch.setattr(golden, "LEFT", ("/gone$",))
    folders = []
    for name, content in (("before", before), ("after", after)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "statistics.json").write_text(json.dumps(content))
        folders.append(str(tmp_path / name))
    arguments = ["compare", *folders, "--tolerance", "1e-12"]
    done = CliRunner().invoke(golden.main, arguments)
    assert done.exit_code == (said is not None)
    assert said is None or said in done.output
