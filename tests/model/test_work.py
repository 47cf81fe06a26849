"""How much the passes compute and hold, counted rather than timed."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.model import run_subnetworks, run_unmasked, scoring_session
from lm_polygraph_asmi.model.memory import batch_bytes
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
    expected = positions * (target + DISTINCT * above * each)
    if scope == "all" and above:  # behind attention, the last layer runs where answers are read
        expected -= (positions - 6) * DISTINCT * (each - before)
    assert found == expected


def test_several_depths_share_one_unmasked_pass(llama, input_ids):
    def run(layers):
        unmasked = run_unmasked(llama, input_ids, PROMPT_LENGTH, layers)
        for layer in layers:
            run_subnetworks(llama, unmasked, layer, DRAWN)

    with scoring_session(llama):
        run([1, 2])  # checked from here on
        alone, both = flops(lambda: (run([1]), run([2]))), flops(lambda: run([1, 2]))
        whole = flops(lambda: run_unmasked(llama, input_ids, PROMPT_LENGTH, [1]))
    assert alone - both == whole > 0


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("prompt", "response"),
    [(400, 30), (40, 60), pytest.param(2000, 30, marks=pytest.mark.slow)],
)
def test_peak_memory_stays_inside_the_budget(prompt, response, scope, attention):
    """Six masks, and a budget for four of them at once."""
    model = tiny_model("llama", attention, max_position_embeddings=4096)
    input_ids = torch.randint(3, 61, (prompt + response,))
    masks = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 4)[:6]
    if scope == "all":
        budget = batch_bytes(model, 4, prompt + response - 1)
    else:
        budget = batch_bytes(model, 4, response, prompt - 1, packed=True)
    with scoring_session(model):
        unmasked = run_unmasked(model, input_ids, prompt, [1], scope)
        run_subnetworks(model, unmasked, 1, masks, memory_budget=budget)  # checked from here on
        with PeakMemory() as memory:
            run_subnetworks(model, unmasked, 1, masks, memory_budget=budget)
    # Used, and not exceeded.
    assert budget / 2 < memory.peak <= budget
