"""Result cache: stores each result on disk once it is computed, so that a killed run can resume.

LM-Polygraph itself writes only at the end of a run. A result cache is a folder (a `diskcache`) that
several runs can share. A key holds everything that a result depends on: the model's revision,
settings and token ids; releases of packages are added here. A problem of the cache never stops a
run: if an entry cannot be read, it is computed again, and if writing fails, a warning is logged
once.
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

log = logging.getLogger("lm_polygraph")

_DAMAGE = (sqlite3.Error, OSError, diskcache.Timeout, pickle.UnpicklingError, EOFError, ValueError)
_CHECKSUM_BYTES = hashlib.sha256().digest_size
RELEASES = {
    name: version(name) for name in ("lm_polygraph_asmi", "torch", "transformers", "lm-polygraph")
} | {"format": "4"}
"""Part of every key. Increase the format when the meaning of stored results changes."""


class ResultCache:
    """Results stored in a folder, which is created. None: nothing is stored.

    Only open folders you trust: entries are pickles. If a key's "revision" is None, the model
    cannot be identified; then nothing is stored or found.
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
        """The result stored under a key; None if there is none, or if it is damaged."""
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
                "An entry of the result cache %s is damaged (%s), so it is computed again",
                self.folder, error,
            )  # fmt: skip
            return None

    def put(self, key: dict[str, Any], result: Any) -> None:
        """Store a result. It is on disk when this returns."""
        if self._entries is None or not self._writable or key.get("revision", "") is None:
            return
        content = pickle.dumps(result)
        try:
            self._entries.set(_digest(key), hashlib.sha256(content).digest() + content)
        except _DAMAGE as error:
            self._give_up("written", error)

    def _give_up(self, action: str, error: Exception) -> None:
        log.warning(
            "The result cache %s cannot be %s (%s: %s). The run continues, but if it is killed, "
            "answers "
            "from now on must be scored again. If the folder is damaged, remove it, or set "
            "another one in "
            "asmi.result_cache", self.folder, action, type(error).__name__, error,
        )  # fmt: skip
        self._writable = False  # results that are stored already can still be read


def _digest(key: dict[str, Any]) -> str:
    text = json.dumps([RELEASES, key], sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()
