"""Warnings about an answer, and the border between it and its prompt."""

import re
from collections.abc import Sequence
from typing import Any

from lm_polygraph_asmi.host.stopping import StopConditions, decode
from lm_polygraph_asmi.scoring.text import Request
from lm_polygraph_asmi.validation import is_unspaced

OPENING = "([{<\"'`/\\-_@#$€£“‘«„¿¡"
"""Characters that an answer may follow without a space."""


def answer_warnings(
    conditions: StopConditions,
    request: Request,
    prompt_ids: Sequence[int],
    ids: Sequence[int],
    scored_text: str,
    follows: bool,
) -> list[str]:
    """Warnings about an answer of the tokens `ids`, which the tokenizer decodes as `scored_text`.

    `follows`: whether the answer's tokens follow the prompt in one text.
    """
    prompt, answer, tokenizer = request.prompt, request.answer, conditions.tokenizer
    if answer is None:
        if conditions.closes(ids):
            return []
        stop = "" if conditions.stop_strings else ", or pass a `stop` such as '\\n'"
        return [
            f"The model's answer was cut off after {len(ids)} tokens without an end: increase "
            f"max_new_tokens{stop}."
        ]
    found = [repeated_prompt(tokenizer, prompt_ids, scored_text)]
    if isinstance(prompt, str) and isinstance(answer, str):
        found.append(border_warning(prompt, answer, follows))
    return list(filter(None, found))


def repeated_prompt(tokenizer: Any, prompt_ids: Sequence[int], answer: str) -> str | None:
    """Warning if the answer starts with its prompt or the end of it, such as "<think>", or None.

    Words that go on, as in a list, are none: the end is a mark such as "Answer:", or a whole line.
    """
    plain = [token for token in prompt_ids if token not in tokenizer.all_special_ids]
    start = answer.lstrip()
    for before in (decode(tokenizer, ids).rstrip() for ids in (prompt_ids, plain)):
        lengths = range(min(len(before), len(start)), 1, -1)
        end = next((start[:n] for n in lengths if before.endswith(start[:n])), "").rstrip()
        is_line = before.removesuffix(end).endswith("\n")
        is_mark = not (end[-1:].isalnum() or end.endswith(","))
        if end and end == before.strip():  # a short prompt may be repeated
            is_line = is_mark = len(prompt_ids) >= 4
        if re.search(r"\w", end) and (is_line or is_mark):
            return (
                f"The answer repeats the end of the prompt, {end[-40:]!r}: pass only what follows "
                "the prompt, not the whole output of `generate`."
            )
    return None


def border_warning(prompt: str, answer: str, follows: bool) -> str | None:
    """Warning about the border between a text prompt and its answer, with advice, or None.

    The score depends on the tokens: "8" and " 8" differ. `follows`: as of `answer_warnings`.
    """
    if not follows:
        return (
            "The tokenizer would merge the end of the prompt and the start of the answer into one "
            "token; they were scored as two, which no model would generate: end the prompt where a "
            "word ends, and write the space before the answer as its first character."
        )
    last, first = prompt[-1:], answer[:1]
    blank_or_open = not last.strip() or last in OPENING
    if first.isalnum() and not (blank_or_open or is_unspaced(last) or is_unspaced(first)):
        return (
            f"The answer follows the prompt without a space, {prompt[-10:] + answer[:20]!r}: if "
            "one belongs there, write it as the answer's first character; its token differs."
        )
    return None
