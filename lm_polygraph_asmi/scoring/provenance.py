"""What a score was made from: the digest of a saved one, and what calibrations compare."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

FORMAT = 2
"""Part of every digest; increased when scores of the same answers change."""
MADE_FROM = (
    "prompt", "answer", "samples", "settings", "model", "score", "msp", "tokens",
    "counted", "scored_text", "content_end", "ending", "answered", "prompt_tokens", "warnings",
    "diversity", "gate",
)  # fmt: skip
"""Fields of a line of `score --out` that belong together: what was scored, how, and the result."""


def digest_of(line: Mapping[str, Any]) -> str:
    """Hash (16 hexadecimal digits) of the fields `MADE_FROM` of a saved score.

    Numbers count to six digits, at most seven of them decimals, so that a file may pass through
    other programs.
    """
    content = [FORMAT, {name: line.get(name) for name in MADE_FROM}]
    text = json.dumps(_rounded(content), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def made_from(line: Mapping[str, Any]) -> bool:
    """Whether a saved score is that of the prompt, answer and settings beside it."""
    return line.get("digest") == digest_of(line)


def _rounded(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, float):
        return f"{round(value, 7):.6g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, Mapping):
        parts = {str(name): _rounded(part) for name, part in value.items()}
        return {name: part for name, part in parts.items() if part is not None}
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    return value


def prompt_format(prompt: Any) -> dict[str, str]:
    """Whether a prompt is text or a chat, and a hash of a chat's system messages."""
    if isinstance(prompt, str):
        return {"prompt_format": "text"}
    system = [message.get("content") for message in prompt if message.get("role") == "system"]
    digest = hashlib.sha256(json.dumps(system).encode()).hexdigest()
    return {"prompt_format": "chat", "system": digest[:16]}


def answer_end(ended: bool, tokens: int, limit: int | None) -> str:
    """How an answer ends: calibrations on complete answers do not cover others.

    Args:
        ended: whether its last token ends it.
        tokens, limit: its number of tokens, and the largest.
    """
    if ended:
        return "complete"
    return f"cut off after {limit} tokens" if tokens == limit else "without an end"


def compared(
    prompt: Any, model: str, settings: Mapping[str, Any], tokens: int, ended: bool | None
) -> dict[str, Any]:
    """Settings, model, and form of prompt and answer, which a calibration must share.

    Args:
        settings: of the scored answer.
        tokens: of the answer.
        ended: whether its last token ends it; None: unknown.
    """
    described = prompt_format(prompt) | {"model": model}
    if settings.get("closing_token", True) and ended is not None:
        described["answer_end"] = answer_end(ended, tokens, settings.get("max_new_tokens"))
    return described | dict(settings)
