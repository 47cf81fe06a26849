"""What the README shows works; its YAML entries are run in test_plugin."""

from pathlib import Path

import pytest
from hydra import compose, initialize
from omegaconf import OmegaConf

from tests.report.runs import save
from tests.tiny_lm import whitebox

README = (Path(__file__).parents[1] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return [part.split("```")[0] for part in README.split(f"```{language}\n")[1:]]


def test_python_runs(tmp_path, monkeypatch):
    save(tmp_path / "RUN")
    monkeypatch.chdir(tmp_path)
    assert blocks("python")
    tiny = whitebox()
    given = {"model": tiny.model, "tokenizer": tiny.tokenizer, "prompt": "Who built the ferry?"}
    for block in blocks("python"):
        exec(block, dict(given))


@pytest.mark.parametrize(
    "setting",
    [
        row.split("|")[1].strip()
        for row in README.split("| setting | default |")[1].split("\n\n")[0].splitlines()[2:]
    ],
)
def test_every_setting_exists(setting):
    with initialize(version_base=None, config_path=None):
        config = compose("asmi_coqa")
    # "`asmi.adapt_estimator.tau`, `.beta`": names without a prefix stand below asmi.calculator,
    # and one that starts with a dot beside its predecessor.
    parent = "asmi.calculator"
    for name in (part.strip(" `") for part in setting.split(",")):
        if name.startswith("asmi."):
            parent = name.rsplit(".", 1)[0]
        assert name.rsplit(".", 1)[-1] in OmegaConf.select(config, parent), name
