"""The conditions of the perturbation controls: each equals full forward passes with plain hooks,
and is what it says."""

import re
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lm_polygraph_asmi import SemASMI, available_stat_calculators
from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.experiments import draws
from lm_polygraph_asmi.experiments.draws import channel_groups, generators
from lm_polygraph_asmi.experiments.perturbations import NAMES, load_perturbation
from lm_polygraph_asmi.experiments.perturbations.foreign import foreign_positions
from lm_polygraph_asmi.model import (
    Perturbation,
    check_perturbation,
    perturbed_layer,
    plain_model,
    run_unmasked,
    scoring_session,
    structure_of,
    subnetwork_log_probs,
    suffix,
)
from lm_polygraph_asmi.model.check import strategies_seen_right
from lm_polygraph_asmi.model.layers import decoder_layers, down_projection, output_projection
from lm_polygraph_asmi.model.perturbation import WITHOUT_HEADS, Masking
from lm_polygraph_asmi.model.suffix import strategies
from lm_polygraph_asmi.scoring.engine import Engine
from tests import conditions
from tests.decoders import FAMILIES, KINDS, sequence, unchecked
from tests.families import tiny_model
from tests.registry import tiny_class
from tests.test_manager import TEXTS, manager
from tests.tiny_lm import whitebox

BUILDER = "lm_polygraph_asmi.experiments.perturbations"
LAYER, PROMPT = 2, 9
FEW = (("foreign", "response"), ("mlp", "all"))
"""A condition that calls the layer several times, and one at the other site."""
HOW = {"all": None, "response": 1.7}
"""Each scope with a scale of its own: what they share is tried in both."""


def masks() -> torch.Tensor:
    return torch.tensor([[1.0, 0, 1, 1], [0, 1, 1, 0]])


def compare(model, decoder, condition, scope, perturbation_scale) -> None:
    """Through the package, where the check compares with full forward passes of its own, and
    here."""
    how = {"scope": scope, "perturbation_scale": perturbation_scale, "seed": 3}
    layer, ids, block = decoder.layer, sequence(13), decoder.block()
    change = load_perturbation(condition, perturbation_scale, 3)
    fast = subnetwork_log_probs(model, ids, PROMPT, layer, masks(), change=change, scope=scope)
    slow = conditions.subnetwork_log_probs(
        plain_model(model), decoder.projection(), f"{block}.{decoder.down}", block, layer, ids,
        PROMPT, masks(), condition=condition, **how,
    )  # fmt: skip
    torch.testing.assert_close(fast, slow, atol=1e-4, rtol=0)
    # The test could not fail if masking changed nothing.
    assert (slow - slow[:1]).abs().max() > 1e-3


def test_every_control_has_its_files_name_and_is_swept_and_told():
    assert [load_perturbation(name).name for name in NAMES] == list(NAMES)
    root = Path(__file__).parents[2]
    swept = re.search(r"perturbation: (\S+,\S+)", (root / "configs/asmi_controls.yaml").read_text())
    assert sorted(swept[1].split(",")) == sorted(NAMES)
    page = (root / "docs/concepts/controls.md").read_text()
    assert [name for name in NAMES if f"\n| `{name}` |" not in page] == []


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("condition", NAMES[1:])  # heads: test_decoders
def test_conditions_equal_whole_passes(family_model, condition, scope, request):
    """By the cheapest passes, which two families hold to the self-check: the second with a scope
    for each condition."""
    name, every = family_model.tiny_name, request.config.getoption("--slow")
    turn = (NAMES.index(condition) + SCOPES.index(scope)) % 2
    checked = every or name == "llama" or (name == "gemma2-softcap" and turn)
    if not (checked or (condition, scope) == FEW[1]):
        pytest.skip("needs --slow")
    with nullcontext() if checked else unchecked():
        compare(family_model, FAMILIES[name], condition, scope, HOW[scope])
    assert len(strategies_seen_right(family_model, scope)) == 1


TRIED = (
    "sinks", "latent attention", "parallel residual", "ALiBi, residual inside",
    "decoder of a translator", "gated hybrid", "multimodal wrapper", "norm inside the heads",
)  # fmt: skip
OTHERS = [k for k in KINDS if k not in TRIED and not KINDS[k].shares_projection]


@pytest.mark.parametrize(
    "kind", [*TRIED, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)]
)
def test_conditions_of_other_kinds_equal_whole_passes(kind, request):
    """--slow takes all conditions."""
    decoder = KINDS[kind]
    model = decoder.make()
    every = request.config.getoption("--slow")
    for condition, scope in product(NAMES[1:], SCOPES) if every else FEW:
        lacks = decoder.down is None and condition.startswith("mlp")
        said = rf"{decoder.name}: layer {decoder.layer} has no single down"
        with pytest.raises(TypeError, match=said) if lacks else nullcontext():
            compare(model, decoder, condition, scope, HOW[scope])


@pytest.mark.parametrize("scope", SCOPES)
def test_conditions_under_an_adapter(scope):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(
        r=4, target_modules=["o_proj", "down_proj", "v_proj"], init_lora_weights=False
    )
    adapted = peft.get_peft_model(tiny_model("llama"), lora).eval()
    for condition in ("pseudo_heads", "mlp") if scope == "all" else ("foreign",):
        compare(adapted, FAMILIES["llama"], condition, scope, HOW[scope])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("MixtralForCausalLM", "'mlp.experts' has weights with more than two axes"),
        ("Gemma4ForCausalLM", "'mlp.down_proj', 'per_layer_projection'"),
        ("DbrxForCausalLM", "but none"),
    ],
)
def test_layers_without_a_single_mlp_are_refused_by_name(name, said):
    model = tiny_class(name)
    layer = max(structure_of(model).sites)
    with pytest.raises(TypeError, match=rf"{name}: layer {layer} has no single down.*{said}"):
        subnetwork_log_probs(
            model, sequence(13), PROMPT, layer, masks(), change=load_perturbation("mlp")
        )


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("condition", NAMES)
@pytest.mark.parametrize("perturbation_scale", [None, 2.0])
def test_a_mask_that_keeps_all_changes_nothing(llama, condition, scope, perturbation_scale):
    """Run like any other mask: also beside masks that do change something."""
    kept = torch.cat([masks(), torch.ones(1, 4)])
    with scoring_session(llama):
        unmasked = run_unmasked(llama, sequence(13), PROMPT, [LAYER], scope)
        strategy = next(strategies(llama, unmasked, LAYER))
        states = strategy.run(
            llama, unmasked, LAYER, kept, load_perturbation(condition, perturbation_scale)
        )
        torch.testing.assert_close(states[2], unmasked.final_hidden, atol=1e-5, rtol=0)
        assert (states[0] - states[2]).abs().max() > 1e-2


@pytest.mark.parametrize("condition", ["foreign", "mlp_noise"])
def test_every_way_gives_the_same(llama, condition):
    """Also behind a cache, where the layer is run more than once."""
    with scoring_session(llama):
        for scope in SCOPES:
            unmasked = run_unmasked(llama, sequence(13), PROMPT, [LAYER], scope)
            found = [
                strategy.run(llama, unmasked, LAYER, masks(), load_perturbation(condition, 1.5))
                for strategy in strategies(llama, unmasked, LAYER)
            ]
            assert len(found) == 4
            for states in found[1:]:
                torch.testing.assert_close(states, found[0], atol=1e-4, rtol=0)


def layer_outputs(model, change: Perturbation, kept: torch.Tensor, scope: str = "all"):
    with scoring_session(model):
        unmasked = run_unmasked(model, sequence(13), PROMPT, [LAYER], scope)
        at = unmasked.predicting
        return perturbed_layer(model, unmasked, LAYER, kept, at, change)


def test_masking_all_groups_of_the_mlp_is_an_mlp_without_output(llama):
    found = layer_outputs(llama, load_perturbation("mlp"), torch.zeros(1, 4))
    module = decoder_layers(llama)[LAYER]
    handle = module.mlp.register_forward_hook(lambda *call: torch.zeros_like(call[-1]))
    expected = layer_outputs(llama, WITHOUT_HEADS, torch.ones(1, 4))
    handle.remove()
    torch.testing.assert_close(found, expected)


def test_pseudo_heads_under_the_identity_are_heads(llama, monkeypatch):
    expected = layer_outputs(llama, WITHOUT_HEADS, masks())
    assert not torch.equal(
        layer_outputs(llama, load_perturbation("pseudo_heads"), masks()), expected
    )
    monkeypatch.setattr(draws, "permutation", lambda width, _: torch.arange(width))
    assert torch.equal(layer_outputs(llama, load_perturbation("pseudo_heads"), masks()), expected)


def test_contributions_of_all_heads_are_the_output_of_the_attention(llama):
    outputs = []
    handle = output_projection(llama, LAYER).register_forward_hook(
        lambda *call: outputs.append(call[-1])
    )
    alone = torch.cat([torch.ones(1, 4), torch.eye(4)])
    layer_outputs(llama, WITHOUT_HEADS, alone)
    handle.remove()
    whole, *parts = outputs[-1]
    torch.testing.assert_close(sum(parts), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("condition", ["foreign", "isotropic"])
def test_controls_are_as_large_as_the_change_by_heads(family_model, condition):
    """Token by token and mask by mask, behind whatever norm the layer ends in."""
    plain = layer_outputs(family_model, WITHOUT_HEADS, torch.ones(1, 4))
    heads = layer_outputs(family_model, WITHOUT_HEADS, masks()) - plain
    found = layer_outputs(family_model, load_perturbation(condition), masks()) - plain
    torch.testing.assert_close(found.norm(dim=-1), heads.norm(dim=-1), rtol=1e-3, atol=1e-5)
    assert torch.cosine_similarity(found, heads, dim=-1).max() < 0.99


def test_a_scale_multiplies_the_change_of_the_layer(llama):
    plain = layer_outputs(llama, WITHOUT_HEADS, torch.ones(1, 4))
    for condition in NAMES:
        one, two = (
            layer_outputs(llama, load_perturbation(condition, d), masks()) for d in (None, 2.0)
        )
        torch.testing.assert_close(two - plain, 2 * (one - plain), atol=1e-4, rtol=1e-4)


def at(model, kept: torch.Tensor, seed: int = 0, length: int = 13, prompt: int = PROMPT) -> Masking:
    with scoring_session(model):
        unmasked = run_unmasked(model, sequence(length), prompt, [LAYER])
    return Masking(kept, torch.arange(length - 1), unmasked, LAYER, seed)


def test_other_positions_are_earlier_ones_of_the_prompt(llama):
    many = (torch.rand(300, 4, generator=torch.Generator().manual_seed(0)) > 0.5).float()
    masking = at(llama, torch.cat([many, torch.rand(1, 4).round()]))
    found = foreign_positions(masking)
    assert found.min() == 0
    assert found.max() == PROMPT - 1
    places = torch.arange(12)
    assert (found[:, 1:] < places[1:]).all()  # the first has none before it
    # All equally likely: on the average from the middle. (Four heads have sixteen masks.)
    earlier = places.clamp_max(PROMPT)
    assert ((found + 0.5) / earlier)[:, 3:].mean() == pytest.approx(0.5, abs=0.05)
    distinct = [bytes(row.tolist()) for row in found]
    assert len(set(distinct)) == len(many.unique(dim=0))  # equal masks, equal positions
    # Of a prompt of one token there is no other than that.
    assert (foreign_positions(at(llama, many[:2], prompt=1)) == 0).all()


def test_a_prompt_of_one_token_is_no_number_over_zero(llama):
    found = subnetwork_log_probs(
        llama, sequence(13), 1, LAYER, masks(), change=load_perturbation("foreign", 1.0)
    )
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("width", [32, 48, 50])
def test_groups_are_as_equal_as_can_be_and_those_of_every_example(llama, width):
    one, other = at(llama, masks()), at(llama, masks()[:1], length=12)
    groups = channel_groups(one, width)
    assert torch.equal(groups, channel_groups(other, width))
    assert torch.equal(groups.bincount().sort().values.unique(), torch.unique(
        torch.tensor([width // 4, -(-width // 4)])
    ))  # fmt: skip
    assert not torch.equal(groups, channel_groups(at(llama, masks(), seed=1), width))
    assert not torch.equal(groups, channel_groups(replace(one, layer=1), width))


def test_draws_differ_by_seed_layer_and_mask(llama):
    here = at(llama, masks())
    drawn = [
        torch.rand(4, generator=generator).tolist()
        for own in (here, replace(here, layer=1), replace(here, seed=1))
        for generator in generators(own)
    ]
    assert len({tuple(own) for own in drawn}) == 6


def test_what_is_drawn_follows_from_seed_tokens_and_mask(llama):
    kept = masks()
    first = subnetwork_log_probs(
        llama, sequence(13), PROMPT, LAYER, kept, change=load_perturbation("isotropic")
    )
    torch.manual_seed(5)
    again = subnetwork_log_probs(
        llama,
        sequence(13),
        PROMPT,
        LAYER,
        kept.flip(0),
        change=load_perturbation("isotropic"),
        memory_budget=1,
    )
    torch.testing.assert_close(again.flip(0), first, atol=1e-5, rtol=0)
    other = subnetwork_log_probs(
        llama, sequence(13), PROMPT, LAYER, kept, change=load_perturbation("isotropic", seed=1)
    )
    assert (other - first).abs().max() > 1e-2


def only(model, part: str):
    """A model in whose target layer one part alone does anything."""
    layer = decoder_layers(model)[LAYER]
    silent = layer.mlp.down_proj if part == "heads" else layer.self_attn.o_proj
    nn.init.zeros_(silent.weight)
    return model


@pytest.mark.parametrize(("part", "condition"), [("heads", "heads"), ("mlp", "mlp")])
def test_an_condition_moves_what_its_part_carries_alone(part, condition):
    model = only(tiny_model("llama"), part)
    moved = {
        name: subnetwork_log_probs(
            model, sequence(13), PROMPT, LAYER, masks(), change=load_perturbation(name)
        )
        for name in ("heads", "mlp")
    }
    apart = {name: (found[0] - found[1]).abs().max() for name, found in moved.items()}
    (still,) = set(apart) - {condition}
    assert apart[still] < 1e-5 < 1e-2 < apart[condition]


def test_an_condition_that_is_run_wrong_is_seen(llama, monkeypatch):
    """The self-check compares every condition with full forward passes, as it does heads."""

    def run(model):
        given = model, sequence(13), PROMPT, LAYER, masks()
        return [subnetwork_log_probs(*given, change=load_perturbation(name)) for name in NAMES]

    expected = run(llama)
    monkeypatch.setattr(suffix, "perturbed_layer", lambda *a: 1.3 * perturbed_layer(*a))
    for found, right in zip(run(tiny_model("llama")), expected, strict=True):
        torch.testing.assert_close(found, right, atol=1e-4, rtol=0)


def test_an_engine_draws_with_its_own_seed(llama):
    """The statistics of each mask are those of full passes with that seed."""
    change, ids = load_perturbation("isotropic"), sequence(13)
    prompt, answer = ids[:PROMPT], ids[PROMPT:]
    engine = Engine(change=change, details=True, num_masks=5, mask_rate=0.4, seed=3)
    found = engine.score(llama, prompt, answer.tolist())
    layer, kept = found.settings.layer, torch.from_numpy(found.masks).float()
    expected, other = (
        subnetwork_log_probs(
            llama, ids, PROMPT, layer, kept, change=load_perturbation("isotropic", seed=seed)
        ).gather(-1, answer.expand(len(kept), -1)[..., None])[..., 0].numpy()
        for seed in (3, 0)
    )  # fmt: skip
    np.testing.assert_allclose(found.masked_log_likelihood, expected, atol=1e-4)
    assert np.abs(expected - other).max() > 1e-2


def test_only_what_reads_head_outputs_needs_them(llama):
    def refused(name):
        try:
            check_perturbation(llama, LAYER, load_perturbation(name), heads=False)
        except TypeError as error:
            return "needs the head outputs of the unmasked pass" in str(error)

    assert [name for name in NAMES if refused(name)] == ["foreign"]


def test_a_manager_reaches_a_control_through_its_builder():
    """Scores are those of an engine; without the builder, none is computed."""
    tiny, how = whitebox(), {"num_masks": 5, "mask_rate": 0.4}
    named = SemASMI(perturbation="mlp", perturbation_scale=1.5, **how)
    with pytest.raises(ValueError, match=r"mlp, scale=1\.5 is a control.* a perturbation_builder"):
        manager(tiny, [named])()
    available = available_stat_calculators([named], perturbation_builder=BUILDER)
    run = manager(tiny, [named], available, save_stats=["asmi_mi_d60", "asmi_tokens"])
    run()
    engine = Engine(change=load_perturbation("mlp", 1.5), **how)
    for text, tokens, mi in zip(
        TEXTS[:2], run.stats["asmi_tokens"], run.stats["asmi_mi_d60"], strict=True
    ):
        prompt = tiny.tokenizer(text, return_tensors="pt")["input_ids"][0]
        expected = engine.score(tiny.model, prompt, tokens.tolist()).mi
        np.testing.assert_allclose(mi, expected, atol=1e-5)


def test_unknown_conditions_are_refused_with_the_list():
    with pytest.raises(ValueError, match="perturbation must be one of 'heads', 'foreign'"):
        load_perturbation("dropout")
    for scale in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="perturbation_scale"):
            load_perturbation("mlp", scale)


def test_the_down_projection_is_found_once(llama):
    assert down_projection(llama, LAYER) is decoder_layers(llama)[LAYER].mlp.down_proj
