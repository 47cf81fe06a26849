"""Result cache: stores results on disk as they are computed, so that a killed run loses none.

LM-Polygraph writes once, at the end. A result cache is a folder (a `diskcache`) that all runs may
share. A key holds everything that a result depends on: the model's revision, settings, token ids;
releases are added here. A cache never stops a run: what cannot be read is computed again, and if
writing fails, one warning is logged.
"""

import hashlib
import json
import logging
import pickle
import sqlite3
from importlib.metadata import version
from pathlib import Path
from typing import Any

import diskcache
import torch
from accelerate.utils import align_module_device
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lm_polygraph_asmi.model.state import has_foreign_code, known_values

log = logging.getLogger("lm_polygraph")

_DAMAGE = (sqlite3.Error, OSError, diskcache.Timeout, pickle.UnpicklingError, EOFError, ValueError)
_CHUNK = 2**22
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type by number of bytes."""
_CHECKSUM_BYTES = hashlib.sha256().digest_size
RELEASES = {
    name: version(name) for name in ("lm_polygraph_asmi", "torch", "transformers", "lm-polygraph")
} | {"format": "4"}
"""Part of every key; the format is increased when the meaning of stored results changes."""


class ResultCache:
    """Results stored in a folder, which is created; None: nothing is stored.

    Only open folders you trust: entries are pickles. Nothing is stored or found under a key whose
    "revision" is None: a model that cannot be identified.
    """

    def __init__(self, folder: str | Path | None) -> None:
        self.folder = folder
        self._entries: diskcache.Cache | None = None
        self._writable = True
        if folder is not None:
            try:
                self._entries = diskcache.Cache(str(folder), eviction_policy="none")
            except _DAMAGE as error:
                self._give_up("opened", error)

    def get(self, key: dict[str, Any]) -> Any | None:
        """The result stored under a key, or None if there is none or it is damaged."""
        if self._entries is None or key.get("revision", "") is None:
            return None
        try:
            stored = self._entries.get(_digest(key))
            if stored is None:
                return None
            checksum, content = stored[:_CHECKSUM_BYTES], stored[_CHECKSUM_BYTES:]
            if hashlib.sha256(content).digest() != checksum:
                raise ValueError("its checksum does not match")
            return pickle.loads(content)
        except Exception as error:  # a damaged pickle can raise anything
            log.warning(
                "An entry of the result cache %s is damaged (%s) and is computed again",
                self.folder, error,
            )  # fmt: skip
            return None

    def put(self, key: dict[str, Any], result: Any) -> None:
        """Store a result; on disk when this returns."""
        if self._entries is None or not self._writable or key.get("revision", "") is None:
            return
        content = pickle.dumps(result)
        try:
            self._entries.set(_digest(key), hashlib.sha256(content).digest() + content)
        except _DAMAGE as error:
            self._give_up("written", error)

    def _give_up(self, action: str, error: Exception) -> None:
        log.warning(
            "The result cache %s cannot be %s (%s: %s). The run continues; if it is killed, "
            "answers from now on must be scored again. Remove the folder if it is damaged, or set "
            "asmi.result_cache", self.folder, action, type(error).__name__, error,
        )  # fmt: skip
        self._writable = False  # stored results can still be read


def _digest(key: dict[str, Any]) -> str:
    text = json.dumps([RELEASES, key], sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()


def model_key(model: PreTrainedModel) -> dict[str, Any]:
    """The revision of a model object and its device type; one warning if the revision is None.

    Reads every weight, once as long as the model does not change.
    """
    known = known_values(model)
    if "key" not in known:
        known["key"] = {"revision": _revision(model), "device": model.device.type}
        if known["key"]["revision"] is None:
            log.warning(
                "%s has forward hooks, or a forward method set on a module. Their results cannot "
                "be identified, so the result cache is not used for this model. Remove them",
                type(model).__name__,
            )
    key: dict[str, Any] = known["key"]
    return key


def _revision(model: PreTrainedModel) -> str | None:
    """Hash of what a model computes with; None if code of others acts in it, which has no hash.

    An object in memory may differ from the commit that it was loaded from. So these count: values
    that a checkpoint has, classes of modules, configuration, adapters and their scaling.
    """
    if has_foreign_code(model):
        return None
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        if hasattr(type(module), "_disable_adapters"):  # a layer of PEFT: its active adapters
            acting = module._disable_adapters, module._active_adapter, vars(module).get("scaling")
            digest.update(f"{acting} ".encode())
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        digest.update(f"{name} {kind} ".encode())
        computed = module._non_persistent_buffers_set
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
    """Exact and position-dependent, on the tensor's device: sum of (2 i + 1) x_i mod 2^64, with x_i
    the bits of its values."""
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
