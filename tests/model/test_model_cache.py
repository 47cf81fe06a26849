"""What is remembered of a model is forgotten when anything it computes with changes."""

import copy
import functools
import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from torch import nn
from transformers import LlamaForCausalLM

from lm_polygraph_asmi.model import (
    model_cache,
    model_lock,
    model_state,
    plain_model,
    scoring_session,
    subnetwork_log_probs,
    unembedding,
)
from lm_polygraph_asmi.results.cache import ResultCache, model_key
from lm_polygraph_asmi.scoring.engine import Engine
from tests.families import tiny_model
from tests.registry import tiny_class

IDS = torch.arange(3, 17)


def scaled(model: nn.Module) -> None:
    model.model.layers[1].self_attn.scaling *= 3


def soft_capped(model: nn.Module) -> None:
    model.config.final_logit_softcapping = 0.2


def slower(model: nn.Module) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.25)


def hooked(model: nn.Module) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda *call: call[-1] * 1.2)


def hooked_before(model: nn.Module) -> None:
    model.lm_head.register_forward_pre_hook(lambda _, given: (given[0] * 1.2,))


def otherwise_active(model: nn.Module) -> None:
    model.model.layers[1].mlp.act_fn = nn.Tanh()


def by_another_function(model: nn.Module) -> None:
    model.model.layers[1].mlp.act_fn.act = torch.tanh


def named_with_an_underscore(model: nn.Module) -> None:
    model.model.layers[1].mlp._scale = 3.0


def by_a_nameless_function(model: nn.Module) -> None:
    model.lm_head.activation = lambda x: x * 2


def patched(model: nn.Module) -> None:
    own = model.lm_head.forward
    model.lm_head.forward = lambda states: own(states) * 2


@pytest.mark.parametrize(
    "change",
    [
        scaled,
        soft_capped,
        slower,
        otherwise_active,
        by_another_function,
        named_with_an_underscore,
    ],
)
def test_values_count_in_the_state_and_in_the_key(change: Callable[[nn.Module], None]):
    model = tiny_model("llama")
    state, key = model_state(model), model_key(model)
    change(model)
    assert model_state(model) != state
    assert model_key(model) != key


@pytest.mark.parametrize("change", [hooked, hooked_before, patched, by_a_nameless_function])
def test_what_others_compute_is_neither_kept_nor_found(
    change: Callable[[nn.Module], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    model = tiny_model("llama")
    result_cache, state = ResultCache(tmp_path), model_state(model)
    result_cache.put(model_key(model), "without")
    change(model)
    assert model_state(model) != state
    for _ in range(2):
        key = model_key(model)
        assert result_cache.get(key) is None
        result_cache.put(key, "with")
    assert result_cache.get(key) is None
    assert result_cache.get(model_key(tiny_model("llama"))) == "without"
    assert caplog.text.count("the result cache is not used") == 1


def test_weights_exchanged_twice_are_others():
    """The second one may get the `id` and the memory of the first."""
    model = tiny_model("llama")
    layer = model.model.layers[3].mlp.down_proj
    seen = set()
    for turn in range(20):
        layer.weight = nn.Parameter(layer.weight.detach() * 1.1)
        seen.add(model_state(model))
        assert len(seen) == turn + 1


def test_weights_that_get_the_place_of_earlier_ones_are_others():
    """As those of a model that was rounded to 16 bits and back may."""
    layer, place = nn.Linear(4, 4), np.ones((4, 4), dtype=np.float32)
    layer.weight.data = torch.from_numpy(place)
    state = model_state(layer)
    layer.weight.data = torch.zeros(4, 4)
    place *= 2
    layer.weight.data = torch.from_numpy(place)
    assert model_state(layer) != state


def test_what_is_known_of_tensors_and_storages_is_forgotten_with_them():
    gc.collect()
    known = len(model_cache._SERIALS)
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(200)])
    model_state(model)
    assert len(model_cache._SERIALS) > known + 1000  # modules, weights, biases and their storages
    del model
    gc.collect()
    assert len(model_cache._SERIALS) < known + 200


def test_weights_loaded_in_inference_mode_count_as_written_to(tmp_path: Path):
    """They have no version counter that would tell."""
    with torch.inference_mode():
        model = tiny_model("gpt2")
    engine, prompt = Engine(num_masks=4, mask_rate=0.4, result_cache=str(tmp_path)), IDS[:9]

    def likelihood() -> list[float]:
        return engine.score(model, prompt, [5, 6]).log_likelihood.tolist()

    before = likelihood()
    assert likelihood() == before
    with torch.inference_mode():
        model.transformer.ln_f.weight.mul_(0.5)
    assert likelihood() != before


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("rope", [None, "dynamic"])
def test_passes_change_no_state(offloaded: bool, rope: str | None):
    own = {} if rope is None else {"rope_parameters": {
        "rope_type": rope, "factor": 2.0, "rope_theta": 100.0,
    }, "max_position_embeddings": 8}  # fmt: skip
    model = tiny_model("llama", **own)
    if offloaded:
        cpu_offload(model, torch.device("cpu"))
    model.eval()
    state, key = model_state(model), model_key(model)
    assert key["model"] is not None
    model(input_ids=IDS[None], output_hidden_states=True, output_attentions=True)
    if rope is None:
        subnetwork_log_probs(model, IDS, 9, 2, torch.tensor([[1, 0, 1, 1]]))
    assert model_state(model) == state
    assert model_key(model) == key


def test_recurrent_states_are_no_values():
    model = tiny_class("RecurrentGemmaForCausalLM").eval()
    state, key = model_state(model), model_key(model)
    model(input_ids=IDS[None])
    assert model_state(model) == state
    assert model_key(model) == key


def test_a_forward_method_under_accelerates_is_seen():
    model = tiny_model("llama")
    patched(model)
    model = cpu_offload(model, torch.device("cpu"))
    assert model_key(model)["model"] is None
    model = cpu_offload(tiny_model("llama"), torch.device("cpu"))
    model.lm_head.forward = functools.partial(lambda states: states)
    assert model_key(model)["model"] is None


def test_model_objects_that_share_modules_share_the_lock():
    model = tiny_model("llama")
    other = LlamaForCausalLM(copy.deepcopy(model.config))
    assert model_lock(other) is not model_lock(model)
    other.model = model.model
    assert model_lock(other) is model_lock(model) is model_lock(model.model)


def test_autocast_around_a_call_changes_nothing():
    model = tiny_model("llama")
    masks = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0]])
    expected = subnetwork_log_probs(model, IDS, 9, 2, masks)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(subnetwork_log_probs(model, IDS, 9, 2, masks), expected)
        with scoring_session(model):
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")


def lora(**settings: object) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    own = {"r": 4, "target_modules": ["lm_head"], "init_lora_weights": False} | settings
    config = peft.LoraConfig(task_type="CAUSAL_LM", **own)
    return peft.get_peft_model(tiny_model("llama"), config).eval()


def test_the_scaling_of_an_adapter_counts():
    weak, strong = (plain_model(lora(lora_alpha=alpha)) for alpha in (4, 32))
    assert model_key(weak) != model_key(strong)
    assert model_key(weak) == model_key(plain_model(lora(lora_alpha=4)))
    state, key = model_state(weak), model_key(weak)
    weak.lm_head.scaling["default"] *= 0.1
    assert model_state(weak) != state
    assert model_key(weak) != key


@pytest.mark.parametrize("more", [{}, {"use_rslora": True}, {"target_modules": ["q_proj"]}])
def test_the_unembedding_has_the_adapters_part(more: dict):
    model = lora(lora_alpha=16, **more)
    found = unembedding(plain_model(model))
    with model.disable_adapter():
        bare = unembedding(plain_model(model))
    torch.testing.assert_close(bare, tiny_model("llama").lm_head.weight.detach())
    assert torch.equal(found, bare) == ("target_modules" in more)
    model.merge_adapter()
    torch.testing.assert_close(unembedding(plain_model(model)), found)
    model.unmerge_adapter()
    merged = model.merge_and_unload()
    torch.testing.assert_close(unembedding(merged), found)


def test_other_adapters_of_the_unembedding_are_refused():
    with pytest.raises(TypeError, match="merge the adapter first"):
        unembedding(plain_model(lora(use_dora=True)))


def test_alora_is_refused_by_name():
    with pytest.raises(TypeError, match="aLoRA"):
        plain_model(lora(target_modules=["q_proj"], alora_invocation_tokens=[3, 4]))


def test_modules_of_another_class_are_another_model():
    one, other = tiny_model("llama"), tiny_model("llama")
    for model, kind in ((one, nn.Sigmoid), (other, nn.Tanh)):
        model.model.layers[1].mlp.act_fn = kind()
    assert model_key(one) != model_key(other)
