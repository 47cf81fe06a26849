"""The trial of two rows before a run, and its messages if they fail."""

import subprocess

import numpy as np
import pandas as pd
import pytest
from omegaconf import OmegaConf
from rich.console import Console

from lm_polygraph_asmi.runs import trial
from lm_polygraph_asmi.runs.trial import Trial, batch_times, costs, estimate, try_rows

TRACEBACK = """[2026-01-01 00:00:00,000][lm_polygraph][INFO] - Loading
Traceback (most recent call last):
  File "{file}", line 1, in main
    {source}
{error}
"""


def failure(monkeypatch, code: int, printed: str) -> str:
    """The message about a run that ended so."""
    done = subprocess.CompletedProcess([], code, "", printed)
    monkeypatch.setattr(trial.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(RuntimeError) as raised:
        try_rows(OmegaConf.create(), [])
    return str(raised.value)


@pytest.mark.parametrize(
    ("code", "printed", "said"),
    [
        (-9, "Loading", "the system killed it with signal 9, as it does without memory"),
        (1, "Loading\nstopped; see above\n", "Loading\nstopped; see above"),
        (
            1,
            TRACEBACK.format(file="a", source="assert x", error="E: a\n\nb"),
            "E: a\nb\n(a, line 1: assert x)",
        ),  # of LM-Polygraph's PTrue, an error without words
    ],
)
def test_a_run_that_was_killed_or_stopped(monkeypatch, code, printed, said):
    assert failure(monkeypatch, code, printed).startswith(said)


def test_estimate():
    tried = Trial(pd.DataFrame(), [30.0, 32.0, 36.0], {"asmi": 0.5}, {"main": 2 * 10**9})
    console = Console(width=100)
    with console.capture() as capture:
        console.print(estimate(costs(tried, rows=10_000, seeds=2)))
    shown = " ".join(capture.get().split())
    for row in (
        "asmi │ 0.50 s per row",
        "everything else │ 2.50 s per row",
        "one row, in total │ 3.00 s",
        "until the first row │ 30 seconds",
        "the whole run, 10,000 rows, 2 seeds │ about 16.7 hours",
        "peak memory, main │ 2.0 GB",
    ):
        assert row in shown
    with console.capture() as capture:
        console.print(estimate(costs(tried._replace(times=[]), rows=10_000)))
    assert "the whole run" not in capture.get()


def test_times_in_a_log():
    at = "[2026-01-01 00:00:{:02},500][lm_polygraph][INFO] - "
    lines = [
        at.format(1) + "Initializing stat calculators...",
        at.format(5) + "Done intitializing stat calculators...",
        at.format(5) + "Something else",
        at.format(7) + "===== NEW BATCH =====",
        at.format(8) + "===== NEW BATCH =====",
        at.format(9) + "===== METRICS =====",
    ]
    assert np.diff(batch_times("\n".join(lines))).tolist() == [2.0, 1.0]
    assert batch_times("[00:00:01] stat calculators...") == []
