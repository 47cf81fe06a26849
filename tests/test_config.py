"""A setting is declared once: what is made of the declarations, and that nothing repeats them."""

import re
from dataclasses import dataclass, fields
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lm_polygraph_asmi import SemASMI
from lm_polygraph_asmi._hydra.configs import configs_path, store_settings
from lm_polygraph_asmi.commands.settings import said, setting_options
from lm_polygraph_asmi.config import METHODS, ASMIConfig, setting
from lm_polygraph_asmi.saved.runs import load_run
from lm_polygraph_asmi.scoring.call import Scorer
from lm_polygraph_asmi.scoring.reference import settled
from lm_polygraph_asmi.validation import check_number
from tests.report import runs
from tests.tiny_lm import whitebox

PACKAGE = Path(__file__).parents[1] / "lm_polygraph_asmi"


@dataclass(frozen=True, kw_only=True)
class Warmer(ASMIConfig):
    """The settings and one more."""

    warmth: float = setting(
        1.5, "How warm it is.", check_number, unit="kelvin", of="masks", shown="warmth={:g}".format
    )


def test_a_new_setting_is_everywhere(tmp_path):
    # On the command line.
    given: dict = {}

    @click.command()
    @setting_options(config=Warmer)
    def command(**settings):
        given.update(said(settings))

    assert re.search(r"--warmth FLOAT\s+How warm it is. \[kelvin\]", help_of(command))
    CliRunner().invoke(command, ["--warmth", "2", "--stop", "\\n", "--no-closing-token"])
    assert given == {"warmth": 2.0, "stop": ["\n"], "closing_token": False}
    # In Hydra, whose node an estimator is made of.
    with initialize_config_dir(version_base=None, config_dir=str(configs_path())):
        store_settings(Warmer)  # behind the plugin's own
        try:
            node = compose("asmi_base", ["asmi.warmth=3"]).asmi
        finally:
            store_settings()
    plain = OmegaConf.to_container(node)
    assert (plain["warmth"], plain["scope"]) == (3, "all")
    # In the name, the manifest and the key.
    estimator = SemASMI(Warmer(warmth=3))
    assert str(estimator) == "Sem-ASMI (60%, K=64, warmth=3)"
    assert estimator.described["warmth"] == 3
    assert estimator.config.score_key() != Warmer().score_key()
    saved = runs.content()
    saved["estimations"]["sequence", str(estimator)] = [0.0] * 60
    saved[runs.METHODS] = {str(estimator): estimator.described}
    found = load_run(runs.save(tmp_path / "run", saved))
    assert found.described[str(estimator)]["warmth"] == 3
    # In what statistics are of, and a scored row.
    assert "warmth" in Warmer().to_dict("masks")
    scorer = Scorer(whitebox(), Warmer(num_masks=4, mask_rate=0.4))
    assert scorer.identity["warmth"] == 1.5
    assert scorer.score("Who built the ferry?", " Brask").settings["warmth"] == 1.5


def help_of(command):
    return " ".join(CliRunner().invoke(command, ["--help"], env={"COLUMNS": "200"}).output.split())


@pytest.mark.parametrize(
    "default", ["0.6", "64", "10.0", "0.3", '"bernoulli"', '"answer"', '"heads"', '"mean"', '"sem"']
)
def test_a_default_stands_in_one_place(default):
    """As the default of an argument, an option or a field, in the package."""
    said = re.compile(rf"[\w\])] ?(?::[^=,()]+)?= ?{re.escape(default)}(?![\w.])[,)]")
    named = "depth|top_k|tau|beta|num_samples|max_new_tokens|mask_sampler|seeded_by|perturbation"
    declared = re.compile(
        rf"(?<!control-)\b({named}|aggregation|method)\b[^=\n]*= ?{re.escape(default)}\b"
    )
    places = [
        f"{file.relative_to(PACKAGE)}: {line.strip()}"
        for file in PACKAGE.rglob("*.py")
        if file.name != "config.py"
        for line in file.read_text().splitlines()
        if declared.search(line) and ">>>" not in line and "==" not in line
        and said.search(line)
    ]  # fmt: skip
    assert places == []


def test_values_are_plain_and_come_back():
    config = ASMIConfig(method="adapt", stop="\n", dose=0.5, perturbation="mlp", scope="response")
    assert ASMIConfig.from_dict(config.to_dict() | {"layer": 3}) == config
    assert config.to_dict()["stop"] == ["\n"]
    assert str(config) == "Adapt-ASMI (60%, K=64, scope=response, mlp, dose=0.5)"


def test_only_what_its_method_uses_makes_a_score_another_one():
    assert ASMIConfig(tau=0.5).score_key() == ASMIConfig().score_key()
    adapt = ASMIConfig(method="adapt")
    assert adapt.replace(tau=0.5).score_key() != adapt.score_key()
    drawn_again = {"seed": 7, "attention": "eager", "memory_budget": 1, "max_new_tokens": 3}
    assert adapt.replace(**drawn_again).score_key() == adapt.score_key()
    several = ASMIConfig(stop=["a", "b"]).score_key()
    assert several == ASMIConfig(stop=["b", "a"]).score_key()
    assert several != ASMIConfig().score_key()


def test_every_declaration_says_what_it_is():
    for one in fields(ASMIConfig):
        assert one.metadata["help"][0].isupper(), one.name
        assert one.metadata["help"].endswith("."), one.name
        assert one.metadata["of"] in ("masks", "score", "answer", "machine"), one.name
    assert set(METHODS) == set(ASMIConfig.__dataclass_fields__["method"].metadata["choices"])


def test_a_run_says_the_settings_of_the_next_score(tmp_path):
    """A benchmark in another scope, with stop strings of its own: nothing need be said again."""
    saved = runs.exchanged(runs.content(), scope="response", stop=["\n"], max_new_tokens=20)
    for values in saved["stats"]["asmi_settings_d60"]:
        values |= {"scope": "response"}
    run = runs.save(tmp_path / "run", saved)
    config, answers, _ = settled(run, None, {})
    assert (config.scope, config.stop, config.max_new_tokens) == ("response", ("\n",), 20)
    assert answers is not None
    assert settled(run, None, {"max_new_tokens": 5})[0].max_new_tokens == 5
    with pytest.raises(ValueError, match="no score with the settings scope='all'"):
        settled(run, None, {"scope": "all"})
    answers.save(tmp_path / "reference.json")
    assert settled(tmp_path / "reference.json", None, {})[0] == config
    with pytest.raises(ValueError, match="scope 'response' there, 'all' here"):
        settled(tmp_path / "reference.json", None, {"scope": "all"})
    one = Scorer(whitebox(), reference=run).score("Who built the ferry?", " Brask")
    # The planted run is of another model: of the settings nothing else is said.
    (other,) = [line for line in one.verdict if "other settings" in line]
    assert "(layer 3 there, 2 here; model tiny there" in other or "(layer 3 there, 2 here)" in other
