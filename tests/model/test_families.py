"""Every family, checked against full forward passes written in the plainest way."""

import copy
import subprocess
import sys

import pytest
import torch

from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.maths import mutual_information, sample_head_masks
from lm_polygraph_asmi.model import (
    attention_of,
    num_layers,
    response_embeddings,
    run_unmasked,
    scoring_session,
    subnetwork_log_probs,
    target_layer,
)
from tests import brute_force
from tests.conftest import PROMPT_LENGTH
from tests.families import LLAMA_LIKE, PROJECTIONS
from tests.rounding import allowed

LAYER = 2


def masks() -> torch.Tensor:
    return sample_head_masks(9, 4, 0.4, torch.Generator().manual_seed(0))


def full_passes(model, input_ids, prompt_length, layer, scope) -> torch.Tensor:
    projection, axis = PROJECTIONS.get(model.tiny_name, LLAMA_LIKE)
    return brute_force.subnetwork_log_probs(
        model, projection.format(layer=layer), axis, input_ids, prompt_length, masks(), scope
    )


both_scopes = pytest.mark.parametrize("scope", SCOPES)
positions = pytest.mark.parametrize(
    "family_model", ["llama", "gemma3-mixed", "gpt-neox", "gpt2"], indirect=True
)
"""Families that tell positions in different ways: for what depends on nothing else."""


@both_scopes
@pytest.mark.parametrize("layer", [0, LAYER, 3])
def test_suffix_equals_full_passes(family_model, input_ids, layer, scope):
    fast = subnetwork_log_probs(family_model, input_ids, PROMPT_LENGTH, layer, masks(), scope=scope)
    slow = full_passes(family_model, input_ids, PROMPT_LENGTH, layer, scope)
    torch.testing.assert_close(fast, slow, atol=allowed(family_model, input_ids), rtol=0)
    # The test could not fail if masking changed nothing.
    assert (slow - slow[:1]).abs().max() > 1e-2


@both_scopes
def test_suffix_equals_full_passes_under_sdpa(family_model, input_ids, scope):
    if not family_model._supports_sdpa:
        pytest.skip("the class has no SDPA")
    if getattr(family_model.config, "attn_logit_softcapping", None) is not None:
        pytest.skip("SDPA cannot soft-cap attention scores")
    original = attention_of(family_model)
    fast = subnetwork_log_probs(
        family_model, input_ids, PROMPT_LENGTH, LAYER, masks(), scope=scope, attention="sdpa"
    )
    assert attention_of(family_model) == original
    family_model.set_attn_implementation("sdpa")
    try:
        slow = full_passes(family_model, input_ids, PROMPT_LENGTH, LAYER, scope)
    finally:
        family_model.set_attn_implementation(original)
    torch.testing.assert_close(fast, slow, atol=allowed(family_model, input_ids), rtol=0)


@both_scopes
@pytest.mark.parametrize("prompt_length", [1, 16])
def test_short_prompts_and_one_token_responses(family_model, input_ids, prompt_length, scope):
    fast = subnetwork_log_probs(family_model, input_ids, prompt_length, LAYER, masks(), scope=scope)
    slow = full_passes(family_model, input_ids, prompt_length, LAYER, scope)
    assert fast.shape == (9, 17 - prompt_length, 61)
    torch.testing.assert_close(fast, slow, atol=allowed(family_model, input_ids), rtol=0)


@both_scopes
def test_states_after_a_layer(family_model, input_ids, scope):
    """In float64, but for norms and softmax, which transformers computes in float32."""
    model = copy.deepcopy(family_model).double()
    with scoring_session(model):
        found = run_unmasked(model, input_ids, PROMPT_LENGTH, [LAYER, 3], scope)
        plain = model(input_ids=input_ids[None, :-1], output_hidden_states=True).hidden_states
    for layer in (LAYER, 3):
        expected = plain[layer + 1][0, PROMPT_LENGTH - 1 :]
        torch.testing.assert_close(found.after[layer], expected, atol=1e-5, rtol=1e-5)
        assert (expected - plain[layer][0, PROMPT_LENGTH - 1 :]).abs().max() > 1e-2


@positions
def test_a_long_response_to_a_short_prompt(family_model):
    """All masks together are longer than the context window."""
    input_ids = torch.randint(3, 61, (60,), generator=torch.Generator().manual_seed(1))
    fast = subnetwork_log_probs(family_model, input_ids, 3, LAYER, masks(), scope="response")
    slow = full_passes(family_model, input_ids, 3, LAYER, "response")
    torch.testing.assert_close(fast, slow, atol=allowed(family_model, input_ids), rtol=0)


def test_the_scopes_differ(llama, input_ids):
    everywhere, in_response = (
        subnetwork_log_probs(llama, input_ids, PROMPT_LENGTH, 1, masks(), scope=scope)
        for scope in ("all", "response")
    )
    assert (everywhere - in_response).abs().max() > 1e-2


@both_scopes
def test_all_ones_masks_reproduce_the_model(family_model, input_ids, scope):
    log_probs = subnetwork_log_probs(
        family_model, input_ids, PROMPT_LENGTH, LAYER, torch.ones(3, 4), scope=scope
    )
    with torch.no_grad():
        logits = family_model(input_ids=input_ids[None]).logits[0, PROMPT_LENGTH - 1 : -1]
    expected = logits.log_softmax(-1).expand_as(log_probs)
    torch.testing.assert_close(log_probs, expected, atol=allowed(family_model, input_ids), rtol=0)
    assert mutual_information(log_probs, 61).abs().max() < 1e-9


@both_scopes
@positions
def test_one_mask_at_a_time_equals_all_at_once(family_model, input_ids, scope):
    together, alone = (
        subnetwork_log_probs(
            family_model,
            input_ids,
            PROMPT_LENGTH,
            LAYER,
            masks(),
            scope=scope,
            memory_budget=budget,
        )
        for budget in (None, 1)
    )
    torch.testing.assert_close(together, alone, atol=allowed(family_model, input_ids), rtol=0)


def test_response_embeddings_equal_separate_passes(family_model, input_ids):
    family_model = copy.deepcopy(family_model).double()
    responses = [[5], [7, 9, 11, 13, 15, 17, 19], [4, 4], [7, 9], [], [5]]
    prompt = input_ids[:PROMPT_LENGTH]
    with scoring_session(family_model):
        fast = response_embeddings(family_model, prompt, responses)
    middle = num_layers(family_model) // 2
    for row, response in zip(fast, responses, strict=True):
        sequence = torch.cat([prompt, torch.tensor(response, dtype=torch.long)])
        with torch.no_grad():
            states = family_model(input_ids=sequence[None], output_hidden_states=True).hidden_states
        torch.testing.assert_close(row.double(), states[middle][0, -1], atol=1e-5, rtol=1e-5)


def test_a_model_without_heads_is_refused_by_name(input_ids):
    from transformers import MambaConfig, MambaForCausalLM

    mamba = MambaForCausalLM(MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2))
    with pytest.raises(TypeError, match="MambaForCausalLM"):
        subnetwork_log_probs(mamba, input_ids, PROMPT_LENGTH, 1, torch.ones(2, 4))


@pytest.mark.parametrize(
    ("depth", "layers", "expected"),
    [(0.6, 36, 22), (0.6, 32, 19), (0.6, 30, 18), (0.9, 32, 29), (0.99, 4, 3), (0.5, 5, 2)],
)
def test_target_layer(depth, layers, expected):
    assert target_layer(depth, layers) == expected


@pytest.mark.parametrize("depth", [0, 1, -0.1, 60])
def test_depth_outside_the_open_interval(depth):
    with pytest.raises(ValueError, match=r"depth must lie in \(0, 1\)"):
        target_layer(depth, 32)


@pytest.mark.slow
def test_shapes_of_all_modules():
    """Those too that pyproject leaves out because their check takes long."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", __file__]
    everywhere = "--jaxtyping-packages=lm_polygraph_asmi.maths,lm_polygraph_asmi.model,tests.check"
    run = subprocess.run(
        [*command, "-o", f"addopts={everywhere}", "-k", "llama-tied"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout
