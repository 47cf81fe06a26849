"""A run killed at any moment loses nothing that was scored."""

import os
import signal

import numpy as np
import pytest
from datasets import Dataset

from lm_polygraph_asmi.results.manifest import read_manifest
from lm_polygraph_asmi.results.runs import load_run
from lm_polygraph_asmi.stat_calculators.masked_heads import MaskedHeadsCalculator
from tests import tiny_lm
from tests.polygraph import forked, polygraph_eval_here

ROWS = 4


@pytest.fixture
def prompts(tmp_path, monkeypatch) -> list[str]:
    """Of the rows in `questions`, in a folder and with a cache of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    prompts = [f"Who built the ferry {i}? Where do the blue kites start?" for i in range(ROWS)]
    rows = {"input": prompts, "output": ["the mill"] * (ROWS - 1) + ["a kite"]}
    Dataset.from_dict(rows).save_to_disk(tmp_path / "questions")
    return prompts


def in_the_third_row(send):
    """The calculator, to which something happens there."""
    scored = MaskedHeadsCalculator.__call__
    rows_done = iter(range(ROWS))

    def call(self, *arguments):
        if next(rows_done) == 2:
            send()
        return scored(self, *arguments)

    return call


@pytest.mark.usefixtures("prompts")
def test_a_killed_run_goes_on_where_it_was(tmp_path):
    overrides = [
        "--config-name", "asmi_offline", "benchmark=asmi_babiqa", "estimators=asmi",
        "data.source=questions", "model=asmi_local",
        f"model.path={tiny_lm.save(tmp_path / 'tiny')}", "output_attentions=false",
        "asmi.num_samples=2", "~generation_params.stop_strings",
    ]  # fmt: skip
    killed = forked(*overrides, "cache_path=.", "hydra.run.dir=killed")
    with pytest.MonkeyPatch.context() as patch:
        kill = in_the_third_row(lambda: os.kill(os.getpid(), signal.SIGKILL))
        patch.setattr(MaskedHeadsCalculator, "__call__", kill)
        killed.start()  # a fork, which has the patch
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "ue_manager_seed1").exists()
    assert read_manifest(tmp_path / "killed" / "ue_manager_seed1")["status"] == "running"

    for folder, cache in (("resumed", "."), ("whole", "elsewhere")):
        polygraph_eval_here(*overrides, f"cache_path={cache}", f"hydra.run.dir={folder}")
    resumed, whole = load_run(tmp_path / "resumed"), load_run(tmp_path / "whole")
    assert resumed.stats["asmi_reused_depths"] == [1] * 2 + [0] * (ROWS - 2)
    assert read_manifest(resumed.path)["asmi_reused"] == 2
    assert sum(whole.stats["asmi_reused_depths"]) == 0
    for name in whole.scores:
        np.testing.assert_array_equal(resumed.scores[name], whole.scores[name])
    assert resumed.stats["sample_texts"] == whole.stats["sample_texts"]


@pytest.mark.usefixtures("prompts")
def test_an_interrupted_run_is_no_finished_one(tmp_path, monkeypatch):
    """Ctrl-C: LM-Polygraph saves what it has, and the next run resumes."""
    run = forked(
        "--config-name", "asmi_offline", "benchmark=asmi_babiqa", "estimators=asmi_only",
        "data.source=questions", "model=asmi_local",
        f"model.path={tiny_lm.save(tmp_path / 'tiny')}", "output_attentions=false",
        "~generation_params.stop_strings", "cache_path=.", "hydra.run.dir=run",
    )  # fmt: skip

    def interrupt():
        # A shell's background jobs ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(MaskedHeadsCalculator, "__call__", in_the_third_row(interrupt))
    run.start()
    run.join()
    manager = tmp_path / "run" / "ue_manager_seed1"
    with pytest.raises(ValueError, match=r"got columns of \[2, 3, 4\] rows"):
        load_run(manager)
