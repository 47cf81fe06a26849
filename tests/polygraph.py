"""Whole runs of LM-Polygraph's script, in a process of their own or in this one."""

import logging
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

SCRIPT = Path(sys.executable).with_name("polygraph_eval")


def polygraph_eval(*arguments: str, check: bool = True) -> subprocess.CompletedProcess:
    """As a user runs it."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False
    )
    assert not check or done.returncode == 0, f"{done.returncode}: {done.stderr[-3000:]}"
    return done


def polygraph_eval_here(*arguments: str) -> None:
    """The same without the seconds a process takes to start; a run that fails raises SystemExit."""
    patch = pytest.MonkeyPatch()
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        patch.setattr(sys, "argv", [str(SCRIPT), *arguments])
        patch.setenv("HYDRA_FULL_ERROR", "1")  # exceptions as they are, not printed and swallowed
        runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        patch.undo()
        GlobalHydra.instance().clear()
        root.handlers[:], root.level = handlers, level


def tiny_model_overrides(folder: Path) -> list[str]:
    """A tiny model in the place of a config's own, on a CPU."""
    return ["model=asmi_local", f"model.path={folder}"]
