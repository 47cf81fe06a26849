"""Shared fixtures. Nothing here, nor in any test, reaches a model hub."""

import atexit
import os
import shutil
import tempfile

# Nothing is written to a user's folders, by a test or a process that it starts. Libraries choose
# theirs when they are imported, so this comes first.
# The folder of a worker of xdist lies in that of the process above it, which removes it.
os.environ["HOME"] = tempfile.mkdtemp(
    prefix="asmi-tests-", dir=os.environ["HOME"] if "PYTEST_XDIST_WORKER" in os.environ else None
)
os.environ.update({
    name: os.path.join(os.environ["HOME"], name.lower())
    for name in (
        "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "USERPROFILE",
        "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_ASSETS_CACHE", "HF_XET_CACHE",
        "HF_DATASETS_CACHE", "HF_MODULES_CACHE", "HF_TOKEN_PATH", "TRANSFORMERS_CACHE",
        "SENTENCE_TRANSFORMERS_HOME", "TORCH_HOME", "TORCH_EXTENSIONS_DIR",
        "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME", "CUDA_CACHE_PATH",
        "NUMBA_CACHE_DIR", "MPLCONFIGDIR", "NLTK_DATA", "WANDB_DIR", "WANDB_CACHE_DIR",
        "WANDB_CONFIG_DIR", "PIP_CACHE_DIR", "UV_CACHE_DIR",
    )
})  # fmt: skip

# One thread each unless OMP_NUM_THREADS names another number, here and in every process a test
# starts: two processes run the tests side by side, and on a busy machine the threads of a pool wait
# for one another longer than they work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["MKL_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"]
os.environ.update({"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})

import gc
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

# The process that hands tests to the others imports this file, too: no torch, no transformers.

atexit.register(shutil.rmtree, os.environ["HOME"], ignore_errors=True)

AS_USERS = "AS_USERS_HAVE_IT"
"""Variable that is set by the option --as-users-have-it.

With it, nothing of LM-Polygraph, Hydra and other libraries is replaced. Without it:

- `bitsandbytes` cannot be imported, as LM-Polygraph and PEFT do, which saves 1.5 s a process;
- `tests/composing.py` composes a config's files once, which saves 0.1 s a test;
- `tests/polygraph.py` lets Hydra compose the config of a run once, not twice: 0.1 s a run;
  and PRR's baseline there is a mean of 10 random orders, not 1000: 0.2 s a run;
- reports have fewer resamples (`few_resamples`), and most write no figure (`no_pictures`).
"""

EVERY_PASS = [
    "lm_polygraph_asmi.core.model." + module for module in ("readout", "start", "unmasked")
]
"""Modules that make functions for every pass, which takes longer where their types are checked.

Only --slow and --as-users-have-it check them: all they compute is compared with full passes.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests that take minutes")
    parser.addoption("--device", help="run tests/model/test_on_device.py there, with every family")
    parser.addoption(
        "--as-users-have-it", action="store_true",
        help="replace nothing of other libraries by something faster: see tests/conftest.py",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--as-users-have-it"):
        os.environ[AS_USERS] = "1"
    else:
        sys.modules["bitsandbytes"] = None
    if thorough(config):
        install_import_hook(EVERY_PASS, "tests.check")


def thorough(config: pytest.Config) -> bool:
    """Whether all resamples and figures are asked for."""
    return config.getoption("--slow") or config.getoption("--as-users-have-it")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Garbage is collected from here on; see the package's own file."""
    found = yield
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True  # or pytest hands each of 80 its handlers three times a test
    gc.freeze()
    gc.enable()
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow") and not config.getoption("--device"):
        for item in items:
            if item.get_closest_marker("slow"):  # keywords have the names of folders, too
                item.add_marker(pytest.mark.skip(reason="needs --slow"))


@pytest.fixture(autouse=True, scope="module")
def modules_are_no_garbage() -> None:
    """LM-Polygraph collects garbage after every batch: not over all that is imported by now."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def few_resamples(request: pytest.FixtureRequest) -> Iterator[None]:
    """A tenth of every bootstrap, for tests of what is made of intervals; --slow takes all.

    Expectations that a test computes with the same functions are thinned with them.
    """
    from lm_polygraph_asmi.analysis import Clustered

    number = Clustered.number
    with pytest.MonkeyPatch.context() as patch:
        if not thorough(request.config):
            patch.setattr(Clustered, "number", lambda rows, default: number(rows, default) // 10)
        yield


@pytest.fixture
def no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of a report are made and not written, where its text is asked for; --slow writes.

    Tests marked `pictures` write theirs.
    """
    if not thorough(request.config) and "pictures" not in request.keywords:
        monkeypatch.setattr("lm_polygraph_asmi.report.writing.save", lambda *_: None)


@pytest.fixture
def unseen() -> Iterator[None]:
    """Of tests that compare all numbers themselves, so that the self-check would see no more."""
    from tests.families import unchecked

    with unchecked():
        yield


@pytest.fixture(scope="session")
def llama():
    from tests.families import tiny_model

    return tiny_model("llama")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and its tokenizer as a folder; no test changes it."""
    from tests import tiny_lm

    return tiny_lm.save(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1024)


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory: pytest.TempPathFactory):
    from tests.stand_ins import make_stand_ins

    return make_stand_ins(tmp_path_factory.mktemp("stand-ins"))


@pytest.fixture
def at_stand_ins(stand_ins, monkeypatch: pytest.MonkeyPatch):
    """Where AlignScore finds what it needs; NLTK has read its variable already."""
    monkeypatch.chdir(stand_ins.working_directory)
    monkeypatch.setattr("nltk.data.path", [stand_ins.environment["NLTK_DATA"]])
    return stand_ins
