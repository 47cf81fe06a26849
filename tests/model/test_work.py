"""How much the passes compute and hold, counted rather than timed."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.model import (
    run_subnetworks,
    run_unmasked,
    scoring_session,
)
from lm_polygraph_asmi.model.masked import masks_per_pass
from lm_polygraph_asmi.model.memory import batch_bytes, packed_bytes
from lm_polygraph_asmi.model.passes import packed, suffix
from tests.conftest import PROMPT_LENGTH
from tests.families import tiny_model
from tests.peak_memory import PeakMemory

DRAWN = torch.tensor([[1.0, 1, 1, 1], [0, 1, 1, 1], [1, 1, 0, 1], [0, 1, 1, 1]])
DISTINCT = 2  # of the four: one keeps all heads, one comes twice


def flops(run) -> int:
    """Multiply-adds, attention scores apart."""
    with FlopCounterMode(display=False) as counter:
        run()
    counted = counter.get_flop_counts()["Global"]
    return sum(n for operation, n in counted.items() if "bmm" not in str(operation)) // 2


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("layer", [0, 1, 2, 3])
def test_masked_passes_do_only_what_they_must(llama, input_ids, layer, scope):
    """Layers below the target are not run; in scope `response`, nor positions of the prompt."""
    with scoring_session(llama):
        unmasked = run_unmasked(llama, input_ids, PROMPT_LENGTH, [layer], scope)
        run_subnetworks(llama, unmasked, layer, DRAWN)  # checked from here on
        found = flops(lambda: run_subnetworks(llama, unmasked, layer, DRAWN))
    layers = llama.model.layers
    each = sum(m.weight.numel() for m in layers[0].modules() if isinstance(m, torch.nn.Linear))
    attention = layers[0].self_attn
    before = sum(getattr(attention, f"{name}_proj").weight.numel() for name in "qkv")
    positions, above = (len(input_ids) - 1 if scope == "all" else 6), len(layers) - 1 - layer
    target = DISTINCT * each
    if scope == "all":  # masks act behind the projection's input: what is before runs once
        target -= before
    assert found == positions * (target + DISTINCT * above * each)


def test_several_depths_share_one_unmasked_pass(input_ids, monkeypatch):
    model, calls = tiny_model("llama"), []
    first = model.model.layers[0].mlp
    # A hook would say more: models with hooks are run whole.
    own = type(first).forward
    monkeypatch.setattr(
        type(first), "forward", lambda mlp, x: calls.append(mlp is first) or own(mlp, x)
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
    assert calls.count(True) == 1


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
            way = suffix if scope == "all" else packed
            together = masks_per_pass(model, unmasked, len(masks), 2**60, way)
            with PeakMemory() as prefix_cache:
                way(model, unmasked, 1, masks[:together])
            if scope == "all":
                counted = batch_bytes(model, together, 119)
            else:
                counted = packed_bytes(model, together, 30, 89)
        assert counted / 4 < prefix_cache.peak <= counted, attention


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(("attention", "masks_at_once"), [("eager", 4), ("sdpa", 4)])
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
