"""Classes and what others make of them: scored right, or unsupported by name."""

import os

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from lm_polygraph_asmi import score
from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.maths import sample_head_masks
from lm_polygraph_asmi.model import (
    layer_at,
    name_modules,
    num_heads,
    scoring_session,
    structure_of,
)
from lm_polygraph_asmi.results.names import masked_layer
from lm_polygraph_asmi.scoring.engine import Engine
from tests import brute_force
from tests.decoders import FAMILIES, apart, full_passes, masks, sequence
from tests.families import tiny_model
from tests.odd_decoders import odd_decoder
from tests.registry import tiny_class
from tests.subnetworks import subnetwork_log_probs
from tests.tiny_lm import tokenizer

FOLDER = "ASMI_MODEL_FOLDER"


def test_hybrids_mask_the_nearest_layer_with_heads():
    model = tiny_class(
        "Qwen3_5ForCausalLM",
        num_hidden_layers=10,
        layer_types=["linear_attention"] * 3 + ["full_attention"] + ["linear_attention"] * 3
        + ["full_attention"] + ["linear_attention"] * 2,
    )  # fmt: skip
    assert list(structure_of(model).projections) == [3, 7]
    found = {depth: layer_at(model, depth) for depth in (0.1, 0.45, 0.5, 0.6, 0.95)}
    assert found == {0.1: 3, 0.45: 3, 0.5: 3, 0.6: 7, 0.95: 7}  # layer 5: the lower of two
    used = Engine(depth=0.5, num_masks=5, mask_rate=0.4).settings(model).to_dict()
    assert masked_layer(used) == "layer 3 of 10 (layer 5 has no heads)"
    with pytest.raises(ValueError, match=r"layer 4 .* has no attention heads.*3, 7"):
        subnetwork_log_probs(model, sequence(9), 4, 4, masks())


@pytest.mark.parametrize(
    ("name", "overrides", "reason"),
    [
        ("MambaForCausalLM", {}, "MambaForCausalLM has no attention heads"),
        ("BertLMHeadModel", {"is_decoder": False}, "tokens attend to later tokens"),
        # Differential attention subtracts one head's output from another's.
        ("DiffLlamaForCausalLM", {}, "heads are mixed"),
        # It forgets its sparse attention at the first short text.
        ("BigBirdForCausalLM", {}, "depend on earlier inputs"),
        # Its projection is used twice in a layer.
        ("ProphetNetForCausalLM", {}, "ProphetNetForCausalLM runs the projection .* twice"),
    ],
)
def test_classes_are_refused_with_their_reason(name, overrides, reason):
    with pytest.raises(TypeError, match=reason):
        structure_of(tiny_class(name, **overrides))


def test_a_layer_that_runs_twice_is_refused_in_a_class_of_the_table():
    model = tiny_model("llama")
    model.model.layers[3] = model.model.layers[1]
    with pytest.raises(TypeError, match="do not run once each"):
        structure_of(model)


@pytest.mark.parametrize("scope", SCOPES)
def test_a_hybrid_is_scored_from_generation_to_embeddings(scope):
    words = tokenizer()
    model = tiny_class("Qwen3_5ForCausalLM", vocab_size=len(words))
    how = {"scope": scope, "num_masks": 5, "mask_rate": 0.4, "max_new_tokens": 4}
    found = score(model, "Who built it?", tokenizer=words, method="adapt", num_samples=3, **how)
    again = score(model, "Who built it?", tokenizer=words, method="adapt", num_samples=3, **how)
    assert found.score == again.score
    assert 0 < found.score < 2
    assert (found.settings["layer"], found.settings["requested_layer"]) == (1, 2)


class Mine(LlamaForCausalLM):
    """What anybody may do to a model they load."""


def test_a_plain_subclass_is_its_base_class():
    model = tiny_model("llama")
    mine = Mine(model.config).eval()
    mine.load_state_dict(model.state_dict())
    ids = sequence(17)
    found, expected = (subnetwork_log_probs(m, ids, 11, 2, masks()) for m in (mine, model))
    assert torch.equal(found, expected)


def test_a_class_that_the_table_lacks_asks_for_names():
    """One of the same name is another class."""
    model = odd_decoder()
    name_modules(model, None)
    type_of = type(model)
    for name in (type_of.__name__, "LlamaForCausalLM"):
        model.__class__ = type(name, (type_of,), {})
        with pytest.raises(TypeError, match=rf"{name} is not among the classes that were tested"):
            structure_of(model)


def see_all(model: torch.nn.Module) -> None:
    for layer in model.model.layers:
        layer.register_forward_pre_hook(
            lambda _, given, named: (given, named | {"attention_mask": torch.zeros(1, 1, 1, 1)}),
            with_kwargs=True,
        )


@pytest.mark.parametrize("subclass", [False, True])
def test_what_others_made_of_a_class_in_the_table_is_looked_at(subclass):
    model = tiny_model("llama")
    if subclass:
        model.__class__ = Mine
    see_all(model)
    with pytest.raises(TypeError, match="is not causal: tokens attend to later tokens"):
        subnetwork_log_probs(model, sequence(17), 11, 2, masks())


def half_attention(model: torch.nn.Module) -> None:
    for layer in model.model.layers:
        layer.self_attn.half()


def single_unembedding(model: torch.nn.Module) -> None:
    model.to(torch.bfloat16).lm_head.float()


@pytest.mark.parametrize("change", [half_attention, single_unembedding])
def test_weights_in_several_precisions_that_do_not_run_are_refused_by_name(change):
    model = tiny_model("llama")
    change(model)
    with pytest.raises(TypeError, match=r"float.* and .*float32.*one precision"):
        subnetwork_log_probs(model, sequence(17), 11, 2, masks())
    with pytest.raises(TypeError, match="one precision"):
        Engine(num_masks=5, mask_rate=0.4).score(model, sequence(11), [3, 4, 5])


@pytest.mark.parametrize("scope", SCOPES)
def test_weights_in_several_precisions_that_run_are_scored(scope):
    """An unembedding in 32 bits that casts what it gets; limits are those of the coarser half."""
    model = tiny_model("llama").to(torch.bfloat16)
    model.lm_head.float().register_forward_pre_hook(lambda _, given: (given[0].float(),))
    ids = sequence(17)
    found = subnetwork_log_probs(model, ids, 11, 2, masks(), scope=scope)
    expected = full_passes(FAMILIES["llama"], model, ids, 11, scope)
    assert apart(found, expected) < 0.05
    assert apart(expected, expected[:1].expand_as(expected)) > 0.1


def test_adapters():
    """LoRA on the output projection counts; a learned prompt is unsupported."""
    peft = pytest.importorskip("peft")
    base = tiny_model("llama")
    lora = peft.LoraConfig(r=4, target_modules=["o_proj", "q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(tiny_model("llama"), lora).eval()
    merged = peft.get_peft_model(tiny_model("llama"), lora).eval()
    merged.load_state_dict(adapted.state_dict())
    merged = merged.merge_and_unload()
    ids = sequence(17)
    for scope in SCOPES:
        found, expected, plain = (
            subnetwork_log_probs(m, ids, 11, 2, masks(), scope=scope)
            for m in (adapted, merged, base)
        )
        assert apart(found, expected) < 1e-5
        assert apart(found, plain) > 1e-2
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(TypeError, match="learned tokens"):
        subnetwork_log_probs(peft.get_peft_model(tiny_model("llama"), prompt), ids, 11, 2, masks())


@pytest.mark.slow
@pytest.mark.skipif(FOLDER not in os.environ, reason=f"{FOLDER} names no folder with a model")
def test_real_weights_equal_whole_passes():
    """Any model that transformers loads from a folder, in both scopes."""
    model = AutoModelForCausalLM.from_pretrained(os.environ[FOLDER], dtype=torch.float32).eval()
    found = structure_of(model)
    layer = layer_at(model, 0.6)
    projection = f"{found.layers}.{layer}.{found.projections[layer]}"
    heads = num_heads(model, layer)
    drawn = sample_head_masks(3, heads, 0.2, torch.Generator().manual_seed(0))
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(100, min(vocabulary, 30_000), (90,))
    for scope in SCOPES:
        fast = subnetwork_log_probs(model, ids, 80, layer, drawn, scope=scope, attention="sdpa")
        with scoring_session(model, "sdpa"):
            slow = brute_force.subnetwork_log_probs(model, projection, 1, ids, 80, drawn, scope)
        assert apart(fast, slow) < 1e-4
        assert apart(slow, slow[:1].expand_as(slow)) > 1e-3
