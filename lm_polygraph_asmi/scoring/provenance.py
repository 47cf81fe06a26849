"""What a score was made from: the digest of a written row, and what calibrations compare."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

FORMAT = 4
"""Part of every digest; increased when scores of the same answers change."""
COVERED = (
    "prompt", "answer", "settings", "model", "score", "msp", "signals", "ids", "counted",
    "scored_text", "content_end", "answered", "prompt_tokens",
)  # fmt: skip
"""Fields of a written row that belong together: what was scored, how, and what is read of it."""
HASHES = ("weights", "tokenizer")
"""Settings of a row that are hashes of the model's weights, and of its tokenizer."""
NAMES = ("model", "revision")
"""Where a model was loaded from, by which models are told apart that have no equal hashes."""


def digest_of(row: Mapping[str, Any]) -> str:
    """Hash (16 hexadecimal digits) of the fields `COVERED` of a row.

    Numbers count to six digits, at most seven of them decimals, so that a file may pass through
    other programs.
    """
    covered = _rounded([FORMAT, {name: row.get(name) for name in COVERED}])
    return short_hash(json.dumps(covered, sort_keys=True))


def short_hash(text: str) -> str:
    """The first 16 hexadecimal digits of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _rounded(value: Any) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return f"{round(value, 7):.6g}" if isinstance(value, float) else str(value)
    if isinstance(value, Mapping):
        parts = {str(name): _rounded(part) for name, part in value.items()}
        return {name: part for name, part in parts.items() if part is not None}
    return [_rounded(part) for part in value] if isinstance(value, list | tuple) else str(value)


def names_that_count(there: Mapping[str, Any], here: Mapping[str, Any]) -> tuple[str, ...]:
    """Those of `NAMES` by which two models are told apart: none if their hashes are equal."""
    equal = all(there.get(name) and there[name] == here.get(name) for name in HASHES)
    return () if equal else NAMES


def prompt_format(prompt: Any) -> dict[str, str]:
    """Whether a prompt is text or a chat, and a hash of a chat's system messages."""
    if isinstance(prompt, str):
        return {"prompt_format": "text"}
    system = [message.get("content") for message in prompt if message.get("role") == "system"]
    return {"prompt_format": "chat", "system": short_hash(json.dumps(system))}


def answer_end(ended: bool, tokens: int, limit: int | None) -> str:
    """How an answer of so many tokens ends: calibrations on complete answers cover no others."""
    if ended:
        return "complete"
    return f"cut off after {limit} tokens" if tokens == limit else "without an end"


def loadable(model: str) -> str:
    """The name that loads a recorded model: the demo's model is recorded by its folder."""
    from lm_polygraph_asmi.host.loading import SMOLLM2
    from lm_polygraph_asmi.host.smollm2 import smollm2_source

    with suppress(FileNotFoundError):
        if Path(model) == smollm2_source()[0]:
            return SMOLLM2
    return model
