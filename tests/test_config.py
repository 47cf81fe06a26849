"""A setting is declared once: what is made of the declarations, and that nothing repeats them."""

from fractions import Fraction
from itertools import product

import click
import numpy as np
import pytest
from click.testing import CliRunner

from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.config import SETTINGS, ASMIConfig, target_layer
from lm_polygraph_asmi.options import given_settings, setting_helps, setting_options
from tests.composing import composed

CHANGED = {
    "method": "adapt", "depth": 0.3, "top_k": 8, "num_masks": 4, "mask_rate": 0.4,
    "mask_sampler": "balanced", "scope": "response", "seed": 3, "seeded_by": "prompt",
    "aggregation": "sum", "structure": "lm_head=a", "closing_token": False, "tau": 0.5,
    "beta": 2.0, "gate_token": "last", "num_samples": 5, "stop": ("x",), "max_new_tokens": 3,
    "attention": "eager", "memory_budget": 1, "compile": True,
}  # fmt: skip
"""Another value of each setting than the default."""
LABEL = (
    "Adapt-ASMI (30%, K=8, S=4, p=0.4, mask_sampler=balanced, scope=response, seed=3, "
    "seeded_by=prompt, aggregation=sum, named modules, no closing token, tau=0.5, beta=2, "
    "gate_token=last)"
)


def words_of(name, value) -> list[str]:
    """An option of a command, with this value."""
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    return [f"--{option}", value[0] if isinstance(value, tuple) else str(value)]


def test_every_setting_is_an_option_and_in_hydra():
    @click.command()
    @setting_options()
    def command(**settings):
        assert ASMIConfig(**given_settings(settings)) == ASMIConfig(**CHANGED)

    words = [word for name, value in CHANGED.items() for word in words_of(name, value)]
    assert CliRunner().invoke(command, words, catch_exceptions=False).exit_code == 0
    node = composed("asmi_base", "asmi.seed=3").asmi
    assert (node.seed, node.scope) == (3, "all")


def test_labels_and_plain_values():
    config = ASMIConfig(**CHANGED)
    assert CHANGED.keys() == SETTINGS.keys()
    assert str(config) == LABEL
    assert str(ASMIConfig(tau=0.5)) == str(ASMIConfig()) == "Sem-ASMI (60%, K=64)"  # unused by sem
    assert ASMIConfig.from_dict(config.to_dict() | {"layer": 3}) == config


@pytest.mark.parametrize("method", ["sem", "adapt"])
@pytest.mark.parametrize("name", SETTINGS)
def test_what_makes_a_score_another_one(name, method):
    """A score's key holds what changes its value; a label and its samples, the same but stops."""
    config = ASMIConfig(method=method)
    other = config.replace(**{name: "asmi" if name == "method" else CHANGED[name]})
    of = SETTINGS[name]
    counts = of["kind"] in ("masks", "score") and (method == "adapt" or not of["adapt"])
    assert (config.score_key() != other.score_key()) == counts
    if counts or not of["adapt"]:
        assert config.same_but(other) == (not counts or name == "stop")
    assert config.same_but(other, name)


def test_values_that_are_equal():
    assert len(ASMIConfig().at_depths([0.6, 0.1 * 6])) == 1  # up to rounding
    assert ASMIConfig(stop=["a", "b"]).score_key() == ASMIConfig(stop=["b", "a"]).score_key()
    assert ASMIConfig(structure="layers=a,lm_head=b") == ASMIConfig(
        structure={"lm_head": "b", "layers": "a"}
    )
    # Of two methods, one alone uses tau.
    assert ASMIConfig(method="adapt", tau=0.5).same_but(ASMIConfig(), "method")


def test_the_layer_at_a_depth_is_the_nearest_that_there_is():
    for layers, percent in product((1, 2, 3, 10, 12, 32, 36, 80), range(1, 100)):
        exact = Fraction(percent * layers, 100)
        near = [layer for layer in range(layers) if abs(layer - exact) <= Fraction(1, 2)]
        assert target_layer(percent / 100, layers) in (near or [layers - 1]), (layers, percent)


def commands_below(command):
    yield command
    for below in getattr(command, "commands", {}).values():
        yield from commands_below(below)


def test_every_setting_option_and_command_has_a_help():
    helps = setting_helps()
    assert ([*helps], all(helps.values())) == (ASMIConfig.names(), True)
    for command in commands_below(main):
        options = [option for option in command.params if not isinstance(option, click.Argument)]
        assert all([command.help, *(option.help for option in options)]), command.name


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
