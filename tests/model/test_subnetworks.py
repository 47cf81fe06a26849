"""What does not depend on the family: errors, memory, and the model left as it was."""

from functools import partial

import pytest
import torch

from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.maths import sample_head_masks
from lm_polygraph_asmi.model import (
    attention_of,
    check,
    response_embeddings,
    run_subnetworks,
    run_unmasked,
    scoring_session,
    target_layer,
)
from tests import brute_force
from tests.conftest import PROMPT_LENGTH
from tests.decoders import sequence
from tests.families import tiny_model
from tests.rounding import allowed
from tests.subnetworks import subnetwork_log_probs


def masks(num_masks: int = 12) -> torch.Tensor:
    return sample_head_masks(num_masks, 4, 0.4, torch.Generator().manual_seed(0))


class Calls(list):
    """The masks of every call of the fastest passes, of which `most` fit into memory."""

    most = 100

    def __call__(self, own, model, unmasked, layer, chunk):
        self.append(chunk.tolist())
        if len(chunk) > self.most:
            raise torch.OutOfMemoryError("simulated")
        return own(model, unmasked, layer, chunk)


@pytest.fixture
def ran(monkeypatch):
    calls = Calls()
    for scope, name in (("all", "suffix"), ("response", "packed")):
        monkeypatch.setitem(check.PASSES[scope], name, partial(calls, check.PASSES[scope][name]))
    monkeypatch.setattr(check, "packed", check.PASSES["response"]["packed"])  # it has a limit
    return calls


def changed_by_others(model) -> int:
    """Hooks and replaced forward methods."""
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + ("forward" in vars(m))
        for m in model.modules()
    )


def test_equal_masks_are_evaluated_once_and_the_unmasked_not_at_all(llama, input_ids, ran):
    drawn = torch.tensor(
        [[1.0, 1, 1, 1], [0, 1, 1, 1], [1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]]
    )
    with scoring_session(llama):
        unmasked = run_unmasked(llama, input_ids, PROMPT_LENGTH, [2])
        found = run_subnetworks(llama, unmasked, 2, drawn)
    assert sorted(mask for chunk in ran for mask in chunk) == [[0, 1, 1, 1], [1, 1, 0, 1]]
    assert found.counts.sum() == 6
    assert found.counts[found.index].tolist() == [2, 3, 1, 3, 2, 3]
    torch.testing.assert_close(found.hidden[found.index[0]], unmasked.final_hidden)


@pytest.mark.parametrize("scope", SCOPES)
def test_out_of_memory_halves_the_chunk_and_loses_nothing(llama, input_ids, ran, scope):
    def run():
        ran.clear()
        return subnetwork_log_probs(llama, input_ids, PROMPT_LENGTH, 1, masks(), scope=scope)

    whole, ran.most = run(), 2
    torch.testing.assert_close(run(), whole, atol=allowed(llama, input_ids), rtol=0)
    sizes = list(map(len, ran))
    assert sizes[1] == (sizes[0] + 1) // 2 > 2
    # Nothing that succeeded was run again.
    assert sum(size for size in sizes if size <= 2) == len(masks().unique(dim=0))
    assert changed_by_others(llama) == 0
    ran.most = 0
    with pytest.raises(torch.OutOfMemoryError):
        run()


def test_model_is_left_as_found(input_ids):
    model = tiny_model("gemma3-mixed").train()
    model.gradient_checkpointing_enable()
    model.model.layers[1].mlp.eval()
    before = {name: module.training for name, module in model.named_modules()}
    weights = {name: p.clone() for name, p in model.named_parameters()}
    hooks = changed_by_others(model)
    subnetwork_log_probs(model, input_ids, PROMPT_LENGTH, 2, masks(), attention="sdpa")
    assert {name: module.training for name, module in model.named_modules()} == before
    assert attention_of(model) == "eager"
    assert changed_by_others(model) == hooks
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert torch.is_grad_enabled()


def test_model_is_left_as_found_after_an_exception(input_ids, monkeypatch):
    model = tiny_model("llama").train()
    subnetwork_log_probs(model, input_ids, PROMPT_LENGTH, 2, masks())  # known before it fails
    kind = type(model.model.layers[0].mlp)
    own, failing = kind.forward, [3]

    def fail(mlp, *given):
        if any(mlp is model.model.layers[layer].mlp for layer in failing):
            raise RuntimeError("half way")
        return own(mlp, *given)

    monkeypatch.setattr(kind, "forward", fail)
    with pytest.raises(RuntimeError, match="half way"):
        subnetwork_log_probs(model, input_ids, PROMPT_LENGTH, 2, masks(), attention="sdpa")
    assert all(module.training for module in model.modules())
    assert attention_of(model) == "eager"
    assert changed_by_others(model) == 0
    failing[:] = [0]
    with pytest.raises(RuntimeError, match="half way"), scoring_session(model):
        response_embeddings(model, input_ids[:3], [[4]])
    assert changed_by_others(model) == 0


def test_dropout_of_a_training_model_is_off(input_ids):
    model = tiny_model("gpt2", resid_pdrop=0.5, attn_pdrop=0.5).train()
    first = subnetwork_log_probs(model, input_ids, PROMPT_LENGTH, 2, masks())
    assert torch.equal(first, subnetwork_log_probs(model, input_ids, PROMPT_LENGTH, 2, masks()))


@pytest.mark.parametrize("scope", SCOPES)
def test_hooks_of_others_are_part_of_the_model(scope):
    """Steering of heads, layers and their outputs, some of it at positions that the first text,
    which is the one that is checked, does not have: scored as the brute force finds it."""

    def late(_, __, hidden):
        hidden = hidden.clone()
        hidden[:, 18:] += 2
        return hidden

    model = tiny_model("llama")
    texts = sequence(18, seed=18), sequence(21, seed=21)
    most = allowed(model, texts[1])  # before the hooks, to which a cache is no sequence
    layer = model.model.layers[2]
    handles = [
        layer.self_attn.register_forward_hook(lambda *call: (call[-1][0] + 0.3, *call[-1][1:])),
        layer.self_attn.o_proj.register_forward_hook(lambda *call: call[-1] * 1.1),
        layer.mlp.register_forward_hook(lambda *call: call[-1] + 0.2),
        layer.register_forward_hook(late),
        model.model.layers[3].register_forward_pre_hook(lambda _, args: (args[0] - 0.1,)),
    ]
    for prompt, ids in zip((12, 14), texts, strict=True):
        fast = subnetwork_log_probs(model, ids, prompt, 2, masks(3), scope=scope)
        slow = brute_force.subnetwork_log_probs(
            model, "model.layers.2.self_attn.o_proj", 1, ids, prompt, masks(3), scope
        )
        torch.testing.assert_close(fast, slow, atol=most, rtol=0)
    assert changed_by_others(model) == len(handles)


def test_modules_compiled_in_place_are_run_as_written(input_ids):
    """A compiled layer would go on as it was, whatever hook masks its heads."""
    model, ran = tiny_model("llama"), []

    def backend(graph, _):
        return lambda *given: ran.append(1) or graph(*given)

    expected = subnetwork_log_probs(model, input_ids, PROMPT_LENGTH, 2, masks())
    compiled = model.model.layers[2:]
    for layer in compiled:
        layer.compile(backend=backend)
    model(input_ids=input_ids[None])
    assert ran
    ran.clear()
    found = subnetwork_log_probs(model, input_ids, PROMPT_LENGTH, 2, masks())
    assert torch.equal(found, expected)
    assert not ran
    assert all(layer._compiled_call_impl is not None for layer in compiled)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"input_ids": torch.ones(1, 17).long()}, r"one unpadded sequence.*got \(1, 17\)"),
        ({"prompt_length": 17}, "response is empty"),
        ({"prompt_length": 0}, "prompt must have at least one token"),
        ({"input_ids": torch.ones(129).long()}, r"129 tokens long.*context window of 128"),
        ({"input_ids": torch.full((17,), 61)}, r"token ids must lie in \[0, 60\]"),
        ({"layer": -1}, r"layer must be in \[0, 3\].*got -1"),
        ({"layer": 4}, r"layer must be in \[0, 3\].*got 4"),
        ({"scope": "prompt"}, "scope must be one of 'all', 'response', got 'prompt'"),
        ({"masks": torch.ones(3, 2)}, r"shape \(S, H = 4\).*got \(3, 2\)"),
        ({"masks": torch.ones(0, 4)}, r"masks must have shape"),
        ({"masks": torch.full((3, 4), 0.5)}, r"only 1 \(keep\) and 0 \(mask\)"),
    ],
    ids=str,
)
def test_refusals(llama, input_ids, given, said):
    usual = {"input_ids": input_ids, "prompt_length": 11, "layer": 2, "masks": masks()}
    with pytest.raises(ValueError, match=said):
        subnetwork_log_probs(llama, **usual | given)


def test_non_finite_logits_of_one_text(input_ids):
    """Weights that no text fits are seen before any runs: test_odd_decoders.py."""
    model = tiny_model("llama")
    model.model.layers[3].register_forward_hook(
        lambda *call: call[-1] * (float("nan") if call[-1].shape[1] == 16 else 1)
    )
    with pytest.raises(FloatingPointError, match=r"LlamaForCausalLM.*no distribution: NaN"):
        subnetwork_log_probs(model, input_ids, PROMPT_LENGTH, 2, masks())


@pytest.mark.parametrize(
    ("layers", "answers", "said"),
    [(1, [[4]], "at least two layers"), (2, [], "at least one response")],
)
def test_embeddings_that_are_refused(input_ids, layers, answers, said):
    model = tiny_model("gpt2", n_layer=layers)
    with pytest.raises(ValueError, match=said), scoring_session(model):
        response_embeddings(model, input_ids[:3], answers)


def test_long_responses_are_packed_into_several_sequences(llama, input_ids, ran, monkeypatch):
    how = llama, input_ids, PROMPT_LENGTH, 1, masks()
    whole = subnetwork_log_probs(*how, scope="response")
    for packed, expected in ((12, 2), (5, 1)):
        ran.clear()
        monkeypatch.setitem(check.PACKED_POSITIONS, "cpu", packed)
        parts = subnetwork_log_probs(*how, scope="response")
        torch.testing.assert_close(parts, whole, atol=allowed(llama, input_ids), rtol=0)
        assert max(map(len, ran)) == expected


@pytest.mark.parametrize(
    ("depth", "layers", "expected"),
    [(0.6, 36, 22), (0.6, 32, 19), (0.6, 30, 18), (0.9, 32, 29), (0.99, 4, 3), (0.5, 5, 2)],
)
def test_target_layer(depth, layers, expected):
    assert target_layer(depth, layers) == expected
