"""What is known of a model is forgotten when it changes; sessions leave it as they found it."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from accelerate import cpu_offload
from torch import nn
from transformers import LlamaForCausalLM

from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.model import (
    attention_of,
    check,
    model_lock,
    model_state,
    passes,
    plain_model,
    scoring_session,
    state,
    structure_of,
    unembedding,
)
from lm_polygraph_asmi.results.cache import ResultCache, model_key
from lm_polygraph_asmi.scoring.engine import Engine
from tests.families import tiny_model
from tests.registry import tiny_class
from tests.subnetworks import subnetwork_log_probs

IDS = torch.arange(3, 17)
MASKS = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0]])


def soft_capped(model: nn.Module) -> None:
    model.config.final_logit_softcapping = 0.2


def written_to(model: nn.Module) -> None:
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight[0, 0] += 1


def replaced(model: nn.Module) -> None:
    model.model.layers[1] = copy.deepcopy(model.model.layers[0])


def hooked(model: nn.Module) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda *call: call[-1] * 1.2)


def otherwise_active(model: nn.Module) -> None:
    model.model.layers[1].mlp.act_fn = nn.Tanh()


def patched(model: nn.Module) -> None:
    own = model.lm_head.forward
    model.lm_head.forward = lambda states: own(states) * 2


@pytest.mark.parametrize("change", [soft_capped, written_to, replaced, otherwise_active])
def test_values_count_in_the_state_and_in_the_key(change):
    model = tiny_model("llama")
    before, key = model_state(model), model_key(model)
    change(model)
    assert model_state(model) != before
    assert model_key(model) != key


@pytest.mark.parametrize("change", [hooked, patched])
def test_what_others_compute_is_neither_kept_nor_found(change, tmp_path, caplog):
    model = tiny_model("llama")
    result_cache, before = ResultCache(tmp_path), model_state(model)
    result_cache.put(model_key(model), "without")
    change(model)
    assert model_state(model) != before
    for _ in range(2):
        key = model_key(model)
        assert result_cache.get(key) is None
        result_cache.put(key, "with")
    assert result_cache.get(key) is None
    assert result_cache.get(model_key(tiny_model("llama"))) == "without"
    assert caplog.text.count("the result cache is not used") == 1


def test_hooks_and_weights_exchanged_are_others():
    """The second one may get the `id` and the memory of the first."""
    model, seen = tiny_model("llama"), set()
    layer = model.model.layers[3].mlp.down_proj
    for turn in range(8):
        handle = model.model.register_forward_hook(lambda *call: call[-1])
        seen.add(model_state(model))
        handle.remove()
        layer.weight = nn.Parameter(layer.weight.detach() * 1.1)
        seen.add(model_state(model))
        assert len(seen) == 2 * turn + 2


def test_weights_loaded_in_inference_mode_count_as_written_to(tmp_path):
    """They have no version counter that would tell."""
    with torch.inference_mode():
        model = tiny_model("gpt2")
    engine, prompt = Engine(num_masks=4, mask_rate=0.4, result_cache=str(tmp_path)), IDS[:9]

    def likelihood() -> list[float]:
        return engine.score(model, prompt, [5, 6])[0].log_likelihood.tolist()

    before = likelihood()
    assert likelihood() == before
    with torch.inference_mode():
        model.transformer.ln_f.weight.mul_(0.5)
    assert likelihood() != before


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("rope", [None, "dynamic"])
def test_passes_change_no_state(offloaded, rope):
    angles = {"rope_type": rope, "factor": 2.0, "rope_theta": 100.0}
    own = {} if rope is None else {"rope_parameters": angles, "max_position_embeddings": 8}
    model = tiny_model("llama", **own)
    if offloaded:
        cpu_offload(model, torch.device("cpu"))
    model.eval()
    seen = {"output_hidden_states": True, "output_attentions": True}
    model(input_ids=IDS[None], **seen)  # transformers leaves hooks that record
    before, key = model_state(model), model_key(model)
    assert key["revision"] is not None
    model(input_ids=IDS[None], **seen)
    if rope is None:
        subnetwork_log_probs(model, IDS, 9, 2, torch.tensor([[1, 0, 1, 1]]))
    assert model_state(model) == before
    assert model_key(model) == key


def test_model_objects_that_share_modules_share_the_lock():
    model = tiny_model("llama")
    other = LlamaForCausalLM(copy.deepcopy(model.config))
    assert model_lock(other) is not model_lock(model)
    other.model = model.model
    assert model_lock(other) is model_lock(model) is model_lock(model.model)


def test_autocast_around_a_call_changes_nothing():
    model = tiny_model("llama")
    expected = subnetwork_log_probs(model, IDS, 9, 2, MASKS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(subnetwork_log_probs(model, IDS, 9, 2, MASKS), expected)
        with scoring_session(model):
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")


def lora(**settings: object) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    own = {"r": 4, "target_modules": ["lm_head"], "init_lora_weights": False} | settings
    config, model = peft.LoraConfig(task_type="CAUSAL_LM", **own), tiny_model("llama")
    model.lm_head.bias = nn.Parameter(torch.ones(61))  # no part of the unembedding
    return peft.get_peft_model(model, config).eval()


def test_the_scaling_of_an_adapter_counts():
    whole = lora(lora_alpha=4)
    weak, strong = plain_model(whole), plain_model(lora(lora_alpha=32))
    before, key = model_state(weak), model_key(weak)
    assert key != model_key(strong)
    assert key == model_key(plain_model(lora(lora_alpha=4)))
    with whole.disable_adapter():
        assert model_state(weak) != before
        assert model_key(weak) != key
    assert not torch.allclose(unembedding(weak), unembedding(strong))
    weak.lm_head.set_scale("default", 8)
    torch.testing.assert_close(unembedding(weak), unembedding(strong))


@pytest.mark.parametrize(
    "more", [{}, {"use_rslora": True}, {"target_modules": ["q_proj"]}, {"use_dora": True}]
)
def test_the_unembedding_has_the_adapters_part(more):
    """As the merged weights have it; DoRA's is not added but computed anew."""
    model = lora(lora_alpha=16, **more)
    found = unembedding(plain_model(model))
    with model.disable_adapter():
        bare = unembedding(plain_model(model))
    torch.testing.assert_close(bare, tiny_model("llama").lm_head.weight.detach())
    assert torch.equal(found, bare) == ("target_modules" in more)
    merged = unembedding(model.merge_and_unload())
    torch.testing.assert_close(found, merged, atol=1e-5, rtol=1e-4)


def test_alora_is_refused_by_name():
    with pytest.raises(TypeError, match="aLoRA"):
        plain_model(lora(target_modules=["q_proj"], alora_invocation_tokens=[3, 4]))


def test_threads_wait_for_one_another():
    """Two attention implementations, two scopes: each result is that of a thread alone."""
    model = tiny_model("llama")
    how = [{"scope": scope, "attention": a} for scope in SCOPES for a in ("eager", "sdpa")]
    expected = [subnetwork_log_probs(model, IDS, 9, 1, MASKS, **h) for h in how]
    wrong = []

    def work(which: int) -> None:
        for turn in range(8):
            place = (which + turn) % len(how)
            found = subnetwork_log_probs(model, IDS, 9, 1, MASKS, **how[place])
            if not torch.equal(found, expected[place]):
                wrong.append(how[place])

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, range(3)))  # raises what a thread raised
    assert not wrong
    assert attention_of(model) == "eager"


@pytest.mark.parametrize("scope", SCOPES)
def test_in_the_middle_of_a_masked_pass_other_threads_run_the_plain_model(scope, monkeypatch):
    model, by_head, seen = tiny_model("llama"), passes.by_head, []
    plain = model(input_ids=IDS[None]).logits

    def interrupted(*how):
        with ThreadPoolExecutor(1) as other:
            seen.append(other.submit(model, input_ids=IDS[None]).result().logits)
        return by_head(*how)

    monkeypatch.setattr(passes, "by_head", interrupted)
    subnetwork_log_probs(model, IDS, 9, 2, MASKS, scope=scope)
    for logits in seen:
        torch.testing.assert_close(logits, plain, atol=1e-5, rtol=0)
    assert check.passes_in_use(model, scope) == [next(iter(check.PASSES[scope]))]


def test_a_vision_part_keeps_its_attention():
    model = tiny_class("Gemma3ForConditionalGeneration")
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    vision, text = model.config.vision_config, model.config.text_config
    for of_vision in ("sdpa", "eager", "eager"):  # the last switch goes without transformers
        vision._attn_implementation_internal = of_vision
        with scoring_session(model, "sdpa"):
            assert (vision._attn_implementation, text._attn_implementation) == (of_vision, "sdpa")
        assert (vision._attn_implementation, text._attn_implementation) == (of_vision, "eager")


def test_sessions_may_be_nested():
    model = tiny_model("llama").train()
    copied = model.model.layers[1] = copy.deepcopy(model.model.layers[1])  # with a configuration
    with scoring_session(model, "sdpa"):
        assert copied.self_attn.config._attn_implementation == "sdpa"
        with scoring_session(model):  # the model's own
            assert attention_of(model) == "eager"
        assert attention_of(model) == "sdpa"
        with scoring_session(model, "sdpa"):
            assert not model.training
        assert not model.training
    assert attention_of(model) == copied.self_attn.config._attn_implementation == "eager"
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("change", [replaced, hooked, otherwise_active, patched])
def test_what_is_known_of_a_model_is_found_anew_when_it_changes(change):
    """The first score leaves a structure and a checked pass behind; the second is right, too."""
    model = tiny_model("llama")
    before = subnetwork_log_probs(model, IDS, 9, 2, MASKS)
    known, found = state.known_values(model), structure_of(model)
    change(model)
    after = subnetwork_log_probs(model, IDS, 9, 2, MASKS)
    assert state.known_values(model) is not known
    assert structure_of(model) is not found
    other = tiny_model("llama")
    change(other)
    assert torch.equal(after, subnetwork_log_probs(other, IDS, 9, 2, MASKS))
    assert (after - before).abs().max() > 1e-2
