"""Whole runs of LM-Polygraph's script, in a process of their own or in this one."""

import gc
import logging
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
import pytest
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.plugins.sweeper import Sweeper
from hydra.types import RunMode
from lm_polygraph.ue_metrics.ue_metric import get_random_scores

from lm_polygraph_asmi.host.configs import configs_path
from tests.conftest import AS_USERS
from tests.forks import exit_code

SCRIPT = Path(sys.executable).with_name("polygraph_eval")


def polygraph_eval_here(*arguments: str) -> None:
    """Without the seconds a process takes to start; a run that fails raises SystemExit."""
    patch = pytest.MonkeyPatch()
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        patch.setattr(sys, "argv", [str(SCRIPT), *arguments])
        if AS_USERS not in os.environ:
            _compose_once(arguments, patch)
        few_random_orders(patch)
        patch.setenv("HYDRA_FULL_ERROR", "1")  # exceptions as they are, not printed and swallowed
        # Hydra's logging closes every handler there is. Absl's closes its stream as well, unless it
        # is sys.stderr; inside `capsys` it is not, and pytest would lose what it captures with.
        patch.setattr(logging, "_handlerList", [])
        runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        patch.undo()
        GlobalHydra.instance().clear()
        root.handlers[:], root.level = handlers, level


def few_random_orders(patch: pytest.MonkeyPatch) -> None:
    """Let LM-Polygraph's PRR take ten random orders as its baseline, not a thousand."""
    if AS_USERS not in os.environ:
        patch.setattr(get_random_scores, "__defaults__", (10, 42))  # their number and seed


def failing_at(words: str) -> Callable[..., np.ndarray]:
    """In the place of a baseline of LM-Polygraph; fails at a prompt with these words."""

    def score(_: object, stats: dict[str, Any]) -> np.ndarray:
        if words in stats["input_texts"][0]:
            raise RuntimeError("no more")
        return np.array([0.0])

    return score


def _compose_once(arguments: Sequence[str], patch: pytest.MonkeyPatch) -> None:
    """Let Hydra not compose a config before it does for a run, or for the jobs of a sweep."""
    file = configs_path() / f"{arguments[arguments.index('--config-name') + 1]}.yaml"
    sweeps = file.is_file() and "mode: MULTIRUN" in file.read_text()
    patch.setattr(Hydra, "get_mode", lambda *_, **__: RunMode.MULTIRUN if sweeps else None)
    patch.setattr(Sweeper, "validate_batch_is_legal", lambda *_: None)


def run_forked(command: Sequence[str], env: dict[str, str], **_: Any) -> CompletedProcess:
    """In the place of `subprocess.run`: a fork does what the command says, its output captured."""
    python, script, *arguments = command
    assert [python, script] == [sys.executable, str(SCRIPT)]
    return forked(polygraph_eval_here, *arguments, env=env)


def forked(
    function: Callable[..., object], *arguments: str, env: dict[str, str]
) -> CompletedProcess:
    """What a process with these variables would do, but for what was imported, and its output."""
    with TemporaryFile("w+") as said, TemporaryFile("w+") as errors:
        code = exit_code(_captured, function, arguments, env, said, errors)
        said.seek(0), errors.seek(0)
        return CompletedProcess(arguments, code, said.read(), errors.read())


def _captured(
    function: Callable[..., object], arguments: Sequence[str], env: dict[str, str], *files: IO[str]
) -> None:
    os.environ.clear()
    os.environ.update(env)
    for number, file in enumerate(files, 1):
        os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = files
    gc.freeze()  # to look for garbage in what is shared would copy it
    function(*arguments)
