"""Tests write nothing into a user's folders."""

import os
import subprocess
import sys

import pytest

from tests.pages import REPOSITORY

PARTS = [
    "tests/report/test_report.py::test_no_text_lies_on_another",  # matplotlib keeps its fonts
    "tests/test_home.py::test_folders_of_libraries_are_a_workers_own",
]
INSIDE = "ASMI_TESTS_IN_EMPTY_HOME"


def test_a_part_of_the_suite_leaves_an_empty_home_empty(tmp_path):
    names = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
    folders = {name: str(tmp_path / name) for name in names}
    for folder in folders.values():
        os.mkdir(folder)
    cleared = ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS", "MPLCONFIGDIR", "HF_HOME", "TORCH_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in cleared}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", *PARTS],
        cwd=REPOSITORY, env=environment | folders | {INSIDE: "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
    assert [list(os.scandir(folder)) for folder in folders.values()] == [[], [], []]


@pytest.mark.skipif(INSIDE not in os.environ, reason="runs in the test above")
def test_folders_of_libraries_are_a_workers_own():
    import matplotlib
    import torch
    from huggingface_hub import constants
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    found = (constants.HF_HOME, constants.HF_HUB_CACHE, torch.hub.get_dir(), cache_dir(),
             matplotlib.get_cachedir(), matplotlib.get_configdir(),
             os.path.expanduser("~"))  # fmt: skip
    assert [folder for folder in found if not folder.startswith(os.environ["HOME"])] == []
    assert "asmi-tests-" in os.environ["HOME"]
