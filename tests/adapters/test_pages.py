"""Examples of the adapters' pages, each against the real library."""

import json
import shutil
import subprocess

import pytest

from lm_polygraph_asmi.adapters.contract import open_scorer
from tests.adapters.conftest import SETTINGS, serving
from tests.pages import ADAPTERS, blocks, python
from tests.test_docs import tiny_hub  # noqa: F401

SERVE, *OTHERS = ADAPTERS


def needs(page):
    for module in ADAPTERS[page]:
        pytest.importorskip(module)


@pytest.mark.usefixtures("tiny_hub")
@pytest.mark.parametrize("page", OTHERS, ids=lambda page: page.name)
def test_python_runs(page, tmp_path, monkeypatch):
    needs(page)
    monkeypatch.chdir(tmp_path)
    for example in python(page):
        example.evaluate()


@pytest.fixture
def copied(scorer, tmp_path):
    """The server's page, with a server behind the address that it names."""
    needs(SERVE)
    own = open_scorer(scorer.model, tokenizer=scorer.tokenizer, **SETTINGS | {"stop": "\n"})
    with serving(own, name="smollm2", answer=32) as address:
        page = tmp_path / SERVE.name
        page.write_text(SERVE.read_text().replace("127.0.0.1:8000", address))
        yield page


def test_the_servers_python_runs(copied, capsys):
    (example,) = python(copied)
    example.evaluate()
    *_, scores = capsys.readouterr().out.splitlines()
    assert len(json.loads(scores)) == 2


def test_the_servers_curl_runs(copied):
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    (block,) = [block.parsed for block in blocks("bash", copied) if "curl" in block.parsed]
    done = subprocess.run(["bash", "-euc", block], capture_output=True, text=True, check=True)
    scored, *events = done.stdout.split("data: ")
    assert json.loads(scored)["asmi"]["score"] > 0
    assert events[-1].strip() == "[DONE]"
    assert json.loads(events[-2])["asmi"]["score"] > 0
