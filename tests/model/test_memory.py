"""How much the passes compute and hold, counted rather than timed; chunks that fit."""

from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lm_polygraph_asmi.core.maths import sample_head_masks
from lm_polygraph_asmi.core.model import (
    choice,
    masked_model,
    run_subnetworks,
    run_unmasked,
    subnetworks,
)
from lm_polygraph_asmi.core.model.memory import CPU_BUDGET, batch_bytes, default_budget
from tests.families import IDS, PROMPT, both_scopes, subnetwork_log_probs, tiny_model
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


def test_long_responses_are_packed_into_several_sequences(llama, ran, monkeypatch):
    whole = subnetwork_log_probs(llama, IDS, PROMPT, 1, MANY, scope="response")
    for packed, expected in ((12, 2), (5, 1)):
        ran.clear()
        monkeypatch.setitem(subnetworks.PACKED_POSITIONS, "cpu", packed)
        parts = subnetwork_log_probs(llama, IDS, PROMPT, 1, MANY, scope="response")
        torch.testing.assert_close(parts, whole, atol=allowed(llama, IDS), rtol=0)
        assert max(map(len, ran)) == expected


def test_half_of_what_a_device_has_free_is_the_budget(monkeypatch):
    free = {torch.device("cuda", 0): 6000, torch.device("cuda", 1): 4000}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device], 9000))
    assert [default_budget(gpu) for gpu in free] == [3000, 2000]
    assert default_budget(torch.device("cpu")) == CPU_BUDGET


def flops(run) -> int:
    """Multiply-adds, attention scores apart."""
    with FlopCounterMode(display=False) as counter:
        run()
    counted = counter.get_flop_counts()["Global"]
    return sum(n for operation, n in counted.items() if "bmm" not in str(operation)) // 2


@both_scopes
@pytest.mark.parametrize("layer", [0, 1, 2, 3])
def test_masked_passes_do_only_what_they_must(llama, layer, scope):
    """Layers below the target are not run; in scope `response`, nor positions of the prompt."""
    with masked_model(llama) as f:
        unmasked = run_unmasked(f, IDS, PROMPT, [layer], scope)
        run_subnetworks(f, unmasked, layer, DRAWN)  # checked from here on
        found = flops(lambda: run_subnetworks(f, unmasked, layer, DRAWN))
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


@both_scopes
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("prompt", "response"), [(400, 30), (40, 60)])
def test_peak_memory_stays_inside_the_budget(prompt, response, scope, attention):
    model = tiny_model("llama", attention, max_position_embeddings=512)
    input_ids = torch.randint(3, 61, (prompt + response,))
    masks = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 4)[:6]
    with masked_model(model) as f:
        if scope == "all":
            budget = batch_bytes(f, 4, prompt + response - 1)
        else:
            budget = batch_bytes(f, 4, response, prompt - 1, packed=True)
        unmasked = run_unmasked(f, input_ids, prompt, [1], scope)
        run_subnetworks(f, unmasked, 1, masks, memory_budget=budget)  # checked from here on
        with PeakMemory() as memory:
            run_subnetworks(f, unmasked, 1, masks, memory_budget=budget)
    # Used, and not exceeded.
    assert budget / 2 < memory.peak <= budget
