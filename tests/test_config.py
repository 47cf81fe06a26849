"""A setting is declared once: what is made of the declarations, and that nothing repeats them."""

import re
from dataclasses import dataclass, fields
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lm_polygraph_asmi import SemASMI
from lm_polygraph_asmi.calibration import Decider, calibrate_run
from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.config import METHODS, ASMIConfig, parameter
from lm_polygraph_asmi.host.configs import configs_path, store_settings
from lm_polygraph_asmi.options import given_settings, setting_options
from lm_polygraph_asmi.report import build_report, load_run_groups
from lm_polygraph_asmi.results.names import at_depth
from lm_polygraph_asmi.results.runs import combine_runs, load_run
from lm_polygraph_asmi.scoring.scorer import Scorer
from lm_polygraph_asmi.validation import check_number
from tests.report import runs
from tests.tiny_lm import whitebox

PACKAGE = Path(__file__).parents[1] / "lm_polygraph_asmi"


@dataclass(frozen=True, kw_only=True)
class Warmer(ASMIConfig):
    """The settings and one more."""

    warmth: float = parameter(
        1.5, "How warm it is.", check_number, unit="kelvin", of="masks", shown="warmth={:g}".format
    )


def test_a_new_setting_is_everywhere(tmp_path):
    # On the command line.
    given: dict = {}

    @click.command()
    @setting_options(config=Warmer)
    def command(**settings):
        given.update(given_settings(settings))

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
    assert found.manifest["methods"][str(estimator)]["warmth"] == 3
    # In what statistics are of, and a scored row.
    assert "warmth" in Warmer().to_dict("masks")
    scorer = Scorer(whitebox(), Warmer(num_masks=4, mask_rate=0.4))
    assert scorer.score("Who built the ferry?", " Brask").settings["warmth"] == 1.5


def help_of(command):
    return " ".join(CliRunner().invoke(command, ["--help"], env={"COLUMNS": "200"}).output.split())


def commands_below(command):
    """A command and all its subcommands."""
    yield command
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            yield from commands_below(command.get_command(click.Context(command), name))


def test_every_option_and_command_has_a_help_text():
    for command in commands_below(main):
        assert command.help, command.name
        for option in command.params:
            assert isinstance(option, click.Argument) or option.help, (command.name, option.opts)


@pytest.mark.parametrize(
    "default", ["0.6", "64", "10.0", "0.3", '"bernoulli"', '"answer"', '"mean"', '"sem"']
)
def test_a_default_stands_in_one_place(default):
    """As the default of an argument, an option or a field, in the package."""
    stated = re.compile(rf"[\w\])] ?(?::[^=,()]+)?= ?{re.escape(default)}(?![\w.])[,)]")
    named = "depth|top_k|tau|beta|num_samples|max_new_tokens|mask_sampler|seeded_by"
    declared = re.compile(
        rf"(?<!control-)\b({named}|aggregation|method)\b[^=\n]*= ?{re.escape(default)}\b"
    )
    places = [
        f"{file.relative_to(PACKAGE)}: {line.strip()}"
        for file in PACKAGE.rglob("*.py")
        if file.name != "config.py"
        for line in file.read_text().splitlines()
        if declared.search(line) and ">>>" not in line and "==" not in line
        and stated.search(line)
    ]  # fmt: skip
    assert places == []


def test_values_are_plain_and_come_back():
    config = ASMIConfig(method="adapt", stop="\n", scope="response")
    assert ASMIConfig.from_dict(config.to_dict() | {"layer": 3}) == config
    assert config.to_dict()["stop"] == ["\n"]
    assert str(config) == "Adapt-ASMI (60%, K=64, scope=response)"


def test_only_what_its_method_uses_makes_a_score_another_one():
    assert ASMIConfig(tau=0.5).score_key() == ASMIConfig().score_key()
    adapt = ASMIConfig(method="adapt")
    assert adapt.replace(tau=0.5).score_key() != adapt.score_key()
    elsewhere = {"attention": "eager", "memory_budget": 1, "max_new_tokens": 3}
    assert adapt.replace(**elsewhere).score_key() == adapt.score_key()
    for masks in ({"seed": 7}, {"seeded_by": "prompt"}):
        assert adapt.replace(**masks).score_key() != adapt.score_key()
    several = ASMIConfig(stop=["a", "b"]).score_key()
    assert several == ASMIConfig(stop=["b", "a"]).score_key()
    assert several != ASMIConfig().score_key()


def test_every_declaration_says_what_it_is():
    for one in fields(ASMIConfig):
        assert one.metadata["help"][0].isupper(), one.name
        assert one.metadata["help"].endswith("."), one.name
        assert one.metadata["of"] in ("masks", "score", "answer", "machine"), one.name
    assert set(METHODS) == set(ASMIConfig.__dataclass_fields__["method"].metadata["choices"])


def test_a_run_says_the_settings_of_later_decisions(tmp_path):
    """A benchmark in another scope, with stop strings of its own: nothing need be given again."""
    saved = runs.exchanged(runs.content(), scope="response", stop=["\n"], max_new_tokens=20)
    for own in at_depth(saved["stats"], 0.6):
        own["settings"] |= {"scope": "response"}
    run = runs.save(tmp_path / "run", saved)
    found = calibrate_run(run, None, 0.3, signal="sem", resamples=20)
    config = found.configured()
    assert (config.scope, config.stop, config.max_new_tokens) == ("response", ("\n",), 20)
    assert found.configured(ASMIConfig(scope="response")).stop == ("\n",)
    with pytest.raises(ValueError, match="a score with the settings method='sem', scope='all'"):
        calibrate_run(run, None, 0.3, scope="all")
    for setting in ({"scope": "all"}, {"stop": None}, {"stop": "x"}):
        with pytest.raises(ValueError, match="settings differ from the calibration"):
            found.configured(settings=setting)
    one = Decider(whitebox(), found).decide("Who built the ferry?", " Brask")
    # The planted run is of another model: of the settings nothing else is given.
    assert "layer 3 there, 2 here" in one.reason


def test_a_key_setting_is_part_of_the_name_unless_it_says_otherwise():
    @dataclass(frozen=True, kw_only=True)
    class Unnamed(ASMIConfig):
        warmth: float = parameter(1.5, "How warm it is.", check_number)

    assert str(Unnamed(warmth=3)) == "Sem-ASMI (60%, K=64, warmth=3)"
    assert str(ASMIConfig(method="adapt", num_samples=5)) == "Adapt-ASMI (60%, K=64)"


@pytest.mark.usefixtures("few_resamples", "no_pictures")
def test_scores_of_one_name_with_other_settings_are_two_methods(tmp_path):
    """Runs over the same answers whose Adapt-ASMI drew other numbers of samples, or whose gates
    read another token."""
    adapt, found = "Adapt-ASMI (60%, K=64)", []
    gates = ("second_last", "last")
    for number, gate in ((10, gates[0]), (5, gates[0]), (5, gates[0]), (10, gates[1])):
        saved = runs.content()
        saved["estimations"]["sequence", adapt] = np.random.default_rng(len(found)).random(60)
        saved[runs.METHODS] = {
            name: of | {"gate_token": gate, "num_samples": number}
            for name, of in saved[runs.METHODS].items()
        }
        found.append(load_run(runs.save(tmp_path / str(len(found)), saved)))
    one = combine_runs(found)
    named = [adapt, f"{adapt[:-1]}, num_samples=5)", f"{adapt[:-1]}, gate_token=last)"]
    assert [name for name in one.scores if name.startswith("Adapt")] == named
    for name, run in zip(named, (found[0], found[1], found[3]), strict=True):
        assert one.scores[name].equals(run.scores[adapt])
    assert [one.methods[name].num_samples for name in named] == [10, 5, 10]
    assert [one.methods[name].gate_token for name in named] == ["second_last"] * 2 + ["last"]
    assert combine_runs([found[0], found[0]]).scores.equals(found[0].scores)
    (group,) = load_run_groups([run.path for run in found])
    assert list(group.scores.filter(like="Adapt")) == named
    assert group.variants["Adapt-ASMI"] == adapt
    shown = build_report([group], tmp_path / "report")[0].read_text()
    assert all(name in shown for name in named)


@pytest.mark.parametrize(
    ("name", "value"),
    [("closing_token", 1), ("closing_token", np.array([True, False])), ("memory_budget", 1.5),
     ("seed", 2**64)],
)  # fmt: skip
def test_values_of_another_type_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        ASMIConfig(**{name: value})
