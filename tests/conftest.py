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
import inspect
import logging
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from traceback import walk_stack

import omegaconf
import pytest
import yaml

# The process that hands tests to the others imports this file, too: no torch, no transformers.

atexit.register(shutil.rmtree, os.environ["HOME"], ignore_errors=True)

# OmegaConf reads hundreds of configs with the parser in Python; the one in C gives the same.
yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# PEFT imports it where it is installed, and all of PyTorch's compiler with it; no test uses it.
sys.modules["bitsandbytes"] = None


def stack(*_: int) -> list[inspect.FrameInfo]:
    """Without the sources, which `inspect` searches for in every module that is imported.

    Hydra asks for it whenever a config is composed, and reads names of files and functions.
    """
    return [
        inspect.FrameInfo(frame, frame.f_code.co_filename, line, frame.f_code.co_name, None, None)
        for frame, line in walk_stack(sys._getframe(1))
    ]


inspect.stack = stack
# The same interpolations are parsed in every config.
omegaconf.base.parse = omegaconf._utils.parse = cache(omegaconf.grammar_parser.parse)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests that take minutes")
    parser.addoption("--device", help="run tests/model/test_on_device.py there, with every family")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Garbage is collected from here on; see the package's own file."""
    found = yield
    if "spacy" in sys.modules:  # AlignScore loads the same pipeline twice, each time
        sys.modules["spacy"].load = cache(sys.modules["spacy"].load)
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True  # or pytest hands each of 80 its handlers three times a test
    gc.freeze()
    gc.enable()
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow") and not config.getoption("--device"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs --slow"))


@pytest.fixture(autouse=True, scope="module")
def modules_are_no_garbage() -> None:
    """LM-Polygraph collects garbage after every batch: not over all that is imported by now."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def few_random_orders(request: pytest.FixtureRequest) -> Iterator[None]:
    """LM-Polygraph compares each method with 20 random orders, not 1,000; --slow takes all."""
    manager = sys.modules.get("lm_polygraph.utils.manager")
    with pytest.MonkeyPatch.context() as patch:
        if manager and not request.config.getoption("--slow"):
            own = manager.get_random_scores
            patch.setattr(manager, "get_random_scores", partial(own, num_iter=20))
        yield


@pytest.fixture(scope="module")
def few_resamples(request: pytest.FixtureRequest) -> Iterator[None]:
    """A tenth of every bootstrap, for tests of what is made of intervals; --slow takes all.

    Expectations that a test computes with the same functions are thinned with them.
    """
    from lm_polygraph_asmi.analysis import Clustered

    number = Clustered.number
    with pytest.MonkeyPatch.context() as patch:
        if not request.config.getoption("--slow"):
            patch.setattr(Clustered, "number", lambda rows, default: number(rows, default) // 10)
        yield


@pytest.fixture
def no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of a report are made and not written, where its text is asked for; --slow writes.

    Tests marked `pictures` write theirs.
    """
    if not request.config.getoption("--slow") and "pictures" not in request.keywords:
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
