"""While a model is scored it is in one state for one thread; then it is as it was."""

import copy
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.core.identity import model_key
from lm_polygraph_asmi.core.model import (
    attention_of,
    model_lock,
    scoring_session,
    start,
)
from tests.families import masks, sequence, subnetwork_log_probs, tiny_class, tiny_model

IDS = sequence(14)


def score(model: nn.Module, **how: str) -> Tensor:
    return subnetwork_log_probs(model, IDS, 9, 2, masks(), **how)


def test_model_objects_that_share_modules_share_the_lock():
    model = tiny_model("llama")
    other = LlamaForCausalLM(copy.deepcopy(model.config))
    assert model_lock(other) is not model_lock(model)
    other.model = model.model
    assert model_lock(other) is model_lock(model) is model_lock(model.model)


def test_autocast_around_a_call_changes_nothing():
    model = tiny_model("llama")
    expected = score(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(score(model), expected)
        assert torch.is_autocast_enabled("cpu")


def test_threads_wait_for_one_another():
    model = tiny_model("llama")
    how = [{"scope": scope, "attention": a} for scope in SCOPES for a in ("eager", "sdpa")]
    expected = [score(model, **h) for h in how]
    with ThreadPoolExecutor(3) as threads:
        found = [*threads.map(lambda turn: score(model, **how[turn % 4]), range(12))]
    assert [torch.equal(of, expected[turn % 4]) for turn, of in enumerate(found)] == [True] * 12
    assert attention_of(model) == "eager"


def test_what_a_masked_pass_replaces_is_no_code_of_others(monkeypatch):
    """Of which a model would have no key, for a thread that asks meanwhile."""
    model, by_head, seen = tiny_model("llama"), start.by_head, []
    monkeypatch.setattr(
        start, "by_head", lambda *how: seen.append(model_key(model)["revision"]) or by_head(*how)
    )
    score(model)
    assert seen
    assert None not in seen


def test_a_vision_part_keeps_its_attention():
    model = tiny_class("Gemma3ForConditionalGeneration")
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    vision, _ = parts = model.config.vision_config, model.config.text_config
    for of_vision in ("sdpa", "eager", "eager"):  # the last switch goes without transformers
        vision._attn_implementation_internal = of_vision
        with scoring_session(model, "sdpa"):
            assert [part._attn_implementation for part in parts] == [of_vision, "sdpa"]
        assert [part._attn_implementation for part in parts] == [of_vision, "eager"]


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
