"""A run killed at any moment loses nothing that was scored."""

import os
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

from lm_polygraph_asmi.results.manifest import read_manifest
from lm_polygraph_asmi.results.runs import load_run
from lm_polygraph_asmi.stat_calculators.masked_heads import MaskedHeadsCalculator
from tests import tiny_lm
from tests.polygraph import forked, polygraph_eval_here

ROWS = 16
ENTRIES_PER_ROW = 3  # unmasked pass, masked passes, sampled answers


def entries(result_cache: Path) -> int:
    """How many results another process has kept so far; read without a lock."""
    try:
        with closing(sqlite3.connect(f"file:{result_cache}/cache.db?mode=ro", uri=True)) as kept:
            return kept.execute("SELECT count(*) FROM Cache").fetchone()[0]
    except sqlite3.OperationalError:  # it is not there yet, or being made at this moment
        return 0


@pytest.fixture
def prompts(tmp_path, monkeypatch) -> list[str]:
    """Of the rows in `questions`, in a folder and with a cache of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    prompts = [f"Who built the ferry {i}? Where do the blue kites start?" for i in range(ROWS)]
    rows = {"input": prompts, "output": ["the mill"] * (ROWS - 1) + ["a kite"]}
    Dataset.from_dict(rows).save_to_disk(tmp_path / "questions")
    return prompts


@pytest.mark.usefixtures("prompts")
def test_a_killed_run_goes_on_where_it_was(tmp_path):
    overrides = [
        "--config-name",
        "asmi_offline",
        "benchmark=asmi_babiqa",
        "estimators=asmi",
        "data.source=questions",
        "model=asmi_local",
        f"model.path={tiny_lm.save(tmp_path / 'tiny')}",
        "output_attentions=false",
        "asmi.num_samples=2",
        "~generation_params.stop_strings",
    ]
    result_cache = tmp_path / "result_cache"
    killed = forked(*overrides, "cache_path=.", "hydra.run.dir=killed")
    killed.start()
    deadline = time.monotonic() + 120
    while entries(result_cache) < 3 * ENTRIES_PER_ROW and killed.is_alive():
        assert time.monotonic() < deadline, "the run did not start"
        time.sleep(0.02)
    killed.kill()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL, "the run was too quick to be killed"
    kept = entries(result_cache)
    assert 3 * ENTRIES_PER_ROW <= kept < ROWS * ENTRIES_PER_ROW
    assert not (tmp_path / "killed" / "ue_manager_seed1").exists()
    assert read_manifest(tmp_path / "killed" / "ue_manager_seed1")["status"] == "running"

    for folder, cache in (("resumed", "."), ("whole", "elsewhere")):
        polygraph_eval_here(*overrides, f"cache_path={cache}", f"hydra.run.dir={folder}")
    resumed, whole = load_run(tmp_path / "resumed"), load_run(tmp_path / "whole")
    reused = sum(resumed.stats["asmi_reused_depths"])
    # Of the row that was being scored, the one or the other part may be there.
    assert abs(reused - kept / ENTRIES_PER_ROW) <= 1
    assert read_manifest(resumed.path)["asmi_reused"] == reused
    assert sum(whole.stats["asmi_reused_depths"]) == 0
    for name in whole.scores:
        np.testing.assert_array_equal(resumed.scores[name], whole.scores[name])
    assert resumed.stats["sample_texts"] == whole.stats["sample_texts"]


def test_an_interrupted_run_keeps_its_rows(prompts, tmp_path, monkeypatch):
    """Ctrl-C: LM-Polygraph saves what it has, and the next run resumes."""
    run = forked(
        "--config-name", "asmi_offline", "benchmark=asmi_babiqa", "estimators=asmi_only",
        "data.source=questions", "model=asmi_local",
        f"model.path={tiny_lm.save(tmp_path / 'tiny')}", "output_attentions=false",
        "~generation_params.stop_strings", "cache_path=.", "hydra.run.dir=run",
    )  # fmt: skip
    scored = MaskedHeadsCalculator.__call__
    rows_done = iter(range(ROWS))

    def interrupted(self, *arguments):
        """Ctrl-C comes in the fifth row."""
        if next(rows_done) == 4:
            # A shell's background jobs ignore it.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.kill(os.getpid(), signal.SIGINT)
        return scored(self, *arguments)

    monkeypatch.setattr(MaskedHeadsCalculator, "__call__", interrupted)
    run.start()  # a fork, which has the patch
    run.join()
    manager = tmp_path / "run" / "ue_manager_seed1"
    partial = load_run(manager, partial=True)
    assert len(partial.scores) == 4
    assert partial.planned == ROWS
    assert partial.stats["input_texts"] == prompts[: len(partial.scores)]
    assert "For the rest: polygraph_eval --config-name asmi_offline" in partial.stopped_early
