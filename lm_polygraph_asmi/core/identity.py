"""What a model and a tokenizer are, by what they compute with: the same in every process.

Names and folders are no identity, since weights are moved and renamed. Within a process,
`model.state` tells without reading every weight whether a model is still as it was.
"""

import hashlib
import json
import logging
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lm_polygraph_asmi.core.model.state import findings, foreign_modules

log = logging.getLogger("lm_polygraph")

_CHUNK = 2**22
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type by number of bytes."""


def model_key(model: PreTrainedModel) -> dict[str, Any]:
    """The revision of a model object and its device type; one warning if the revision is None.

    Reads every weight, once as long as the model does not change.
    """
    kept = findings(model)
    if "key" not in kept:
        kept["key"] = {"revision": _revision(model), "device": model.device.type}
    return kept["key"]


def _revision(model: PreTrainedModel) -> str | None:
    """Hash of what a model computes with; None, and a warning, if code of others acts in it.

    A model in memory may differ from the commit that it was loaded from, so the hash is of the
    model itself: weights, classes of modules, configuration, adapters and their scaling.
    """
    if foreign_modules(model):
        log.warning(
            "%s has forward hooks, or a forward method set on a module. Their results cannot be "
            "identified, so nothing of this model is stored in a result cache. Remove them",
            type(model).__name__,
        )
        return None
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        if hasattr(type(module), "_disable_adapters"):  # a layer of PEFT: its active adapters
            acting = module._disable_adapters, module._active_adapter, vars(module).get("scaling")
            digest.update(f"{acting} ".encode())
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        digest.update(f"{name} {kind} ".encode())
        computed = module._non_persistent_buffers_set  # such as rotary angles, for longer texts
        with align_module_device(module):  # loads offloaded weights, one module at a time
            tensors = [*module.named_parameters(name, False), *module.named_buffers(name, False)]
            for full_name, tensor in tensors:
                if full_name.rpartition(".")[2] not in computed:
                    content = f"{tuple(tensor.shape)} {tensor.dtype} {_checksum(full_name, tensor)}"
                    digest.update(f"{full_name} {content} ".encode())
    config = {
        name: value
        for name, value in model.config.to_dict().items()
        if not name.startswith("_") and name != "transformers_version"
    }
    adapters = {name: vars(of) for name, of in (getattr(model, "peft_config", None) or {}).items()}
    digest.update(json.dumps([config, adapters], sort_keys=True, default=_in_order).encode())
    return digest.hexdigest()


def _in_order(value: Any) -> Any:
    """Sets have another order in every process."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def _checksum(name: str, tensor: Tensor) -> int:
    """Sum of (2 i + 1) x_i mod 2^64 over the bits x_i of the values, computed on their device.

    So it depends on every bit and on the order of the values.
    """
    try:
        values = tensor.detach().contiguous().reshape(-1)
        total = 0
        for number, part in enumerate(values.view(_INTEGERS[values.element_size()]).split(_CHUNK)):
            position = torch.arange(len(part), device=part.device) + number * _CHUNK
            total += int((part.long() * (2 * position + 1)).sum())
    except (RuntimeError, NotImplementedError, KeyError) as error:
        raise TypeError(
            f"the result cache cannot read the bits of weights {name} ({type(tensor).__name__}, "
            f"{tensor.dtype}); in a benchmark, set asmi.result_cache to null"
        ) from error
    return total % 2**64


def tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of a tokenizer's vocabulary and special tokens, and of how it splits text."""
    backend, rules = getattr(tokenizer, "backend_tokenizer", None), type(tokenizer).__name__
    if backend is not None:  # padding and truncation are those of the latest call
        lasting = json.loads(backend.to_str()) | {"padding": None, "truncation": None}
        rules = json.dumps(lasting, separators=(",", ":"), ensure_ascii=False)
    content = [sorted(tokenizer.get_vocab().items()), tokenizer.special_tokens_map, rules]
    return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()
