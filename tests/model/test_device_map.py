"""Models too large for one device: split or offloaded, they score as in one piece."""

from functools import cache
from itertools import product
from pathlib import Path

import accelerate
import pytest
import torch
from accelerate.hooks import attach_align_device_hook_on_blocks
from torch import Tensor
from torch.utils import backend_registration
from transformers import PreTrainedModel

from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.core.engine import Engine
from lm_polygraph_asmi.core.model import (
    choice,
    masked_model,
    response_embeddings,
    run_unmasked,
    structure,
    structure_of,
    unembedding,
    unmasked,
)
from tests.families import FAMILIES, masks, of_model, sequence, subnetwork_log_probs, tiny_model
from tests.forks import exit_code

NAMES = ["llama", "gemma3-mixed", "gpt2", "gpt-neox"]  # with tied embeddings: the middle two
PROMPT = 11
PARTS = ["lower half", "upper half", "output projection", "everything", "memory"]


def parts(model: PreTrainedModel, layers: str) -> list[str]:
    """What a device map places: the model's modules in order, every decoder layer by itself."""
    base, _, _ = layers.rpartition(".")
    names = [f"{base}.{name}" for name, _ in model.get_submodule(base).named_children()]
    place = names.index(layers)
    names[place : place + 1] = [f"{layers}.{i}" for i in range(4)]
    return names + [name for name, _ in model.named_children() if name != base]


def on_disk(name: str, which: str, folder: Path, place: torch.device) -> PreTrainedModel:
    """A model with some parts on disk, fetched by accelerate whenever they are called; beside an
    accelerator, in main memory."""
    model, layers = tiny_model(name), FAMILIES[name].stack
    names = parts(model, layers)
    middle = names.index(f"{layers}.2")
    stored = (names[:middle], names[middle:], names[-1:], names)[PARTS.index(which)]
    store = "disk" if place.type == "cpu" else "cpu"
    device_map = dict.fromkeys(names, place) | dict.fromkeys(stored, store)
    return accelerate.dispatch_model(
        model, device_map, main_device=place, offload_dir=folder, force_hooks=True
    )


def scores(model: PreTrainedModel, input_ids: Tensor) -> dict[str, Tensor]:
    """Everything that the two stat calculators take from a model."""
    prompt, answer = input_ids[:PROMPT], input_ids[PROMPT:].tolist()
    (example,) = Engine(num_masks=6, mask_rate=0.3, top_k=8).score(model, prompt, answer)
    statistics = {name: getattr(example, name) for name in ("log_likelihood", "mi", "agreement")}
    statistics["states"] = Engine().read(model, prompt, answer)["hidden"]
    return {name: torch.from_numpy(values) for name, values in statistics.items()} | {
        "all": subnetwork_log_probs(model, input_ids, PROMPT, 1, masks(6)),
        "response": subnetwork_log_probs(model, input_ids, PROMPT, 2, masks(6), scope="response"),
        "embeddings": of_model(response_embeddings, model, prompt, [[5], [7, 9, 11], [4, 4]]),
        "unembedding": of_model(unembedding, model),
        "generated": model.generate(prompt[None], max_new_tokens=2, do_sample=False),
    }


def state(model: PreTrainedModel) -> dict[str, object]:
    wrappers = {f"{n}()": m.__dict__.get("forward") for n, m in model.named_modules()}
    return wrappers | {name: p.device for name, p in model.named_parameters()}


in_one_piece = cache(lambda name: scores(tiny_model(name), sequence(17)))


def run_without_data(name: str, found: structure.Structure) -> None:
    """The masked passes over a model whose layers alternate between two devices of no machine.

    Under `FakeTensorMode` tensors have shape and place but no data, and refuse to be combined
    across places, as those of two GPUs do.
    """
    first, second = (torch.device("pretend", i) for i in range(2))
    model, layers = tiny_model(name, "sdpa"), FAMILIES[name].stack
    names = parts(model, layers)
    device_map = dict.fromkeys(names, first)
    device_map |= dict.fromkeys((f"{layers}.1", f"{layers}.3", names[-1]), second)
    for part, device in device_map.items():
        for module in model.get_submodule(part).modules():
            for own in (module._parameters, module._buffers):
                known = {name: tensor for name, tensor in own.items() if tensor is not None}
                own.update({k: torch.empty(t.shape, device=device) for k, t in known.items()})
    places = {"": first, **device_map}
    attach_align_device_hook_on_blocks(model, places, dict.fromkeys(device_map, False))
    input_ids = torch.ones(17, dtype=torch.long)
    structure.remember_structure(model, found)
    with masked_model(model) as f:
        for scope, layer in product(SCOPES, (1, 3)):
            run = run_unmasked(f, input_ids, PROMPT, [layer], scope)
            hidden = next(iter(choice.PASSES[scope].values()))(f, run, layer, torch.ones(3, 4))
            assert hidden.device == run.final_hidden.device == first
            assert model.get_output_embeddings()(hidden).device == second
        assert unembedding(f).device == second


def pretend_two_devices() -> None:
    """Spoils the process for everything else: it then has an accelerator that cannot compute."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers.cache_utils import DynamicLayer

    def start(layer, keys, values):  # the own method makes a tensor, which needs data
        layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
        layer.keys, layer.values = keys[..., :0, :], values[..., :0, :]

    DynamicLayer.lazy_initialization = start
    torch.set_num_threads(1)
    backend_registration._setup_privateuseone_for_python_backend("pretend")
    torch.pretend.get_amp_supported_dtype = list  # torch.autocast asks
    unmasked.validate_tokens = lambda *_: None  # it looks at token ids, which have no data
    seen = {name: structure_of(tiny_model(name, "sdpa")) for name in NAMES}  # that needs data
    with FakeTensorMode():
        for name, found in seen.items():
            run_without_data(name, found)


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot pretend to have devices",
)
@pytest.mark.slow
def test_two_devices():
    assert exit_code(pretend_two_devices) == 0
