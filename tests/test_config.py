"""A setting is declared once: what is made of the declarations, and that nothing repeats them."""

import click
import numpy as np
import pytest
from click.testing import CliRunner

from lm_polygraph_asmi import SemASMI
from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.decisions import Decider, calibrate_run
from lm_polygraph_asmi.estimators.base import at_depth
from lm_polygraph_asmi.options import given_settings, setting_helps, setting_options
from lm_polygraph_asmi.report import load_run_groups
from lm_polygraph_asmi.results.runs import load_run
from lm_polygraph_asmi.scoring.scorer import Scorer
from tests.composing import composed
from tests.report import runs
from tests.tiny_lm import whitebox


def test_a_setting_is_everywhere(tmp_path):
    # On the command line.
    given: dict = {}

    @click.command()
    @setting_options()
    def command(**settings):
        given.update(given_settings(settings))

    CliRunner().invoke(command, ["--tau", "2", "--stop", "\\n", "--no-closing-token"])
    assert given == {"tau": 2.0, "stop": ["\n"], "closing_token": False}
    # In Hydra, whose node an estimator is made of.
    node = composed("asmi_base", "asmi.seed=3").asmi
    assert (node.seed, node.scope) == (3, "all")
    # In the name, the manifest and the key.
    estimator = SemASMI(ASMIConfig(seed=3))
    assert str(estimator) == "Sem-ASMI (60%, K=64, seed=3)"
    assert estimator.described["seed"] == 3
    saved = runs.content()
    saved["estimations"]["sequence", str(estimator)] = [0.0] * 60
    saved[runs.METHODS] = {str(estimator): estimator.described}
    found = load_run(runs.save(tmp_path / "run", saved))
    assert found.manifest["methods"][str(estimator)]["seed"] == 3
    # In a scored row.
    scorer = Scorer(whitebox(), ASMIConfig(num_masks=4, mask_rate=0.4, seed=3))
    assert scorer.score("Who built the ferry?", " Brask").settings["seed"] == 3


@pytest.mark.parametrize(
    ("changed", "label"),
    [
        ({"method": "adapt", "tau": 0.5, "beta": 2.0}, "Adapt-ASMI (60%, K=64, tau=0.5, beta=2)"),
        ({"method": "adapt", "num_samples": 5, "compile": True}, "Adapt-ASMI (60%, K=64)"),
        ({"tau": 0.5}, "Sem-ASMI (60%, K=64)"),  # which it does not use
        ({"num_masks": 8, "mask_rate": 0.2}, "Sem-ASMI (60%, K=64, S=8, p=0.2)"),
        ({"closing_token": False}, "Sem-ASMI (60%, K=64, no closing token)"),
        ({"structure": "lm_head=a", "scope": "response"},
         "Sem-ASMI (60%, K=64, scope=response, named modules)"),
        ({"mask_sampler": "balanced", "stop": "x"}, "Sem-ASMI (60%, K=64, mask_sampler=balanced)"),
    ],
)  # fmt: skip
def test_labels_and_plain_values(changed, label):
    config = ASMIConfig(**changed)
    assert str(config) == label
    assert ASMIConfig.from_dict(config.to_dict() | {"layer": 3}) == config


def commands_below(command):
    yield command
    for below in getattr(command, "commands", {}).values():
        yield from commands_below(below)


def test_only_what_its_method_uses_makes_a_score_another_one():
    assert ASMIConfig(tau=0.5).score_key() == ASMIConfig().score_key()
    assert len(ASMIConfig().at_depths([0.6, 0.1 * 6])) == 1  # equal up to rounding
    adapt = ASMIConfig(method="adapt")
    assert adapt.replace(tau=0.5).score_key() != adapt.score_key()
    elsewhere = {"attention": "eager", "memory_budget": 1, "max_new_tokens": 3}
    assert adapt.replace(**elsewhere).score_key() == adapt.score_key()
    for masks in ({"seed": 7}, {"seeded_by": "prompt"}):
        assert adapt.replace(**masks).score_key() != adapt.score_key()
    for one, other in (
        (adapt.replace(tau=0.5), ASMIConfig()),
        (ASMIConfig(), adapt.replace(tau=1)),
    ):
        assert one.same_but(other, "method")  # which alone uses tau
    assert not adapt.replace(tau=0.5).same_but(adapt)
    several = ASMIConfig(stop=["a", "b"]).score_key()
    assert several == ASMIConfig(stop=["b", "a"]).score_key()
    named = ASMIConfig(structure="layers=a,lm_head=b")
    assert named == ASMIConfig(structure={"lm_head": "b", "layers": "a"})
    assert len({str(key) for key in (several, named.score_key(), ASMIConfig().score_key())}) == 3


def test_every_setting_option_and_command_has_a_help():
    names, helps = ASMIConfig.names(), setting_helps()
    assert list(helps) == names
    assert all(helps.values())
    for command in commands_below(main):
        assert command.help, command.name
        for option in command.params:
            assert isinstance(option, click.Argument) or option.help, (command.name, option.opts)


def test_a_run_says_the_settings_of_later_decisions(tmp_path):
    """A benchmark in another scope, with stop strings of its own: nothing need be given again."""
    saved = runs.exchanged(runs.content(), scope="response", stop=["\n"], max_new_tokens=20)
    for own in at_depth(saved["stats"], 0.6):
        own["settings"] |= {"scope": "response"}
    found = calibrate_run(runs.save(tmp_path / "run", saved), 0.3, signal="sem", resamples=20)
    config = found.configured({})
    assert (config.scope, config.stop, config.max_new_tokens) == ("response", ("\n",), 20)
    one = Decider(whitebox(), found).decide("Who built the ferry?", " Brask")
    # The planted run is of another model: of the settings nothing else is given.
    assert "layer 3 there, 2 here" in one.reason


def test_scores_of_one_name_with_other_settings_are_of_two_settings(tmp_path):
    for number, gate in ((10, "second_last"), (5, "second_last"), (10, "last")):
        saved = runs.content()
        changed = {"gate_token": gate, "num_samples": number}
        saved[runs.METHODS] = {name: of | changed for name, of in saved[runs.METHODS].items()}
        for copy in "ab":
            runs.save(tmp_path / f"{gate}-{number}-{copy}", saved)
    groups = load_run_groups(tmp_path.iterdir())
    assert [len(group.runs) for group in groups] == [2, 2, 2]
    adapt = [group.methods["Adapt-ASMI (60%, K=64)"].score_key() for group in groups]
    assert {key["num_samples"] for key in adapt} == {5, 10}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("closing_token", 1), ("closing_token", np.ones(2, bool)), ("memory_budget", 1.5),
        ("seed", 2**64),
        *(("structure", bad) for bad in ("heads=attn", "layers=", "attn.o", {"layers": 3})),
    ],
)  # fmt: skip
def test_values_of_another_type_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        ASMIConfig(**{name: value})
