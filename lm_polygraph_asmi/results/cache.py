"""Results kept on disk as they are made, so that a run killed at any moment loses none of them.

LM-Polygraph writes once, at the end. A result cache is a folder (a `diskcache`) shared by all runs
that name it; what a result depends on is its key, so a changed setting is another entry, never a
wrong one. A result cache never stops a run: what cannot be read is computed again, what cannot be
written is reported once, and then left to the run itself.
"""

import hashlib
import json
import logging
import pickle
import sqlite3
from importlib.metadata import version
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import diskcache
import torch
import transformers
from accelerate.utils import align_module_device
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lm_polygraph_asmi import __version__
from lm_polygraph_asmi.model.model_cache import foreign_code, plain_values, renewed_names

log = logging.getLogger("lm_polygraph")

_DAMAGE = (sqlite3.Error, OSError, diskcache.Timeout, pickle.UnpicklingError, EOFError, ValueError)
_CHUNK = 2**22
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers by their bytes."""
_CHECKSUM_BYTES = hashlib.sha256().digest_size
_WARNED: "WeakSet[PreTrainedModel]" = WeakSet()
FORMAT = 1
"""Part of every key: raised when the meaning of stored results changes."""


class ResultCache:
    """Results by what they depend on.

    Only open result caches you trust: entries are pickles.

    Args:
        folder: made if missing; None keeps nothing.
    """

    def __init__(self, folder: str | Path | None) -> None:
        self.folder = folder
        self._entries: diskcache.Cache | None = None
        self._writable = True
        if folder is None:
            return
        try:
            # Unlike a cache it never throws anything away.
            self._entries = diskcache.Cache(str(folder), eviction_policy="none")
        except _DAMAGE as error:
            self._give_up("opened", error)

    @property
    def kept(self) -> bool:
        """Whether there is one at all; without, keys need not be made."""
        return self._entries is not None

    def get(self, key: dict[str, Any]) -> Any | None:
        """The result stored under a key, or None if there is none that can be trusted."""
        if self._entries is None or _untold(key):
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
        if self._entries is None or not self._writable or _untold(key):
            return
        content = pickle.dumps(result)
        try:
            self._entries.set(_digest(key), hashlib.sha256(content).digest() + content)
        except _DAMAGE as error:
            self._give_up("written", error)

    def _give_up(self, what: str, error: Exception) -> None:
        log.warning(
            "The result cache %s cannot be %s (%s: %s). The run goes on and its results are saved "
            "at "
            "its end, but if it is killed, answers scored from here on are scored again. Is the "
            "disk full, is it a network file system, or is the folder damaged (then remove it)? "
            "asmi.result_cache names another",
            self.folder, what, type(error).__name__, error,
        )  # fmt: skip
        self._writable = False  # what is there can still be read


def _untold(key: dict[str, Any]) -> bool:
    """Whether the key is that of a model that cannot be told from others."""
    return "model" in key and key["model"] is None


def _digest(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True, default=list).encode()).hexdigest()


def environment_key() -> dict[str, str]:
    """Releases whose change can change a number."""
    return {
        "lm_polygraph_asmi": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "lm-polygraph": version("lm-polygraph"),
        "format": str(FORMAT),
    }


def model_key(model: PreTrainedModel) -> dict[str, Any]:
    """Identity of a model's weights, configuration, precision and place.

    Every value of every parameter and buffer counts, the classes and plain values of modules, and
    the configurations of adapters. So another checkpoint, an adapter or its scaling, a single head
    set to zero or another quantisation gives another key. What forward hooks compute cannot be
    told: with hooks of others, or a forward method set on a module, "model" is None, and a
    `ResultCache` keeps and finds nothing under such a key.

    Raises:
        TypeError: weights of a kind whose bits cannot be read.
    """
    place = {"device": model.device.type}
    if any(foreign_code(module) for module in model.modules()):
        return {"model": None, **place}
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        if hasattr(type(module), "_disable_adapters"):  # a layer of PEFT: which adapters act?
            digest.update(f"{module._disable_adapters} {module._active_adapter} ".encode())
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        digest.update(" ".join([name, kind, *sorted(plain_values(module)), ""]).encode())
        renewed = {f"{name}.{own}" if name else own for own in renewed_names(module)}
        with align_module_device(module):  # offloaded weights are fetched one module at a time
            tensors = [*module.named_parameters(name, False), *module.named_buffers(name, False)]
            for full_name, tensor in tensors:
                if full_name in renewed:
                    continue
                try:
                    content = _checksum(tensor)
                except (RuntimeError, NotImplementedError, KeyError) as error:
                    raise TypeError(
                        f"the result cache cannot tell weights {full_name} "
                        f"({type(tensor).__name__}, "
                        f"{tensor.dtype}) from others: set asmi.result_cache to null"
                    ) from error
                digest.update(
                    f"{full_name} {tuple(tensor.shape)} {tensor.dtype} {content} ".encode()
                )
    config = {
        name: value
        for name, value in model.config.to_dict().items()
        if not name.startswith("_") and name != "transformers_version"
    }
    adapters = {name: vars(of) for name, of in (getattr(model, "peft_config", None) or {}).items()}
    configured = json.dumps([config, adapters], sort_keys=True, default=_in_order)
    digest.update(configured.encode())
    return {"model": digest.hexdigest(), **place}


def _in_order(value: Any) -> Any:
    """Sets come in another order in every process."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


class ModelKeys:
    """`environment_key` and `model_key` of models as they are now, made again when they change.

    A key reads every weight, so it is kept as long as a cheap state of the model (made by
    `lm_polygraph_asmi.model.model_state`) stays what it was.
    """

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[PreTrainedModel, tuple[int, dict[str, Any]]] = (
            WeakKeyDictionary()
        )

    def of(self, model: PreTrainedModel, state: int) -> dict[str, Any]:
        """The key of a model in this state; one warning for a model that cannot be told."""
        kept = self._kept.get(model)
        if kept is None or kept[0] != state:
            kept = self._kept[model] = state, {**environment_key(), **model_key(model)}
            if kept[1]["model"] is None and model not in _WARNED:
                _WARNED.add(model)
                log.warning(
                    "%s has forward hooks, or a forward method set on a module. What they compute "
                    "cannot be told, so nothing of it is kept in the result cache, nor looked up "
                    "there. "
                    "Remove them if answers are to be kept", type(model).__name__,
                )  # fmt: skip
        return kept[1]


def tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Identity of a tokenizer: its vocabulary and special tokens."""
    content = [sorted(tokenizer.get_vocab().items()), tokenizer.special_tokens_map]
    return {"tokenizer": hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()}


def _checksum(tensor: Tensor) -> int:
    """Exact and position-dependent, on the tensor's own device: sum of (2 i + 1) x_i mod 2^64, x_i
    the bits of its values."""
    values = tensor.detach().contiguous().reshape(-1)
    bits = values.view(_WHOLE[values.element_size()])
    total = 0
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].long()
        place = torch.arange(start, start + part.numel(), device=part.device)
        total += int((part * (2 * place + 1)).sum())
    return total % 2**64
