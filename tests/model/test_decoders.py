"""Every decoder of the table, checked against full forward passes written in the plainest way."""

import copy
from functools import cache

import pytest
import torch

from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.model import attention_of, response_embeddings, scoring_session, structure_of
from lm_polygraph_asmi.model.check import limit, passes_in_use, variation
from tests.decoders import DECODERS, FAMILIES, apart, full_passes, masks, sequence, unchecked
from tests.rounding import allowed
from tests.subnetworks import subnetwork_log_probs

IDS, PROMPT = sequence(17), 11
TWO_KINDS = ("gated indexed attention, hybrid", "gated hybrid mixture")
"""Of which each part is in another kind, too."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.slow if name in TWO_KINDS else ()) for name in DECODERS
    ],
)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def decoder(name):
    return DECODERS[name]


@pytest.fixture(scope="module")
def model(decoder):
    return decoder.make()


@pytest.fixture(scope="module")
def exact(model):
    """In float64, but for norms and softmax, which transformers computes in float32."""
    return copy.deepcopy(model).double()


@pytest.fixture(scope="module")
def truth(decoder, model):
    """Full passes over `IDS`, by scope."""
    return cache(lambda scope: full_passes(decoder, model, IDS, PROMPT, scope))


both_scopes = pytest.mark.parametrize("scope", SCOPES)
families = pytest.mark.parametrize("name", FAMILIES, indirect=True, scope="module")
positions = pytest.mark.parametrize(
    "name", ["llama", "gemma3-mixed", "gpt-neox", "gpt2"], indirect=True, scope="module"
)
"""Families that tell positions in different ways: for what depends on nothing else."""


def assert_equal(found, expected, most):
    """By `most` nats; where it is None, in total variation."""
    if most is None:
        assert apart(found, expected) < 1e-4
    else:
        torch.testing.assert_close(found, expected, atol=most, rtol=0)


def bound(name, model, ids) -> float | None:
    return allowed(model, ids) if name in FAMILIES else None


@both_scopes
def test_masked_passes_equal_full_passes(name, decoder, model, truth, scope):
    """Short before long, since windows set in at some length; by the pass of the table."""
    for ids, prompt in (sequence(4), 2), (IDS, PROMPT):
        with unchecked():
            fast = subnetwork_log_probs(model, ids, prompt, decoder.layer, masks(), scope=scope)
        slow = truth(scope) if ids is IDS else full_passes(decoder, model, ids, prompt, scope)
        assert fast.shape == (len(masks()), len(ids) - prompt, slow.shape[-1])
        assert_equal(fast, slow, bound(name, model, ids))
        # The test could not fail if masking changed nothing.
        assert apart(slow, slow[:1].expand_as(slow)) > 1e-3
    (way,) = passes_in_use(model, scope) or [structure_of(model).passes[scope]]
    assert way == structure_of(model).passes[scope] or "shared keys" in name


@both_scopes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_of_16_bits(name, decoder, dtype, scope):
    """No further from full passes than rounding; float16 in the families alone."""
    if dtype == torch.float16 and name not in FAMILIES:
        pytest.skip("bfloat16 says it")
    model = decoder.make().to(dtype)
    fast = subnetwork_log_probs(model, IDS, PROMPT, decoder.layer, masks(), scope=scope)
    slow = full_passes(decoder, model, IDS, PROMPT, scope)
    assert fast.dtype == torch.float32
    assert variation(fast.flatten(0, 1), slow.flatten(0, 1)) < limit(dtype)
    assert apart(slow, slow[:1].expand_as(slow)) > 2 * limit(dtype)


@positions
@pytest.mark.parametrize(
    ("length", "prompt", "layer", "scope"),
    [
        (17, 1, 0, "all"), (17, 16, 3, "all"), (17, 16, 0, "response"), (17, 1, 3, "response"),
        (60, 3, 2, "response"),  # all masks together are longer than the context window
    ],
)  # fmt: skip
def test_edges_of_lengths_and_layers(decoder, model, length, prompt, layer, scope):
    """Also one mask at a time."""
    ids = sequence(length)
    slow = full_passes(decoder, model, ids, prompt, scope, layer)
    for budget in (None, 1):
        with unchecked():
            fast = subnetwork_log_probs(
                model, ids, prompt, layer, masks(), scope=scope, memory_budget=budget
            )
        torch.testing.assert_close(fast, slow, atol=allowed(model, ids), rtol=0)


@families
@both_scopes
def test_masked_passes_equal_full_passes_under_sdpa(decoder, model, scope):
    if not model._supports_sdpa:
        pytest.skip("the class has no SDPA")
    if getattr(model.config, "attn_logit_softcapping", None) is not None:
        pytest.skip("SDPA cannot soft-cap attention scores")
    original = attention_of(model)
    with unchecked():
        fast = subnetwork_log_probs(
            model, IDS, PROMPT, decoder.layer, masks(), scope=scope, attention="sdpa"
        )
    assert attention_of(model) == original
    model.set_attn_implementation("sdpa")
    try:
        slow = full_passes(decoder, model, IDS, PROMPT, scope)
    finally:
        model.set_attn_implementation(original)
    torch.testing.assert_close(fast, slow, atol=allowed(model, IDS), rtol=0)


def test_embeddings_equal_separate_passes(name, decoder, model, request):
    """Also where a recurrent state comes after the prompt; families in float64."""
    most = 1e-4
    if name in FAMILIES:
        model, most = request.getfixturevalue("exact"), 1e-5
    ids, answers = sequence(11), [[5], [7, 9, 11, 13, 15, 17, 19], [4, 4], [7, 9], [], [5]]
    with scoring_session(model):
        found = response_embeddings(model, ids, answers)
    layers, states = model.get_submodule(decoder.stack), []
    handle = layers[len(layers) // 2].register_forward_pre_hook(
        lambda _, args, kwargs: states.append((args or (kwargs["hidden_states"],))[0][0, -1]),
        with_kwargs=True,
    )
    with torch.no_grad():
        for answer in answers:
            whole = torch.cat([ids, torch.tensor(answer, dtype=torch.long)])[None]
            model(input_ids=whole, use_cache=False)
    handle.remove()
    torch.testing.assert_close(found.double(), torch.stack(states).double(), atol=most, rtol=most)
