"""The masked passes on an accelerator, against plain full passes there and on the processor.

    pytest tests/model/test_on_device.py --device cuda    # scripts/gpu.sh does

Without `--device` a GPU is used if there is one; else one family is tried on the processor.
"""

import gc
from pathlib import Path

import accelerate
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.maths import mutual_information, sample_head_masks, semantic_agreement
from lm_polygraph_asmi.model.check import limit
from lm_polygraph_asmi.model.readout import wide_product
from tests import decoders
from tests.conftest import PROMPT_LENGTH
from tests.families import CONFIGS, VOCABULARY, tiny_model
from tests.model.test_device_map import parts, scores, stack_of
from tests.rounding import allowed
from tests.subnetworks import subnetwork_log_probs

LAYER = 2
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
REHEARSED = "gemma3-mixed"
REHEARSED_PASSES = list(zip(("eager", "sdpa", "eager"), DTYPES, strict=True))


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    name = request.config.getoption("--device")
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and device.index is None:  # limits of memory need the number
        return torch.device("cuda", torch.cuda.current_device())
    return device


@pytest.fixture(params=list(CONFIGS))
def family(request: pytest.FixtureRequest, device: torch.device) -> str:
    if device.type == "cpu" and not request.config.getoption("--device"):
        how = request.node.callspec.params
        parts, passes = how.get("which"), (how.get("attention"), how.get("dtype"))
        if request.param != REHEARSED or (parts or passes) not in ("lower half", *REHEARSED_PASSES):
            pytest.skip("needs --device")
    return request.param


def masks(heads: int = 4, number: int = 9) -> Tensor:
    return sample_head_masks(number, heads, 0.4, torch.Generator().manual_seed(0))


def full_passes(model: PreTrainedModel, name: str, input_ids: Tensor, scope: str) -> Tensor:
    return decoders.full_passes(
        decoders.FAMILIES[name], model, input_ids.to(model.device), PROMPT_LENGTH, scope,
        drawn=masks(),
    ).cpu()  # fmt: skip


def variation(log_probs: Tensor, other: Tensor) -> float:
    """Total variation between distributions, mean over masks and tokens."""
    return (log_probs.cpu().exp() - other.cpu().exp()).abs().sum(-1).mean().item() / 2


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_masked_passes_equal_full_passes(family, device, attention, dtype, scope, input_ids):
    on_processor = tiny_model(family).to(dtype)
    if attention == "sdpa":
        if not on_processor._supports_sdpa or family == "gemma2-softcap":
            pytest.skip("the class has no SDPA, or SDPA cannot soft-cap its scores")
        on_processor.set_attn_implementation("sdpa")
    processor = full_passes(on_processor, family, input_ids, scope)
    most = allowed(on_processor, input_ids) if dtype == torch.float32 else None
    model = on_processor.to(device)
    slow = processor if device.type == "cpu" else full_passes(model, family, input_ids, scope)
    fast = subnetwork_log_probs(
        model, input_ids.to(device), PROMPT_LENGTH, LAYER, masks(), scope=scope, attention=attention
    ).cpu()
    for expected in (slow, processor):
        assert variation(fast, expected) < limit(dtype)
    if most is not None:
        most = max(most, allowed(model, input_ids.to(device)))
        torch.testing.assert_close(fast, slow, atol=most, rtol=0)
        torch.testing.assert_close(fast, processor, atol=most, rtol=0)
    # The test could not fail if masking changed nothing.
    assert variation(slow, slow[:1]) > 4 * limit(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_measures_of_the_same_distributions(device, dtype, input_ids):
    model = tiny_model("llama").to(dtype)
    log_probs = full_passes(model, "llama", input_ids, "all")
    # Logits of 16 bits tie, and devices break ties at the K-th token differently.
    noise = torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(0))
    log_probs = (log_probs.float() + 1e-4 * noise).log_softmax(-1)
    rows = model.get_output_embeddings().weight.detach()
    for top_k in (8, VOCABULARY):
        for measure, arguments in ((mutual_information, ()), (semantic_agreement, (rows,))):
            here = measure(log_probs, *arguments, top_k)
            there = measure(log_probs.to(device), *(a.to(device) for a in arguments), top_k)
            torch.testing.assert_close(there.cpu(), here, atol=1e-5, rtol=0)
            assert here.abs().max() > 1e-2


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_wide_products_are_summed_in_32_bits(device, dtype):
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(n, 512, generator=generator).to(dtype) for n in (7, 31))
    found = wide_product(rows.to(device), weight.to(device), None).cpu()
    assert found.dtype == torch.float32
    exact, size = rows.double() @ weight.double().T, rows.double().abs() @ weight.double().abs().T
    assert ((found - exact).abs() / size).max() < 1e-5  # in 16 bits 4e-4 or more


def test_out_of_memory_halves_the_batch_and_loses_nothing(device, caplog):
    """A third of what the passes need is there; test_subnetworks.py has it on a processor."""
    if device.type != "cuda":
        pytest.skip("needs --device cuda")
    model = tiny_model(
        "llama", hidden_size=512, intermediate_size=1024, num_attention_heads=16,
        num_key_value_heads=4, max_position_embeddings=512,
    ).to(device)  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # states as large as those of the tiny model
                parameter.mul_(0.25)
    generator = torch.Generator().manual_seed(7)
    input_ids = torch.randint(3, VOCABULARY, (500,), generator=generator).to(device)
    drawn = masks(16, 48)  # so that a third of them outweighs the other passes

    def run() -> Tensor:
        gc.collect()
        torch.cuda.empty_cache()
        return subnetwork_log_probs(model, input_ids, 494, LAYER, drawn, memory_budget=2**40)

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
    assert variation(in_pieces, whole) < limit(torch.float32)
    assert variation(whole, whole[:1]) > 4 * limit(torch.float32)


@pytest.mark.parametrize("which", ["lower half", "upper half", "everything"])
@pytest.mark.parametrize("family", ["llama", "gemma3-mixed", "gpt2"], indirect=True)
def test_parts_of_a_model_elsewhere(family, which, device, input_ids, tmp_path: Path):
    """Weights in main memory are fetched to the accelerator; those on a disk, to the processor."""
    whole = tiny_model(family)
    expected, most = scores(whole, input_ids), allowed(whole, input_ids)
    names = parts(whole)
    middle = names.index(f"{stack_of(whole)}.2")
    stored = {"lower half": names[:middle], "upper half": names[middle:], "everything": names}
    place, store = ("cpu", "disk") if device.type == "cpu" else (device, "cpu")
    model = accelerate.dispatch_model(
        whole,
        dict.fromkeys(names, place) | dict.fromkeys(stored[which], store),
        main_device=place,
        offload_dir=tmp_path,
        force_hooks=True,
    )
    found = scores(model, input_ids.to(device))
    most = max(most, allowed(model, input_ids.to(device)))
    for key, value in expected.items():
        torch.testing.assert_close(found[key].cpu(), value, atol=most, rtol=0, msg=key)
    assert any(parameter.is_meta for parameter in model.parameters())
