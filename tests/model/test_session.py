"""While a model is scored it is in one state for one thread; then it is as it was."""

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.core.identity import model_key
from lm_polygraph_asmi.core.model import (
    attention_of,
    choice,
    model_lock,
    response_embeddings,
    scoring_session,
    session,
    start,
)
from tests.families import masks, of_model, sequence, subnetwork_log_probs, tiny_class, tiny_model

IDS = sequence(14)


def score(model: nn.Module, **how: str) -> Tensor:
    return subnetwork_log_probs(model, IDS, 9, 2, masks(), **how)


def found_in(model: nn.Module) -> dict[str, object]:
    """What a session may change, part by part; weights as copies."""
    parts = {
        name: (m.training, *m._forward_hooks, *m._forward_pre_hooks, "forward" in vars(m))
        for name, m in model.named_modules()
    }
    weights = {name: p.flatten().tolist() for name, p in model.named_parameters()}
    return parts | weights | {"attention": attention_of(model), "grad": torch.is_grad_enabled()}


@pytest.mark.parametrize("failing", [None, 3, 0])
def test_a_model_is_left_as_found(failing, monkeypatch):
    """Also after an error above the layer that is masked, or below the middle."""
    model = tiny_model("gemma3-mixed").train()
    model.gradient_checkpointing_enable()
    model.model.layers[1].mlp.eval()
    before, kind = found_in(model), type(model.model.layers[0].mlp)
    score(model)  # known before it fails
    own = kind.forward

    def fail(mlp, *given):
        if failing is not None and mlp is model.model.layers[failing].mlp:
            raise RuntimeError("half way")
        return own(mlp, *given)

    embed = partial(of_model, response_embeddings, model, IDS[:3], [[4]])
    monkeypatch.setattr(kind, "forward", fail)
    for run, runs in ((partial(score, model, attention="sdpa"), (0, 3)), (embed, (0,))):
        raised = pytest.raises(RuntimeError, match="half way") if failing in runs else nullcontext()
        with raised:
            run()
        assert found_in(model) == before


@pytest.mark.parametrize("failing", [False, True])
def test_a_change_inside_a_session_is_an_error_and_the_cause_of_others(failing):
    model = tiny_model("llama")

    def run() -> None:
        with scoring_session(model):
            model.lm_head.weight.mul_(1.01)
            assert not failing, "by chance"

    with pytest.raises(session.ModelChanged, match="weights") as raised:
        run()
    assert isinstance(raised.value.__cause__, AssertionError) == failing


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
        with scoring_session(model):
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")


def test_threads_wait_for_one_another():
    model = tiny_model("llama")
    how = [{"scope": scope, "attention": a} for scope in SCOPES for a in ("eager", "sdpa")]
    expected = [score(model, **h) for h in how]
    with ThreadPoolExecutor(3) as threads:
        found = [*threads.map(lambda turn: score(model, **how[turn % 4]), range(8))]
    assert [torch.equal(of, expected[turn % 4]) for turn, of in enumerate(found)] == [True] * 8
    assert attention_of(model) == "eager"


@pytest.mark.parametrize("scope", SCOPES)
def test_in_the_middle_of_a_masked_pass_other_threads_run_the_plain_model(scope, monkeypatch):
    model, by_head, seen = tiny_model("llama"), start.by_head, []
    plain = model(input_ids=IDS[None]).logits

    def interrupted(*how):
        with ThreadPoolExecutor(1) as other:
            seen.append(other.submit(model, input_ids=IDS[None]).result().logits)
        assert model_key(model)["revision"]  # what is replaced here is no code of others
        return by_head(*how)

    monkeypatch.setattr(start, "by_head", interrupted)
    score(model, scope=scope)
    assert seen
    torch.testing.assert_close(seen, [plain] * len(seen), atol=1e-5, rtol=0)
    assert of_model(choice.passes_in_use, model, scope) == [next(iter(choice.PASSES[scope]))]


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
