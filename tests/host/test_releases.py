"""Releases that the suite passed on."""

import re
from pathlib import Path

from lm_polygraph_asmi.host import releases
from lm_polygraph_asmi.scoring.engine import Engine
from tests.tiny_lm import whitebox

ROOT = Path(__file__).parents[2]


def test_what_ci_installs_is_tested():
    tested = releases.tested_releases()
    pins = (ROOT / "scripts/constraints.txt").read_text()
    pinned = dict(re.findall(r"^([a-z-]+)==([\d.]+)", pins, re.M))
    assert {name: pinned[name] in tested[name] for name in tested} == dict.fromkeys(tested, True)
    floors = (ROOT / "pyproject.toml").read_text()
    for name, of in tested.items():
        (floor,) = re.findall(rf'"{name}>=([\d.]+)', floors)
        assert of[0].startswith(floor), name  # the lowest, of scripts/lowest.sh


def test_an_untested_release_is_named_once(monkeypatch, caplog):
    releases.warn_of_untested.cache_clear()
    actual = releases.version
    monkeypatch.setattr(
        releases, "version", lambda name: "5.9.9" if name == "transformers" else actual(name)
    )
    model = whitebox("llama").model
    ids = model.dummy_inputs["input_ids"][0, :4]
    try:
        for _ in range(2):
            Engine(num_masks=3, mask_rate=0.3).score(model, ids, [5, 6])
    finally:
        releases.warn_of_untested.cache_clear()
    (record,) = [r for r in caplog.records if "not among the releases" in r.getMessage()]
    assert record.getMessage().startswith("transformers 5.9.9: not among")
    assert "5.23.0" in record.getMessage()
    caplog.clear()
    newest = {name: of[-1] for name, of in releases.tested_releases().items()}
    monkeypatch.setattr(releases, "version", newest.__getitem__)
    releases.warn_of_untested()
    releases.warn_of_untested.cache_clear()
    assert not caplog.records
