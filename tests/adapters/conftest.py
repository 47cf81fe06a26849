"""A tiny model as a folder, and a server over it."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lm_polygraph_asmi.adapters.contract import open_scorer
from tests import tiny_lm

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SETTINGS = {"scope": "response", "seeded_by": "prompt", "max_new_tokens": 8}


def save(folder: Path) -> Path:
    """A tiny model whose tokenizer has a chat template."""
    tokenizer = tiny_lm.tokenizer(False)  # as `save` asks for it, which is another than tokenizer()
    before, tokenizer.chat_template = tokenizer.chat_template, TEMPLATE
    try:
        return tiny_lm.save(folder)
    finally:
        tokenizer.chat_template = before


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def scorer(folder: Path):
    """What a direct call is made with."""
    return open_scorer(str(folder), **SETTINGS)


@contextmanager
def serving(scorer, name="tiny", key=None, emit=None, **limits) -> Iterator[str]:
    """The server in a thread of this process, at a port of its own; yields host:port."""
    uvicorn = pytest.importorskip("uvicorn")
    pytest.importorskip("prometheus_client")
    from lm_polygraph_asmi.adapters.server import Limits, Service, application

    service = Service(scorer, name, Limits(**{"answer": 8, **limits}), emit)
    _, guard = application(service, key)
    logging.getLogger("uvicorn.access").disabled = True  # as `serve` does
    config = uvicorn.Config(guard, port=0, log_config=None, access_log=False, ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
