"""Examples of the adapters' pages, each against the real library."""

import json
import shutil
import subprocess

import pytest

from lm_polygraph_asmi.adapters.contract import open_scorer
from tests.adapters.conftest import SETTINGS, serving
from tests.pages import ADAPTERS, blocks, python, section
from tests.test_docs import tiny, tiny_hub  # noqa: F401

(INTEGRATIONS,) = ADAPTERS
SERVER = ("prometheus_client", "openai")
SECTIONS = {
    "Inspect": ("inspect_ai",),
    "MLflow": ("mlflow.genai", "sqlalchemy", "alembic"),
    "OpenTelemetry": ("opentelemetry.sdk",),
}
"""What the examples of each section need."""


@pytest.mark.usefixtures("tiny_hub")
@pytest.mark.parametrize("heading", SECTIONS)
def test_python_runs(heading, tmp_path, monkeypatch):
    for module in SECTIONS[heading]:
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    page = tmp_path / INTEGRATIONS.name
    page.write_text(section(INTEGRATIONS, heading))
    examples = list(python(page))
    assert examples
    for example in examples:
        example.evaluate()


def test_every_section_is_run():
    needed = [module for modules in SECTIONS.values() for module in modules]
    assert sorted([*SERVER, *needed]) == sorted(ADAPTERS[INTEGRATIONS])
    assert len(blocks("python", INTEGRATIONS)) == len(SECTIONS) + 1  # the server's


@pytest.fixture
def copied(scorer, tmp_path):
    """The server's section, with a server behind the address that it names."""
    for module in SERVER:
        pytest.importorskip(module)
    own = open_scorer(scorer.model, tokenizer=scorer.tokenizer, **SETTINGS | {"stop": "\n"})
    with serving(own, name="smollm2", answer=32) as address:
        page = tmp_path / INTEGRATIONS.name
        page.write_text(section(INTEGRATIONS, "Server").replace("127.0.0.1:8000", address))
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
