"""Masked passes equal full passes written in the plainest way, here or on an accelerator.

    pytest tests/model/test_on_device.py --device cuda    # scripts/gpu.sh does

Without `--device` a GPU is used if there is one.
"""

import gc
from contextlib import nullcontext
from copy import deepcopy
from itertools import product

import accelerate
import pytest
import torch
from torch import Tensor

from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.core.maths import sample_head_masks
from lm_polygraph_asmi.core.model import choice, devices, rounding, structure_of
from lm_polygraph_asmi.core.model.readout import wide_product
from tests.families import (
    DECODERS,
    FAMILIES,
    IDS,
    PROMPT,
    apart,
    full_passes,
    masks,
    of_model,
    sequence,
    subnetwork_log_probs,
    tiny_model,
    unchecked,
)
from tests.model.test_device_map import NAMES, PARTS, in_one_piece, on_disk, scores, state
from tests.rounding import allowed

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DAILY = {
    ("eager", torch.float32): DECODERS.keys() - {"gated indexed attention, hybrid"},
    # Windows, norms inside the heads, other positions.
    ("sdpa", torch.float32): ("qwen2-window", "qwen3-qk-norm", "gpt2", "gemma3-mixed"),
    ("eager", torch.bfloat16): ("llama", "gemma2-softcap", "gpt2", "gemma3-mixed"),
}
"""What runs each day, besides one family in all ways."""


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    name = request.config.getoption("--device") or usual
    return torch.empty(0, device=name).device  # with its number, which limits of memory need


def cases():
    """Name, attention, type. Families in all; of others, one type of 16 bits says enough."""
    for name, attention, dtype in product(DECODERS, ("eager", "sdpa"), DTYPES):
        if name in FAMILIES or (attention == "eager" and dtype != torch.float16):
            daily = name in DAILY.get((attention, dtype), ("gemma3-mixed",))
            yield pytest.param(name, attention, dtype, marks=[] if daily else pytest.mark.slow)


@pytest.mark.parametrize(("name", "attention", "dtype"), [*cases()], ids=str)
def test_masked_passes_equal_full_passes(name, attention, dtype, device):
    """Short before long, since windows set in at some length; by the pass of the table."""
    if name not in FAMILIES and device.type != "cpu":
        pytest.skip("on a processor")
    decoder, exact = DECODERS[name], dtype == torch.float32
    model = decoder.make().to(dtype)
    if attention == "sdpa" and (not model._supports_sdpa or name == "gemma2-softcap"):
        pytest.skip("the class has no SDPA, or SDPA cannot soft-cap its scores")
    model.set_attn_implementation(attention)
    texts = [(sequence(4), 2), (IDS, PROMPT)] if exact else [(IDS, PROMPT)]
    there = model if device.type == "cpu" else deepcopy(model).to(device)
    for ids, prompt in texts:
        places = [(each, ids.to(each.device), prompt) for each in {model, there}]
        nats = exact and name in FAMILIES and max(allowed(*place[:2]) for place in places)
        for scope in SCOPES:
            with unchecked() if exact else nullcontext():
                fast = subnetwork_log_probs(
                    there, ids.to(device), prompt, decoder.layer, masks(), scope=scope
                ).cpu()
            for place in places:
                slow = full_passes(decoder, *place, scope).cpu()
                assert (fast.shape, fast.dtype) == (slow.shape, torch.float32), scope
                if nats:
                    torch.testing.assert_close(
                        fast, slow, atol=nats, rtol=0, msg=f"{{}} in scope {scope}".format
                    )
                elif exact:
                    assert apart(fast, slow) < 1e-4, scope
                else:
                    off = rounding.variation(fast.flatten(0, 1), slow.flatten(0, 1))
                    assert off < rounding.limit(dtype), scope
                # The test could not fail if masking changed nothing.
                effect = apart(slow, slow[:1].expand_as(slow))
                assert effect > (1e-3 if exact else 2 * rounding.limit(dtype)), scope
            ways = of_model(choice.passes_to_try, there, decoder.layer, scope)
            assert ways.first == structure_of(there).passes[scope]


@pytest.mark.parametrize("name", ["gemma3-mixed", "gpt2"])
@pytest.mark.usefixtures("unseen")
def test_edges_of_lengths_and_layers(name):
    """Families that tell positions in different ways; also one mask at a time."""
    model = FAMILIES[name].make()
    for length, edges in {
        17: [(1, 0, "all"), (16, 3, "all"), (16, 0, "response"), (1, 3, "response")],
        60: [(3, 2, "response")],  # all masks together are longer than the context window
    }.items():
        most = allowed(model, ids := sequence(length))
        for prompt, layer, scope in edges:
            how = model, ids, prompt, layer, masks()
            slow = full_passes(FAMILIES[name], *how[:3], scope, layer)
            for budget in (None, 1):
                fast = subnetwork_log_probs(*how, scope=scope, memory_budget=budget)
                torch.testing.assert_close(
                    fast, slow, atol=most, rtol=0, msg=f"{{}} from {prompt}, {scope}".format
                )


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_wide_products_are_summed_in_32_bits(device, dtype):
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(n, 512, generator=generator).to(dtype) for n in (7, 31))
    found = wide_product(rows.to(device), weight.to(device), None).cpu()
    assert found.dtype == torch.float32
    exact, size = rows.double() @ weight.double().T, rows.double().abs() @ weight.double().abs().T
    assert ((found - exact).abs() / size).max() < 1e-5  # in 16 bits 4e-4 or more


def test_out_of_memory_halves_the_batch_and_loses_nothing(device, caplog):
    """A third of what the passes need is there; test_memory.py has it on a processor."""
    if device.type != "cuda":
        pytest.skip("needs --device cuda")
    model = tiny_model(
        "llama", hidden_size=512, intermediate_size=1024, num_attention_heads=16,
        num_key_value_heads=4, max_position_embeddings=512,
    ).to(device)  # fmt: skip
    weights = model.state_dict().items()  # made for states as large as those of the tiny model
    model.load_state_dict({name: w * 0.25 if w.ndim > 1 else w for name, w in weights})
    # So many masks that a third of them outweighs the other passes.
    drawn = sample_head_masks(48, 16, 0.4, torch.Generator().manual_seed(0))

    def run() -> Tensor:
        gc.collect()
        torch.cuda.empty_cache()
        ids = sequence(500).to(device)
        return subnetwork_log_probs(model, ids, 494, 2, drawn, memory_budget=2**40).cpu()

    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    whole = run()
    needed = torch.cuda.max_memory_allocated(device) - before
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    share = (torch.cuda.memory_reserved(device) + needed / 3) / total
    torch.cuda.set_per_process_memory_fraction(share, device)
    try:
        in_pieces = run()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert "continues in chunks of" in caplog.text
    assert rounding.variation(in_pieces.flatten(0, 1), whole.flatten(0, 1)) < rounding.limit(
        torch.float32
    )
    assert apart(whole, whole[:1].expand_as(whole)) > 4 * rounding.limit(torch.float32)


TIED = [("gemma3-mixed", PARTS[2]), ("gpt2", PARTS[2])]  # it stays with the embedding
EVERY_DAY = ("llama", PARTS[0]), ("llama", PARTS[4]), ("gpt2", PARTS[3])


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize(
    ("name", "which"),
    [
        pytest.param(*pair, marks=[] if pair in EVERY_DAY else pytest.mark.slow)
        for pair in product(NAMES, PARTS)
        if pair not in TIED
    ],
)
def test_parts_of_a_model_elsewhere(name, which, device, tmp_path):
    """On disk; or everything in memory, of which tied weights move as they do from a disk. An
    accelerator gets them from main memory."""
    model, expected = tiny_model(name), in_one_piece(name)
    most = allowed(model, IDS)
    if which == "memory":
        model = accelerate.cpu_offload(model, device)
    else:
        model = on_disk(name, which, tmp_path, device)
    meta = {parameter.is_meta for parameter in model.parameters()}
    assert meta == ({True} if which in ("memory", "everything") else {False, True})
    assert devices.execution_device(model.get_input_embeddings()).type == device.type
    most = max(most, allowed(model, IDS.to(device)))  # and tied weights move at the first call
    before = state(model)
    found = scores(model, IDS.to(device))
    assert state(model) == before
    for part, value in expected.items():
        torch.testing.assert_close(found[part].cpu(), value, atol=most, rtol=0, msg=part)
    # The weights that accelerate goes on with are ordinary ones, gradients included.
    model(input_ids=IDS[None].to(device)).logits.sum().backward()
