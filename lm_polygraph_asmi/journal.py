"""Results kept on disk as they are made, so that a run killed at any moment loses none of them.

LM-Polygraph writes once, at the end. A journal is a folder (a `diskcache`) shared by all runs that
name it; what a result depends on is its key, so a changed setting is another entry, never a wrong
one. A journal never stops a run: what cannot be read is computed again, what cannot be written is
reported once, and then left to the run itself.
"""

import hashlib
import json
import logging
import pickle
import sqlite3
from pathlib import Path
from typing import Any

import diskcache
import torch
import transformers
from transformers import PreTrainedModel

from lm_polygraph_asmi import __version__

log = logging.getLogger("lm_polygraph")

_DAMAGE = (sqlite3.Error, OSError, diskcache.Timeout, pickle.UnpicklingError, EOFError, ValueError)
_CHECKSUM_BYTES = hashlib.sha256().digest_size
FORMAT = 1
"""Part of every key: raised when the meaning of stored results changes."""


class Journal:
    """Results by what they depend on.

    Only open journals you trust: entries are pickles.

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

    def get(self, key: dict[str, Any]) -> Any | None:
        """The result stored under a key, or None if there is none that can be trusted."""
        if self._entries is None:
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
                "An entry of the journal %s is damaged (%s) and is computed again", self.folder,
                error,
            )  # fmt: skip
            return None

    def put(self, key: dict[str, Any], result: Any) -> None:
        """Store a result; on disk when this returns."""
        if self._entries is None or not self._writable:
            return
        content = pickle.dumps(result)
        try:
            self._entries.set(_digest(key), hashlib.sha256(content).digest() + content)
        except _DAMAGE as error:
            self._give_up("written", error)

    def _give_up(self, what: str, error: Exception) -> None:
        log.warning(
            "The journal %s cannot be %s (%s: %s). The run goes on and its results are saved at "
            "its end, but if it is killed, answers scored from here on are scored again. Is the "
            "disk full, or is it a network file system? asmi.journal names another folder",
            self.folder, what, type(error).__name__, error,
        )  # fmt: skip
        self._writable = False  # what is there can still be read


def _digest(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True, default=list).encode()).hexdigest()


def environment_key() -> dict[str, str]:
    """Releases whose change can change a number."""
    return {
        "lm_polygraph_asmi": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "format": str(FORMAT),
    }


def model_key(model: PreTrainedModel) -> dict[str, str]:
    """Identity of a model's weights, configuration, precision and place.

    Of every parameter at most 64 evenly spaced values are read: another checkpoint, another
    precision or a fine-tuned layer gives another key, and a model of any size takes seconds.
    Parameters that are offloaded (on the meta device) count by name and shape.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        if parameter.device.type != "meta" and parameter.numel():
            values = parameter.detach().reshape(-1)
            picked = values[:: max(1, values.numel() // 64)].cpu().contiguous()
            digest.update(picked.view(torch.uint8).numpy().tobytes())
    config = {
        name: value
        for name, value in model.config.to_dict().items()
        if not name.startswith("_") and name != "transformers_version"
    }
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    return {"model": digest.hexdigest(), "device": model.device.type}
