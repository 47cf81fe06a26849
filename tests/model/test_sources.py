"""What heads bring from where, against plain loops over heads and positions."""

import copy
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from lm_polygraph_asmi.maths import sample_head_masks
from lm_polygraph_asmi.model import (
    check_spans,
    head_parts,
    run_unmasked,
    scoring_session,
    subnetwork_log_probs,
    sum_parts,
)
from lm_polygraph_asmi.model.layers import decoder_layers, output_projection
from lm_polygraph_asmi.model.sources import _heads_from
from tests import brute_force
from tests.conftest import PROMPT_LENGTH
from tests.families import LLAMA_LIKE, PROJECTIONS, tiny_model
from tests.model.test_kinds import KINDS, apart, sequence
from tests.registry import tiny_class

LAYER = 2
CONTEXT = (3, 8)
REFUSED = {
    "norm inside the heads": "what a head brings is scaled by what all bring together",
    "Mamba hybrid, shared layer": "two layers share the projection: no plain twin",
}
"""Kinds that are not compared, and why."""


def masks() -> torch.Tensor:
    return sample_head_masks(5, 4, 0.4, torch.Generator().manual_seed(2))


def split(model, ids, prompt, layer, spans, attention=None):
    with scoring_session(model, attention):
        unmasked = run_unmasked(model, ids, prompt, [layer], "response")
        return head_parts(model, unmasked, layer, spans), unmasked


@contextmanager
def watched(model, layer):
    """Weights (H, N, N), values (H or fewer, N, d) and heads (N, W) of a layer, once it has run.

    Seen from outside, in three ways: as what the function of eager attention gets and returns, as
    what a method `_attn` does, or as what a cache gets and the attention module returns.
    """
    found = {}
    projection = output_projection(model, layer)
    modules = list(decoder_layers(model)[layer].modules())
    (attention,) = [m for m in modules if any(child is projection for child in m.children())]
    patch = pytest.MonkeyPatch()

    def keep(values, weights):
        found["values"], found["weights"] = values[0].detach(), weights[0].detach()

    namespace = sys.modules[type(attention).__module__]
    if hasattr(namespace, "eager_attention_forward"):
        own = namespace.eager_attention_forward

        def eager(module, query, key, value, *args, **kwargs):
            output, weights = own(module, query, key, value, *args, **kwargs)
            if module is attention:
                keep(value, weights)
            return output, weights

        patch.setattr(namespace, "eager_attention_forward", eager)
    elif hasattr(attention, "_attn"):
        own = attention._attn

        def method(query, key, value, *args):
            if len(args) == 2:  # whether weights are to be returned
                args = (args[0], True)
            output, weights = own(query, key, value, *args)
            keep(value, weights)
            return [output, weights]

        patch.setattr(attention, "_attn", method)

    class Seen(DynamicCache):
        def update(self, key, value, index, *args, **kwargs):
            if index == layer:
                found["cached"] = value
            return super().update(key, value, index, *args, **kwargs)

    def returned(_, __, output):
        if "weights" not in found:
            keep(found["cached"], output[1])

    handles = [
        attention.register_forward_hook(returned),
        projection.register_forward_pre_hook(
            lambda _, args: found.update(heads=args[0].detach()[0])
        ),
    ]
    try:
        found["cache"] = None if hasattr(attention, "_attn") else Seen(config=model.config)
        yield found
    finally:
        patch.undo()
        for handle in handles:
            handle.remove()


def plain_part(model, ids, layer, context):
    """A context's part of the heads (N, W), and of the weights (H, N): loops alone."""
    with torch.no_grad(), watched(model, layer) as found:
        kwargs = {} if found["cache"] is None else {"past_key_values": found["cache"]}
        model(input_ids=ids[None, :-1], use_cache=bool(kwargs), **kwargs)
    weights, values, heads = (found[name] for name in ("weights", "values", "heads"))
    every = range(len(ids) - 1)
    part = brute_force.heads_from(weights, values, range(*context))
    whole = brute_force.heads_from(weights, values, every)
    gate = heads / whole  # of heads that are gated behind the attention; else ones
    mass = weights[:, :, context[0] : context[1]].sum(-1)
    return part * gate, mass, gate


def test_every_family_equals_plain_loops(family_model, input_ids):
    """Parts of the heads, and full forward passes whose masked heads lose them; in float64."""
    model, name = copy.deepcopy(family_model).double(), family_model.tiny_name
    part, mass, gate = plain_part(model, input_ids, LAYER, CONTEXT)
    mass = mass.float()  # as weights are given
    assert (gate - 1).abs().max() < 1e-3
    (found, elsewhere), unmasked = split(model, input_ids, PROMPT_LENGTH, LAYER, [CONTEXT])
    at = unmasked.predicting
    torch.testing.assert_close(found.heads, part[at], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.attention, mass[:, at], atol=1e-5, rtol=0)
    heads = unmasked.targets[LAYER].heads[0, at]
    torch.testing.assert_close(found.heads + elsewhere.heads, heads, atol=1e-5, rtol=1e-5)
    path, _ = PROJECTIONS.get(name, LLAMA_LIKE)
    for source, own in (("context", part), ("elsewhere", heads_of(unmasked, LAYER) - part)):
        fast = subnetwork_log_probs(
            model, input_ids, PROMPT_LENGTH, LAYER, masks(),
            scope="response", source=source, context=CONTEXT,
        )  # fmt: skip
        slow = brute_force.log_probs_without_part(
            model, path.format(layer=LAYER), own, input_ids, PROMPT_LENGTH, masks()
        )
        torch.testing.assert_close(fast, slow, atol=1e-5, rtol=0)


def heads_of(unmasked, layer):
    return unmasked.targets[layer].heads[0]


@pytest.mark.parametrize("name", [name for name in KINDS if name not in REFUSED])
def test_every_kind_equals_plain_loops(name):
    class_name, overrides, layer, projection = KINDS[name]
    model, ids, prompt = tiny_class(class_name, **overrides), sequence(20), 12
    few = masks()[:3]
    part, mass, gate = plain_part(model, ids, layer, CONTEXT)
    assert name.startswith("gated") == bool((gate - 1).abs().max() > 1e-2)
    (found, _), unmasked = split(model, ids, prompt, layer, [CONTEXT])
    at = unmasked.predicting
    scale = part[at].abs().max().item()
    torch.testing.assert_close(found.heads, part[at], atol=1e-5 * max(1, scale), rtol=1e-4)
    torch.testing.assert_close(found.attention, mass[:, at], atol=1e-5, rtol=0)
    fast = subnetwork_log_probs(
        model, ids, prompt, layer, few, scope="response", source="context", context=CONTEXT
    )
    slow = brute_force.log_probs_without_part(
        model, projection.format(layer), part, ids, prompt, few
    )
    assert apart(fast, slow) < 1e-4
    if part[at].any():  # not all of it is outside a window
        assert apart(slow, slow[:1].expand_as(slow)) > 1e-5


def test_a_norm_over_the_heads_is_refused():
    class_name, overrides, layer, _ = KINDS["norm inside the heads"]
    with pytest.raises(RuntimeError, match=r"BitNetForCausalLM, layer 1: heads have no part.*norm"):
        split(tiny_class(class_name, **overrides), sequence(20), 12, layer, [CONTEXT])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_all_is_what_it_was_and_the_whole_sequence_is_all(attention, input_ids):
    model = tiny_model("llama", attention)
    given = model, input_ids, PROMPT_LENGTH, LAYER, masks()
    plain = subnetwork_log_probs(*given, scope="response")
    same = subnetwork_log_probs(*given, scope="response", source="all", context=CONTEXT)
    assert torch.equal(plain, same)
    every = (0, len(input_ids))
    whole = subnetwork_log_probs(*given, scope="response", source="context", context=every)
    torch.testing.assert_close(whole, plain, atol=1e-5, rtol=0)
    part = subnetwork_log_probs(*given, scope="response", source="context", context=CONTEXT)
    assert apart(part, plain) > 1e-2


def test_implementations_of_attention_split_alike(input_ids):
    model = tiny_model("qwen3-qk-norm", "sdpa")
    by_sdpa, _ = split(model, input_ids, PROMPT_LENGTH, LAYER, [CONTEXT], "sdpa")
    by_eager, _ = split(model, input_ids, PROMPT_LENGTH, LAYER, [CONTEXT], "eager")
    for one, other in zip(by_sdpa, by_eager, strict=True):
        torch.testing.assert_close(one.heads, other.heads, atol=1e-5, rtol=0)
        torch.testing.assert_close(one.attention, other.attention, atol=1e-5, rtol=0)


def test_several_spans_are_parts_of_their_union(llama, input_ids):
    several, _ = split(llama, input_ids, PROMPT_LENGTH, LAYER, [(6, 8), (3, 6)])
    single, _ = split(llama, input_ids, PROMPT_LENGTH, LAYER, [(3, 8)])
    *inside, elsewhere = several
    assert len(inside) == 2
    torch.testing.assert_close(sum_parts(inside).heads, single[0].heads, atol=1e-5, rtol=0)
    torch.testing.assert_close(sum_parts(inside).attention, single[0].attention)
    torch.testing.assert_close(elsewhere.heads, single[1].heads, atol=1e-5, rtol=0)


def test_beyond_the_window_there_is_nothing(input_ids):
    model = tiny_model("mistral-window").double()
    parts, _ = split(model, input_ids, PROMPT_LENGTH, LAYER, [(0, 3)])
    assert not parts[0].heads.any()
    assert not parts[0].attention.any()
    found = subnetwork_log_probs(
        model, input_ids, PROMPT_LENGTH, LAYER, masks(),
        scope="response", source="context", context=(0, 3),
    )  # fmt: skip
    ulp = torch.finfo(torch.float32).eps * found.abs().max().item()
    torch.testing.assert_close(found, found[:1].expand_as(found), atol=4 * ulp, rtol=0)


def test_a_sink_takes_its_share():
    class_name, overrides, layer, _ = KINDS["sinks"]
    parts, _ = split(tiny_class(class_name, **overrides), sequence(20), 12, layer, [CONTEXT])
    assert sum_parts(parts).attention.min() < 0.99


def test_the_model_up_to_the_layer_gives_the_same(family_model, input_ids):
    """The way for models whose layers cannot be called one by one."""
    kept = torch.zeros(len(input_ids) - 1, dtype=torch.bool)
    kept[slice(*CONTEXT)] = True
    with scoring_session(family_model):
        unmasked = run_unmasked(family_model, input_ids, PROMPT_LENGTH, [LAYER], "response")
        (one, attention), (other, same) = (
            _heads_from(family_model, unmasked, LAYER, kept, replay) for replay in (True, False)
        )
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(attention, same, atol=1e-5, rtol=0)


def test_a_layer_that_is_another_when_called_alone_is_reached_through_the_model(llama, input_ids):
    expected, unmasked = split(llama, input_ids, PROMPT_LENGTH, LAYER, [CONTEXT])
    target = unmasked.targets[LAYER]
    unmasked.targets[LAYER] = replace(target, hidden=1.5 * target.hidden)
    with scoring_session(llama):
        found = head_parts(llama, unmasked, LAYER, [CONTEXT])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.heads, other.heads, atol=1e-5, rtol=0)


def eager_of(model):
    return sys.modules[type(decoder_layers(model)[0].self_attn).__module__]


def test_attention_that_shows_no_weights_is_refused(llama, input_ids, monkeypatch):
    def hidden(_, query, key, value, mask, scaling, **__):
        key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
        scores = (query @ key.mT * scaling + mask).exp()
        return (scores / scores.sum(-1, keepdim=True) @ value).transpose(1, 2), None

    monkeypatch.setattr(eager_of(llama), "eager_attention_forward", hidden)
    with pytest.raises(TypeError, match=r"LlamaForCausalLM, layer 2: .*no weights over the keys"):
        split(llama, input_ids, PROMPT_LENGTH, LAYER, [CONTEXT])


def test_keys_that_are_no_tokens_are_refused(llama, input_ids, monkeypatch):
    """A sink in front of all keys: sources would add up, but be those of the tokens before."""

    def shifted(_, query, key, value, mask, scaling, **__):
        key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
        scores = query @ key.mT * scaling + mask
        weights = torch.cat([torch.zeros_like(scores[..., :1]), scores], -1).softmax(-1)
        value = torch.cat([torch.ones_like(value[:, :, :1]), value], -2)
        return (weights @ value).transpose(1, 2), weights

    monkeypatch.setattr(eager_of(llama), "eager_attention_forward", shifted)
    with pytest.raises(RuntimeError, match=r"no part that comes from the context"):
        split(llama, input_ids, PROMPT_LENGTH, LAYER, [CONTEXT])
    with pytest.raises(RuntimeError, match=r"no part that comes from the context"):
        split(llama, input_ids, PROMPT_LENGTH, LAYER, [(0, 8)])


def test_half_precision(input_ids):
    exact, _ = split(tiny_model("llama", "sdpa"), input_ids, PROMPT_LENGTH, LAYER, [CONTEXT])
    half = tiny_model("llama", "sdpa").to(torch.bfloat16)
    rough, _ = split(half, input_ids, PROMPT_LENGTH, LAYER, [CONTEXT])
    for one, other in zip(exact, rough, strict=True):
        assert (one.heads - other.heads).norm() < 0.05 * one.heads.norm()


@pytest.mark.parametrize(
    ("context", "message"),
    [
        (None, "needs to know the context"),
        ([], "needs to know the context"),
        ((3, 4, 5), "needs to know the context"),
        ((3.5, 5), "needs to know the context"),
        ((5, 5), r"at least one, got \(5, 5\)"),
        ((12, 18), r"within the 17 tokens.*got \(12, 18\)"),
        ([(3, 8), (7, 9)], "overlap"),
    ],
)
def test_contexts_that_are_none(context, message):
    with pytest.raises(ValueError, match=message):
        check_spans(context, 17)


def test_a_context_that_is_none_is_refused_though_nothing_asks_for_it(llama, input_ids):
    with pytest.raises(ValueError, match="must lie within the"):
        subnetwork_log_probs(llama, input_ids, 5, LAYER, torch.ones(1, 4), context=(3, 400))


def test_a_source_needs_a_context(llama, input_ids):
    with pytest.raises(ValueError, match="needs to know the context"):
        subnetwork_log_probs(
            llama, input_ids, PROMPT_LENGTH, LAYER, masks(), scope="response", source="elsewhere"
        )


def test_spans_in_any_form():
    assert check_spans((3, 8), 17) == [(3, 8)]
    assert check_spans([(9, 11), [3, 8]], 17) == [(9, 11), (3, 8)]
    assert check_spans(torch.tensor([[3, 8]]), 17) == [(3, 8)]


def test_sources_are_for_the_scope_response(llama, input_ids):
    given = llama, input_ids, PROMPT_LENGTH, LAYER, masks()
    with pytest.raises(ValueError, match="source 'context' needs scope 'response'"):
        subnetwork_log_probs(*given, source="context", context=CONTEXT)
    with pytest.raises(ValueError, match="source must be one of 'all', 'context', 'elsewhere'"):
        subnetwork_log_probs(*given, scope="response", source="passage", context=CONTEXT)


def test_adapters_are_part_of_what_heads_bring(input_ids):
    """On values and on the output projection: as with weights into which they were merged."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["v_proj", "o_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(tiny_model("llama"), lora).eval()
    merged = peft.get_peft_model(tiny_model("llama"), lora).eval()
    merged.load_state_dict(adapted.state_dict())
    merged = merged.merge_and_unload()
    given = {"scope": "response", "source": "context", "context": CONTEXT}
    found, expected, plain = (
        subnetwork_log_probs(model, input_ids, PROMPT_LENGTH, LAYER, masks(), **given)
        for model in (adapted, merged, tiny_model("llama"))
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert apart(found, plain) > 1e-2


def test_kernels_that_are_called_without_transformers_interface():
    """Falcon chooses between kernel and loops by itself; with ALiBi these are two models."""
    own = {
        (attention, alibi): split(
            tiny_class("FalconForCausalLM", attention, alibi=alibi), sequence(20), 12, 1, [CONTEXT]
        )
        for attention in ("sdpa", "eager")
        for alibi in (False, True)
    }
    for parts, unmasked in own.values():
        heads = heads_of(unmasked, 1)[unmasked.predicting]
        torch.testing.assert_close(sum_parts(parts).heads, heads, atol=1e-5, rtol=1e-5)
    for one, other in zip(own["sdpa", False][0], own["eager", False][0], strict=True):
        torch.testing.assert_close(one.heads, other.heads, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(one.attention, other.attention, atol=1e-5, rtol=0)
