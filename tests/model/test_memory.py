"""How much the passes compute and hold, counted rather than timed; chunks that fit."""

from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.core import algorithm
from lm_polygraph_asmi.core.engine import Engine
from lm_polygraph_asmi.core.maths import sample_head_masks
from lm_polygraph_asmi.core.model import (
    choice,
    masked_model,
    run_subnetworks,
    run_unmasked,
    subnetworks,
)
from lm_polygraph_asmi.core.model.memory import (
    CPU_BUDGET,
    GPU_BUDGET,
    batch_bytes,
    default_budget,
)
from tests.families import IDS, PROMPT, both_scopes, sequence, subnetwork_log_probs, tiny_model
from tests.peak_memory import PeakMemory
from tests.rounding import allowed

DRAWN = torch.tensor([[1.0, 1, 1, 1], [0, 1, 1, 1], [1, 1, 0, 1], [0, 1, 1, 1]])
DISTINCT = 2  # of the four: one keeps all heads, one comes twice
MANY = sample_head_masks(11, 4, 0.4, torch.Generator().manual_seed(0))  # 7 of them distinct


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
        monkeypatch.setitem(choice.PASSES[scope], name, partial(calls, choice.PASSES[scope][name]))
    monkeypatch.setattr(
        subnetworks, "packed", choice.PASSES["response"]["packed"]
    )  # it has a limit
    return calls


@both_scopes
def test_out_of_memory_halves_the_chunk_and_loses_nothing(llama, ran, scope):
    def run(masks=MANY):
        ran.clear()
        return subnetwork_log_probs(llama, IDS, PROMPT, 1, masks, scope=scope)

    run(DRAWN)  # equal masks once, the unmasked not at all
    assert sorted(mask for chunk in ran for mask in chunk) == [[0, 1, 1, 1], [1, 1, 0, 1]]
    whole, ran.most = run(), 2
    torch.testing.assert_close(run(), whole, atol=allowed(llama, IDS), rtol=0)
    sizes = list(map(len, ran))
    assert sizes[1] == (sizes[0] + 1) // 2 > 2
    # Nothing that succeeded was run again.
    assert sum(size for size in sizes if size <= 2) == len(MANY.unique(dim=0))
    ran.most = 0
    with pytest.raises(torch.OutOfMemoryError):
        run()


def needed(f, number: int, prompt: int, response: int, scope: str) -> int:
    """Bytes for so many masks together, by the fastest passes."""
    if scope == "all":
        return batch_bytes(f, number, prompt + response - 1)
    return batch_bytes(f, number, response, prompt - 1, packed=True)


@pytest.mark.parametrize(
    ("scope", "positions", "fit"),
    [(scope, 256, fit) for scope in SCOPES for fit in (1, 5)]
    + [("response", 12, 2), ("response", 5, 1)],
)
def test_as_many_masks_run_together_as_fit(llama, ran, monkeypatch, scope, positions, fit):
    """Into the budget to a byte, and into a packed sequence of so many positions."""
    whole = subnetwork_log_probs(llama, IDS, PROMPT, 1, MANY, scope=scope)
    monkeypatch.setitem(subnetworks.PACKED_POSITIONS, "cpu", positions)
    with masked_model(llama) as f:
        budget = needed(f, fit, PROMPT, 6, scope)
    for short, most in ((0, fit), (1, max(1, fit - 1))):
        ran.clear()
        how = {"scope": scope, "memory_budget": budget - short}
        parts = subnetwork_log_probs(llama, IDS, PROMPT, 1, MANY, **how)
        torch.testing.assert_close(parts, whole, atol=allowed(llama, IDS), rtol=0)
        assert max(map(len, ran)) == most


def test_half_of_what_a_device_has_free_is_the_budget(monkeypatch):
    """With what PyTorch has reserved and does not use."""
    free = {"cuda:0": 6000, "cuda:1": 2**40}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[str(device)], 2**41))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 1000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 400)
    budgets = {"cuda:0": 3300, "cuda:1": GPU_BUDGET, "cpu": CPU_BUDGET}
    assert {place: default_budget(torch.device(place)) for place in budgets} == budgets


@both_scopes
@pytest.mark.parametrize("layer", [0, 1, 2, 3])
def test_masked_passes_do_only_what_they_must(llama, layer, scope):
    """Layers below the target are not run; in scope `response`, nor positions of the prompt."""
    with masked_model(llama) as f:
        unmasked = run_unmasked(f, IDS, PROMPT, [layer], scope)
        run_subnetworks(f, unmasked, layer, DRAWN)  # checked from here on
        with FlopCounterMode(display=False) as counter:
            run_subnetworks(f, unmasked, layer, DRAWN)
    counted = counter.get_flop_counts()["Global"].items()  # but for scores of attention
    found = sum(number for operation, number in counted if "bmm" not in str(operation)) // 2
    layers = llama.model.layers
    each = sum(m.weight.numel() for m in layers[0].modules() if isinstance(m, torch.nn.Linear))
    before = sum(getattr(layers[0].self_attn, f"{name}_proj").weight.numel() for name in "qkv")
    positions, above = (len(IDS) - 1 if scope == "all" else 6), len(layers) - 1 - layer
    expected = positions * DISTINCT * each * (1 + above)
    if scope == "all":  # masks act behind the projection's input: what is before runs once
        expected -= positions * before
    if scope == "all" and above:  # behind attention, the last layer runs where answers are read
        expected -= (positions - 6) * DISTINCT * (each - before)
    assert found == expected


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("prompt", "response", "scope"), [(400, 30, "all"), (400, 30, "response"), (40, 60, "response")]
)
def test_peak_memory_stays_inside_the_budget(prompt, response, scope, attention):
    model = tiny_model("llama", attention, max_position_embeddings=512)
    masks = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 4)[:6]
    with masked_model(model) as f:
        budget = needed(f, 4, prompt, response, scope)
        unmasked = run_unmasked(f, sequence(prompt + response), prompt, [1], scope)
        run_subnetworks(f, unmasked, 1, masks, memory_budget=budget)  # checked from here on
        with PeakMemory() as memory:
            run_subnetworks(f, unmasked, 1, masks, memory_budget=budget)
    # Used, and not exceeded.
    assert budget / 2 < memory.peak <= budget


@pytest.mark.usefixtures("unseen")
def test_statistics_of_a_large_vocabulary_stay_inside_the_budget(monkeypatch):
    """The cosines of all pairs of tokens of one position alone would take several times as much."""
    passes = Mock(side_effect=run_subnetworks)
    monkeypatch.setattr(algorithm, "run_subnetworks", passes)
    budget, model = 2**23, tiny_model("llama", vocab_size=4000)
    engine = Engine(num_masks=40, mask_rate=0.4, top_k=1000, memory_budget=budget)
    with PeakMemory() as memory:
        engine.score(model, IDS[:PROMPT], IDS[PROMPT:].tolist())
    assert budget / 4 < memory.peak <= budget
    assert passes.call_args.args[-1] == budget  # which they keep to, see above
