"""Records what a score was made from: digests of written rows, and what calibrations compare."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

FORMAT = 4
"""Version that is part of every digest. Increase it when the same answers get other scores."""
COVERED = (
    "prompt", "answer", "settings", "model", "score", "msp", "signals", "ids", "counted",
    "scored_text", "content_end", "answered", "prompt_tokens",
)  # fmt: skip
"""Fields of a written row that its digest covers: the scored answer, the settings, the results."""
HASHES = ("weights", "tokenizer")  # settings that are hashes of the model and its tokenizer
NAMES = ("model", "revision")
"""Settings that name where a model was loaded from. Compared unless all hashes are equal."""


def digest_of(row: Mapping[str, Any]) -> str:
    """Hash (16 hexadecimal digits) of a row's fields `COVERED`.

    Floats are rounded to seven decimals and six significant digits, so that the digest does not
    change if another program rewrites the file.
    """
    covered = _rounded([FORMAT, {name: row.get(name) for name in COVERED}])
    return short_hash(json.dumps(covered, sort_keys=True))


def short_hash(text: str) -> str:
    """The first 16 hexadecimal digits of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _rounded(value: Any) -> Any:
    if isinstance(value, bool | str | None):
        return value
    if isinstance(value, float):
        return f"{round(value, 7):.6g}"
    if isinstance(value, Mapping):
        parts = {str(name): _rounded(part) for name, part in value.items()}
        return {name: part for name, part in parts.items() if part is not None}
    return [_rounded(part) for part in value] if isinstance(value, list | tuple) else str(value)


def names_that_count(there: Mapping[str, Any], here: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields of `NAMES` to compare: none if the hashes of both models are equal."""
    equal = all(there.get(name) and there[name] == here.get(name) for name in HASHES)
    return () if equal else NAMES


def prompt_format(prompt: Any, template: Mapping[str, Any]) -> dict[str, str]:
    """The form of a prompt: text or chat. For a chat also hashes of its messages of system and
    developer, and of what the chat `template` gets besides, such as tools, or that it gets none.

    Of documents, which differ between questions, only that there are some.
    """
    if isinstance(prompt, str):
        return {"prompt_format": "text"}
    kept = [message for message in prompt if message.get("role") in ("system", "developer")]
    system = [each.get("content") if each["role"] == "system" else each for each in kept]
    beside = {n: n == "documents" or value for n, value in template.items() if value}
    return {
        "prompt_format": "chat",
        "system": short_hash(json.dumps(system)),
        "template": short_hash(json.dumps(beside, default=str)),
    }


def answer_end(ended: bool, tokens: int, limit: int | None) -> str:
    """How an answer ended. A calibration on complete answers does not cover others."""
    if ended:
        return "complete"
    return f"cut off after {limit} tokens" if tokens == limit else "without an end"


def loadable(model: str) -> str:
    """The name that loads a recorded model. The demo's model is recorded by its folder's path."""
    from lm_polygraph_asmi.host.loading import SMOLLM2
    from lm_polygraph_asmi.host.smollm2 import smollm2_source

    with suppress(FileNotFoundError):
        if Path(model) == smollm2_source()[0]:
            return SMOLLM2
    return model
