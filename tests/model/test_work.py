"""How much the passes compute and hold, counted rather than timed."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.model import (
    num_layers,
    run_subnetworks,
    run_unmasked,
    scoring_session,
)
from lm_polygraph_asmi.model.memory import batch_bytes, packed_bytes
from lm_polygraph_asmi.model.subnetworks import masks_per_pass
from lm_polygraph_asmi.model.suffix import run_suffix
from tests.conftest import PROMPT_LENGTH
from tests.families import SIZES, tiny_model
from tests.peak_memory import PeakMemory

D, W, KV, MLP = 32, 32, 16, 48
QUERY, KEY_VALUE, OUTPUT, GATED_MLP = D * W, 2 * D * KV, W * D, 3 * D * MLP
N, T = 16, 6
DRAWN = torch.tensor([[1.0, 1, 1, 1], [0, 1, 1, 1], [1, 1, 0, 1], [0, 1, 1, 1]])
DISTINCT = 2  # of the four: one keeps all heads, one comes twice


def test_the_sizes_counted_with_are_those_of_the_tiny_llama():
    assert (SIZES["hidden_size"], SIZES["intermediate_size"]) == (D, MLP)
    assert SIZES["num_key_value_heads"] * (D // SIZES["num_attention_heads"]) == KV


def flops(model, input_ids, layer, scope) -> int:
    """Multiply-adds of the masked passes alone, attention scores apart."""
    with scoring_session(model):
        unmasked = run_unmasked(model, input_ids, PROMPT_LENGTH, [layer], scope)
        run_subnetworks(model, unmasked, layer, DRAWN)  # checked from here on
        with FlopCounterMode(display=False) as counter:
            run_subnetworks(model, unmasked, layer, DRAWN)
    counted = counter.get_flop_counts()["Global"]
    return sum(n for operation, n in counted.items() if "bmm" not in str(operation)) // 2


@pytest.mark.parametrize("layer", [0, 1, 2, 3])
def test_exact_scope_does_only_what_it_must(llama, input_ids, layer):
    whole_layers = num_layers(llama) - 2 - layer
    each_position = OUTPUT + GATED_MLP  # the target layer's attention is not run again
    each_position += whole_layers * (QUERY + KEY_VALUE + OUTPUT + GATED_MLP)
    each_position += KEY_VALUE  # of the last layer
    each_response_position = QUERY + OUTPUT + GATED_MLP
    if layer == 3:
        each_position, each_response_position = 0, OUTPUT + GATED_MLP
    expected = DISTINCT * (N * each_position + T * each_response_position)
    assert flops(llama, input_ids, layer, "all") == expected


@pytest.mark.parametrize("layer", [0, 1, 2, 3])
def test_response_scope_runs_response_positions_alone(llama, input_ids, layer):
    above = num_layers(llama) - 1 - layer
    each = OUTPUT + GATED_MLP + above * (QUERY + KEY_VALUE + OUTPUT + GATED_MLP)
    assert flops(llama, input_ids, layer, "response") == DISTINCT * T * each


def test_several_depths_share_one_unmasked_pass(input_ids, monkeypatch):
    model, calls = tiny_model("llama"), []
    # A hook would say more: models with hooks are run whole.
    own = torch.nn.Embedding.forward
    monkeypatch.setattr(
        torch.nn.Embedding, "forward", lambda *given: calls.append(1) or own(*given)
    )
    with scoring_session(model):
        unmasked = run_unmasked(model, input_ids, PROMPT_LENGTH, [1, 2])
        for layer in (1, 2):
            run_subnetworks(model, unmasked, layer, DRAWN)  # checked from here on
    calls.clear()
    with scoring_session(model):
        unmasked = run_unmasked(model, input_ids, PROMPT_LENGTH, [1, 2])
        for layer in (1, 2):
            run_subnetworks(model, unmasked, layer, DRAWN)
    assert len(calls) == 1


def test_the_memory_count_counts():
    with PeakMemory() as prefix_cache:
        ones = torch.ones(1000)
        twos = ones + 1
        del ones
        view = twos[:10]
        del twos
        assert (prefix_cache.live, prefix_cache.peak) == (4000, 8000)
        del view
        assert prefix_cache.live == 0


def has_fused_attention(dtype: torch.dtype) -> bool:
    """False where PyTorch's kernel needs instructions that `ATEN_CPU_CAPABILITY` rules out."""
    states = torch.ones(1, 4, 120, 16, dtype=dtype)
    try:
        torch.nn.functional.scaled_dot_product_attention(states, states, states, is_causal=True)
    except RuntimeError:  # "pack_vnni2 is only supported when avx512 is supported"
        return False
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scope", SCOPES)
def test_the_count_of_bytes_covers_every_family(family_model, scope, dtype):
    single = dtype == torch.float32
    if not single and family_model.tiny_name != "llama":
        pytest.skip("the size of a number is that of every family")
    input_ids = torch.randint(3, 61, (120,), generator=torch.Generator().manual_seed(1))
    model = family_model if single else tiny_model(family_model.tiny_name).to(dtype)
    masks = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 4)[:4]
    for attention in ("eager", "sdpa"):
        refused = family_model.tiny_name != "llama" or not has_fused_attention(dtype)
        if attention == "sdpa" and refused:  # by the kernel that all share
            continue
        with scoring_session(model, attention):
            unmasked = run_unmasked(model, input_ids, 90, [1], scope)
            together = masks_per_pass(model, unmasked, len(masks), 2**60)
            with PeakMemory() as prefix_cache:
                run_suffix(model, unmasked, 1, masks[:together])
            if scope == "all":
                counted = batch_bytes(model, together, 119)
            else:
                counted = packed_bytes(model, together, 30, 89)
        assert counted / 4 < prefix_cache.peak <= counted, attention


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(("attention", "masks_at_once"), [("eager", 4), ("sdpa", 1)])
@pytest.mark.parametrize("prompt", [400, pytest.param(2000, marks=pytest.mark.slow)])
def test_peak_memory_stays_inside_the_budget(prompt, scope, attention, masks_at_once):
    """A long prompt, six masks, and a budget for one or four of them at once."""
    model = tiny_model("llama", attention, max_position_embeddings=4096)
    response = 30
    input_ids = torch.randint(3, 61, (prompt + response,))
    masks = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 4)[:6]
    if scope == "all":
        budget = batch_bytes(model, masks_at_once, prompt + response - 1)
    else:
        budget = packed_bytes(model, masks_at_once, response, prompt - 1)
    with scoring_session(model):
        unmasked = run_unmasked(model, input_ids, prompt, [1], scope)
        run_subnetworks(model, unmasked, 1, masks, memory_budget=budget)  # checked from here on
        with PeakMemory() as prefix_cache:
            run_subnetworks(model, unmasked, 1, masks, memory_budget=budget)
    # Used, and not exceeded.
    assert budget / 2 < prefix_cache.peak <= budget
