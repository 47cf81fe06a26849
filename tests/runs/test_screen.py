"""What a run prints, in a file and in a terminal, and that all is undone however it ends."""

import logging
import os
import pty
import re
import sys
import warnings
from contextlib import ExitStack, suppress
from itertools import count
from unittest.mock import Mock

import pytest
from datasets import Dataset
from lm_polygraph.utils.manager import UEManager
from tqdm import auto, std

from lm_polygraph_asmi.runs.screen import screen
from tests.polygraph import polygraph_eval_here

ROWS = 12


@pytest.fixture
def run(tmp_path, tiny, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lm_polygraph_asmi.runs.screen.PARTS", 4)
    rows = {"input": [f"Who built mill {i}?" for i in range(ROWS)], "output": ["red", "blue"] * 6}
    Dataset.from_dict(rows).save_to_disk(tmp_path / "questions")
    return lambda *overrides: polygraph_eval_here(
        "--config-name", "asmi_only", "benchmark=asmi_babiqa", "data.source=questions",
        "generation_metrics=[{name: TokenF1}]", "model=asmi_local", f"model.path={tiny}",
        "asmi.num_masks=5", "asmi.mask_rate=0.2", "~generation_params.stop_strings",
        "hydra.run.dir=run", "cache_path=.", *overrides,
    )  # fmt: skip


def state(script):
    """All that a screen changes."""
    loggers = [logging.getLogger(name) for name in (None, "a_library", "lm_polygraph")]
    handlers = [handler for each in loggers for handler in each.handlers]
    return (
        vars(std.tqdm)["__init__"], sys.stdout, sys.stderr, warnings.showwarning, script.copy(),
        [(each.propagate, each.filters[:], each.handlers[:]) for each in loggers],
        [(handler.filters[:], getattr(handler, "stream", None)) for handler in handlers],
    )  # fmt: skip


def test_a_run_prints_few_lines_into_a_file(run, tmp_path, capsys, monkeypatch):
    """If LM-Polygraph's manager, its log or tqdm are others in a release, rows or phases lack."""
    # Phases of less than 0.005 seconds are left out, and a row of the result cache takes no longer.
    monkeypatch.setattr(
        "lm_polygraph_asmi.runs.screen.time", Mock(perf_counter=count(0, 0.01).__next__)
    )
    run("data.first=3", "batch_size=3", "seed=[3]")
    capsys.readouterr()
    run("seed=[1,2]")  # the second scores no row anew
    out, err = capsys.readouterr()
    assert (out, UEManager.load("run/ue_manager_seed3").stats["seconds_greedy"]) == (
        "", pytest.approx([0.02 / 3] * 3)  # of each row of a batch
    )  # fmt: skip
    cached, left = "from the result cache", r"0:\d\d:\d\d left, until \w+ \d\d:\d\d"
    start = [
        *["Loading .*"] * 2, *["Initializing .*"] * 3,
        "the first row, in seconds: .*greedy .*, masked heads .*",
    ]  # fmt: skip
    expected = [
        *start,
        *(f"{rows} of 12 rows, 3 {cached}; {left}" for rows in (3, 6, 9)),
        rf"12 of 12 rows, 3 {cached} in 0:\d\d:\d\d",
        *start,
        *(f"{rows} of 12 rows, {rows} {cached}; {left}" for rows in (3, 6, 9)),
        rf"12 of 12 rows, 12 {cached} in 0:\d\d:\d\d",
        "Table of the results: .*",
    ]
    for line, pattern in zip(err.splitlines(), expected, strict=True):
        assert re.fullmatch(pattern, line)
    logged = (tmp_path / "run" / "polygraph_eval.log").read_text()
    assert [text for text in ("NEW BATCH", "Loading weights: 100%") if text not in logged] == []


def test_a_run_is_one_bar_in_a_terminal(run):
    child, terminal = pty.fork()
    if not child:
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
        os.environ["TERM"] = "xterm"
        try:
            run()
        finally:
            os._exit(0)
    shown = b""
    with suppress(OSError):  # the end, on Linux
        while read := os.read(terminal, 2**16):
            shown += read
    os.waitpid(child, 0)
    # The terminal is drawn ten times a second: which rows are seen depends on the machine.
    for text in (r"[1-9] of 12 rows; 0:", "masked heads", "12 of 12 rows in 0:"):
        assert re.search(text, shown.decode())
    assert shown.count(b"\n") <= 12


@pytest.mark.parametrize("ending", [SystemExit, KeyboardInterrupt, RuntimeError, ExitStack])
def test_what_is_shown_and_what_is_logged(ending, tmp_path, capsys, monkeypatch):
    root, library, ours = map(logging.getLogger, (None, "a_library", "lm_polygraph"))
    console, file = logging.StreamHandler(sys.stdout), logging.FileHandler(tmp_path / "log")
    console.setLevel(logging.WARNING)  # as the shipped configs have it
    for changed, name, value in (
        (root, "handlers", [console, file]),
        (root, "level", logging.INFO),
        (library, "handlers", [logging.StreamHandler(sys.stderr)]),
        (library, "propagate", False),
    ):
        monkeypatch.setattr(changed, name, value)
    script = {"UEManager": UEManager}
    before = state(script)
    with suppress(SystemExit, KeyboardInterrupt, RuntimeError), screen(script):
        assert script["UEManager"] is not UEManager
        library.warning("a load report")
        library.error("no such file")
        ours.warning("a finding")
        warnings.warn("an old name", FutureWarning, stacklevel=1)
        list(auto.tqdm(range(3), desc="a bar", disable=False))
        print("printed")
        if issubclass(ending, BaseException):
            raise ending
    assert state(script) == before
    assert capsys.readouterr() == ("no such file\na finding\nprinted\n", "")
    logged = (tmp_path / "log").read_text()
    for text in ("a load report", "no such file", "a finding", "an old name", "a bar: 100%"):
        assert text in logged
