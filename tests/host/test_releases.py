"""Releases that the suite passed on."""

import re
from pathlib import Path

from lm_polygraph_asmi import Scorer
from lm_polygraph_asmi.host import releases
from lm_polygraph_asmi.stat_calculators.masked_heads import MaskedHeadsCalculator
from tests.tiny_lm import whitebox

ROOT = Path(__file__).parents[2]


def test_what_ci_installs_is_tested():
    pins = dict(
        re.findall(r"^([a-z-]+)==([\d.]+)", (ROOT / "scripts/constraints.txt").read_text(), re.M)
    )
    floors = (ROOT / "pyproject.toml").read_text()
    for name, tested in releases.tested_releases().items():
        assert pins[name] in tested, name
        (floor,) = re.findall(rf'"{name}>=([\d.]+)', floors)
        assert tested[0].startswith(floor), name  # the lowest, of scripts/lowest.sh


def test_an_untested_release_is_named_once(monkeypatch, caplog):
    newest = {name: f"{tested[-1]}+local" for name, tested in releases.tested_releases().items()}
    for installed in (newest, newest | {"transformers": "5.9.9"}):
        releases.warn_of_untested.cache_clear()
        monkeypatch.setattr(releases, "version", installed.__getitem__)
        for _ in range(2):
            MaskedHeadsCalculator()
            Scorer(whitebox())
    releases.warn_of_untested.cache_clear()
    (said,) = [text for text in caplog.messages if "not among the releases" in text]
    assert said.startswith("transformers 5.9.9: not among")
    assert newest["transformers"].removesuffix("+local") in said
