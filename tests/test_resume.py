"""A run stopped at any moment loses nothing that was scored."""

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


def in_the_third_row(sent):
    """The calculator, which is sent a signal there."""
    scored = MaskedHeadsCalculator.__call__
    rows_done = iter(range(ROWS))

    def call(self, *arguments):
        if next(rows_done) == 2:
            # A shell's background jobs ignore Ctrl-C.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.kill(os.getpid(), sent)
        return scored(self, *arguments)

    return call


def test_a_stopped_run_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    prompts = [f"Who built the ferry {i}? Where do the blue kites start?" for i in range(ROWS)]
    rows = {"input": prompts, "output": ["the mill"] * (ROWS - 1) + ["a kite"]}
    Dataset.from_dict(rows).save_to_disk(tmp_path / "questions")
    overrides = [
        "--config-name", "asmi_offline", "benchmark=asmi_babiqa", "estimators=asmi",
        "data.source=questions", "model=asmi_local",
        f"model.path={tiny_lm.save(tmp_path / 'tiny')}", "output_attentions=false",
        "asmi.num_samples=2", "~generation_params.stop_strings",
    ]  # fmt: skip
    manager = tmp_path / "run" / "ue_manager_seed1"

    def stop(sent):
        stopped = forked(*overrides, "cache_path=.", "hydra.run.dir=run")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MaskedHeadsCalculator, "__call__", in_the_third_row(sent))
            stopped.start()  # a fork, which has the patch
        stopped.join()
        return stopped.exitcode

    assert stop(signal.SIGKILL) == -signal.SIGKILL
    assert not manager.exists()
    assert read_manifest(manager)["status"] == "running"
    assert (tmp_path / "run" / "rows").exists()
    stop(signal.SIGINT)  # the next run, in which LM-Polygraph saves what it has
    with pytest.raises(ValueError, match=r"got columns of \[2, 3, 4\] rows"):
        load_run(manager)

    polygraph_eval_here(*overrides, "cache_path=.", "hydra.run.dir=run")
    polygraph_eval_here(*overrides, "cache_path=elsewhere", "hydra.run.dir=whole")
    resumed, whole = load_run(manager), load_run(tmp_path / "whole")
    assert not (tmp_path / "run" / "rows").exists()
    assert resumed.stats["asmi_reused_depths"] == [1] * 2 + [0] * (ROWS - 2)
    assert read_manifest(manager)["asmi_reused"] == 2
    assert sum(whole.stats["asmi_reused_depths"]) == 0
    for name in whole.scores:
        np.testing.assert_array_equal(resumed.scores[name], whole.scores[name])
    assert resumed.stats["sample_texts"] == whole.stats["sample_texts"]
