"""Classes and what others make of them: scored right, or unsupported with a reason."""

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from lm_polygraph_asmi import score
from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.model import layer_at, structure_of
from lm_polygraph_asmi.results.names import masked_layer
from lm_polygraph_asmi.scoring.engine import Engine
from tests.decoders import FAMILIES, apart, full_passes, masks, sequence
from tests.families import tiny_model
from tests.registry import tiny_class
from tests.subnetworks import subnetwork_log_probs
from tests.tiny_lm import tokenizer


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


@pytest.mark.parametrize("scope", SCOPES)
def test_a_hybrid_is_scored_from_generation_to_embeddings(scope):
    words = tokenizer()
    model = tiny_class("Qwen3_5ForCausalLM", vocab_size=len(words))
    how = {"scope": scope, "num_masks": 5, "mask_rate": 0.4, "max_new_tokens": 4}
    how |= {"tokenizer": words, "method": "adapt", "num_samples": 3}
    found, again = (score(model, "Who built it?", **how) for _ in range(2))
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


def see_all(model: nn.Module) -> None:
    model.__class__ = Mine
    for layer in model.model.layers:
        layer.register_forward_pre_hook(
            lambda _, given, named: (given, named | {"attention_mask": torch.zeros(1, 1, 1, 1)}),
            with_kwargs=True,
        )


def translator(model: nn.Module) -> None:
    model.config.is_encoder_decoder = True


def layer_twice(model: nn.Module) -> None:
    model.model.layers[3] = model.model.layers[1]


def half_attention(model: nn.Module) -> None:
    for layer in model.model.layers:
        layer.self_attn.half()


def single_unembedding(model: nn.Module) -> None:
    model.to(torch.bfloat16).lm_head.float()


def layer_compiled(model: nn.Module) -> None:
    model.model.layers[2] = torch.compile(model.model.layers[2], backend="eager")


def method_compiled(model: nn.Module) -> None:
    model.forward = torch.compile(model.forward, backend="eager")


def heads_changed(model: nn.Module) -> None:
    projection = model.model.layers[2].self_attn.o_proj
    projection.register_forward_pre_hook(lambda _, args: (args[0].flip(-1),))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        ("MambaForCausalLM", "MambaForCausalLM has no attention heads"),
        # Differential attention subtracts one head's output from another's.
        ("DiffLlamaForCausalLM", "heads are mixed"),
        # It forgets its sparse attention at the first short text.
        ("BigBirdForCausalLM", "depend on earlier inputs"),
        # Its projection is used twice in a layer.
        ("ProphetNetForCausalLM", "ProphetNetForCausalLM runs the projection .* twice"),
        (see_all, "is not causal: tokens attend to later tokens"),
        (layer_twice, "do not run once each"),
        (half_attention, r"float.* and .*float32.*one precision"),
        (single_unembedding, r"float.* and .*float32.*one precision"),
        (layer_compiled, r"is compiled by torch.compile"),
        (method_compiled, r"is compiled by torch.compile"),
        (translator, "is an encoder-decoder model"),
        (heads_changed, "a hook of other code changes the heads of layer 2 before"),
    ],
)
def test_what_cannot_be_masked_is_refused_with_its_reason(make, reason):
    model = tiny_class(make) if isinstance(make, str) else tiny_model("llama")
    if callable(make):
        make(model)
    with pytest.raises(TypeError, match=reason):
        subnetwork_log_probs(model, sequence(17), 11, 2, masks())


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
