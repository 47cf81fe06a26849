"""Heads are found by name, or the model is refused with a reason."""

from functools import partial
from itertools import count

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel

from lm_polygraph_asmi import ASMIConfig
from lm_polygraph_asmi.config import module_paths
from lm_polygraph_asmi.core.engine import Engine
from lm_polygraph_asmi.core.model import choice, plain_model, structure, structure_of
from lm_polygraph_asmi.core.statistics import masked_layer
from lm_polygraph_asmi.host.model import maskable_model
from tests.families import (
    FAMILIES,
    IDS,
    PROMPT,
    apart,
    both_scopes,
    full_passes,
    masks,
    of_model,
    sequence,
    subnetwork_log_probs,
    tiny_class,
    tiny_model,
)
from tests.tiny_lm import whitebox


def test_hybrids_mask_the_nearest_layer_with_heads():
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * 2 + ["linear_attention"] * 2
    model = tiny_class("Qwen3_5ForCausalLM", num_hidden_layers=10, layer_types=kinds)
    found = {depth: structure_of(model).layer_at(depth) for depth in (0.1, 0.45, 0.5, 0.6, 0.95)}
    assert found == {0.1: 3, 0.45: 3, 0.5: 3, 0.6: 7, 0.95: 7}  # layer 5: the lower of two
    for depth, used, requested in ((0.1, 3, 1), (0.5, 3, 5), (0.01, 3, 0)):
        settings = Engine(depth=depth, num_masks=5, mask_rate=0.4).settings(model).to_dict()
        said = f"layer {used} of 10 (layer {requested} has no heads)"
        assert masked_layer(settings) == said
    with pytest.raises(ValueError, match=r"layer 4 .*3, 7"):
        subnetwork_log_probs(model, sequence(9), 4, 4, masks())


def see_all(model: nn.Module) -> None:
    model.__class__ = type("Mine", (LlamaForCausalLM,), {})  # as anybody may do
    for layer in model.model.layers:
        layer.register_forward_pre_hook(
            lambda _, given, named: (given, named | {"attention_mask": torch.zeros(1, 1, 1, 1)}),
            with_kwargs=True,
        )


def layers_outside(model: nn.Module) -> None:
    """The trunk runs layers that are no part of it."""
    model.layers = vars(model.model)["layers"] = model.model._modules.pop("layers")


DRIFT = count(1, 0.01)  # A factor that grows with each call
compiled = partial(torch.compile, backend="eager")
PRECISIONS = r"float.* and .*float32.*one precision"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        ("MambaForCausalLM", "no attention heads"),
        # Differential attention subtracts one head's output from another's.
        ("DiffLlamaForCausalLM", "mixed"),
        # It forgets its sparse attention at the first short text.
        ("BigBirdForCausalLM", "earlier inputs"),
        # Its projection is used twice in a layer.
        ("ProphetNetForCausalLM", "twice"),
        *(
            (
                lambda m, size=size: m.lm_head.register_forward_hook(
                    lambda *call: call[-1] + size * torch.rand_like(call[-1])
                ),
                "deterministic",
            )
            for size in (0.02, 1)
        ),
        (
            lambda m: m.lm_head.register_forward_hook(lambda *call: call[-1] * next(DRIFT)),
            "deterministic",
        ),
        (see_all, "causal"),
        (lambda m: setattr(m.model.layers, "3", m.model.layers[1]), "run once"),
        (
            lambda m: m.model.layers[1].mlp.register_forward_pre_hook(
                lambda _, args: (m.model.layers[1].self_attn.o_proj(*args),)
            ),
            "once each, got .*2",
        ),
        (layers_outside, "no module around"),
        (
            lambda m: m.model.layers[1].mlp.add_module("self_attn", m.model.layers[2].self_attn),
            "layer 1 has 2 projections",
        ),
        (lambda m: setattr(m.config, "num_attention_heads", 5), "5 heads of equal width"),
        (lambda m: [layer.self_attn.half() for layer in m.model.layers], PRECISIONS),
        (lambda m: m.to(torch.bfloat16).lm_head.float(), PRECISIONS),
        (
            lambda m: setattr(m.model.layers, "2", compiled(m.model.layers[2])),
            "layers.2 is compiled",
        ),
        (lambda m: setattr(m, "forward", compiled(m.forward)), "the model is compiled"),
        (
            lambda m: (
                setattr(m.config, "is_encoder_decoder", True),
                setattr(m, "get_input_embeddings", nn.Module().forward),  # not implemented
            ),
            "encoder-decoder",
        ),
        (
            lambda m: m.model.layers[2].self_attn.o_proj.register_forward_pre_hook(
                lambda _, args: (args[0].flip(-1),)
            ),
            "hook .* layer 2",
        ),
        # A class that shares its name alone with one of the table.
        (
            lambda m: setattr(m, "__class__", type("LlamaForCausalLM", (Unknown,), {})),
            "not among the classes",
        ),
    ],
)
def test_what_cannot_be_masked_is_refused_with_its_reason(make, reason):
    # Of 84 ordinary tokens, the short text would have its first again as its last.
    model = tiny_class(make) if isinstance(make, str) else tiny_model("llama", vocab_size=87)
    if not isinstance(make, str):
        make(model)
    with pytest.raises(TypeError, match=reason):
        subnetwork_log_probs(model, IDS, PROMPT, 2, masks())


def test_a_class_that_was_not_tested_runs_with_a_name(monkeypatch):
    """As one that is not listed: no pass is known to be right."""
    untested = dict.fromkeys(structure.classes()["LlamaForCausalLM"], "") | {"heads": "not tested"}
    monkeypatch.setitem(structure.classes(), "LlamaForCausalLM", untested)
    assert structure_of(tiny_model("llama"), "projection=self_attn.o_proj").passes == {}


@both_scopes
def test_weights_in_several_precisions_that_run_are_scored(scope):
    """An unembedding in 32 bits that casts what it gets; limits are those of the coarser half."""
    model = tiny_model("llama").to(torch.bfloat16)
    model.lm_head.float().register_forward_pre_hook(lambda _, given: (given[0].float(),))
    found = subnetwork_log_probs(model, IDS, PROMPT, 2, masks(), scope=scope)
    expected = full_passes(FAMILIES["llama"], model, IDS, PROMPT, scope)
    assert apart(found, expected) < 0.05
    assert apart(expected, expected[:1].expand_as(expected)) > 0.1


@both_scopes
def test_an_adapter_of_the_heads_counts(scope):
    """On the output projection: as merged weights, which other heads do not have."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["o_proj", "q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(tiny_model("llama"), config).eval()
    how = IDS, PROMPT, 2, masks()
    found = subnetwork_log_probs(adapted, *how, scope=scope)
    merged, base = adapted.merge_and_unload(), tiny_model("llama")
    assert apart(found, subnetwork_log_probs(merged, *how, scope=scope)) < 1e-5
    assert apart(found, subnetwork_log_probs(base, *how, scope=scope)) > 1e-2


def test_adapters_that_move_tokens_or_wait_for_some_and_other_wrappers_are_refused():
    peft, how = pytest.importorskip("peft"), {"task_type": "CAUSAL_LM"}
    waits = peft.LoraConfig(target_modules=["o_proj"], alora_invocation_tokens=[3], **how)
    moves = peft.PromptTuningConfig(num_virtual_tokens=3, **how)
    for wrap, word in (
        (partial(peft.get_peft_model, peft_config=moves), "learned tokens"),
        (partial(peft.get_peft_model, peft_config=waits), "aLoRA"),
        (compiled, "neither compiled"),
    ):
        with pytest.raises(TypeError, match=word):
            plain_model(wrap(tiny_model("llama")))


class Unknown(PreTrainedModel):
    """A class that the table does not have, and no known unembedding."""

    forward = LlamaForCausalLM.forward

    def get_output_embeddings(self) -> None:
        return None


class Mixer(nn.Module):
    """A projection with an axis for heads: no `in_features`, no matrix."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.T.unflatten(0, (4, -1)).contiguous())

    def forward(self, heads: Tensor) -> Tensor:
        return torch.einsum("bthw,hwd->btd", heads.unflatten(-1, (4, -1)), self.weight)


@pytest.fixture
def unknown() -> PreTrainedModel:
    """No part is where it is looked for: the layers are no list, attention comes after the MLP."""
    model = tiny_model("llama")
    model.__class__ = Unknown
    for layer in model.model.layers:
        layer.self_attn.o_proj = Mixer(layer.self_attn.o_proj.weight.detach())
        layer._modules["self_attn"] = layer._modules.pop("self_attn")
    model.model.layers = nn.Sequential(*model.model.layers)
    return model


NAMES = "layers=model.layers,projection=self_attn.o_proj,lm_head=lm_head"
ANOTHER = "projection of the head outputs.*the first is 'self_attn.o_proj'"


@both_scopes
def test_named_modules_equal_full_passes(unknown, scope):
    host = whitebox()
    host.model = unknown
    assert maskable_model(host, NAMES) is unknown
    with pytest.raises(TypeError, match="name the modules"):  # the names are not kept
        maskable_model(host)
    found = subnetwork_log_probs(unknown, IDS, PROMPT, 2, masks(), scope=scope, structure=NAMES)
    plain = full_passes(FAMILIES["llama"], tiny_model("llama"), IDS, PROMPT, scope)
    assert apart(found, plain) < 1e-5
    # A class that is not listed may keep other things than keys and values.
    assert "packed" not in of_model(choice.passes_in_use, unknown, scope, structure=NAMES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": None}, "no list of 4 decoder layers.*name the modules: structure='layers="),
        ({"projection": None}, "not among the classes that were tested.*name the modules"),
        ({"lm_head": None}, "has no unembedding.*name the modules"),
        ({"layers": "model.blocks"}, "layers=model.blocks, which is no module of the model: take"),
        ({"layers": "model"}, "no layer at 'model' has a module self_attn.o_proj"),
        ({"projection": "self_attn.v_proj"}, ANOTHER),
        ({"projection": "mlp.gate_proj"}, ANOTHER),
        ({"projection": "mlp.down_proj"}, ANOTHER),
        ({"lm_head": "model.norm"}, "lm_head=model.norm, expected .* 61 logits.*got .32"),
    ],
)
def test_a_name_that_is_wrong_or_left_out_is_refused(unknown, change, message):
    names = {k: v for k, v in (module_paths(NAMES) | change).items() if v is not None}
    with pytest.raises(TypeError, match=message):
        structure_of(unknown, ASMIConfig(structure=names).structure)
