"""Warnings about a prompt, its answer, and the border between them: each once."""

import re
from collections.abc import Sequence
from typing import Any

from lm_polygraph_asmi.host.special_tokens import SpecialTokens
from lm_polygraph_asmi.host.stopping import StopConditions, decode
from lm_polygraph_asmi.scoring.control_tokens import (
    rendered_warnings,
    special_warnings,
    template_warnings,
)
from lm_polygraph_asmi.scoring.text import Request
from lm_polygraph_asmi.validation import is_unspaced

END_TOKENS = 64
"""Last tokens of a prompt that an answer may repeat."""
OPENING = "([{<\"'`/\\-_@#$€£“‘«„¿¡"
"""Characters that an answer may follow without a space."""


def prompt_warnings(
    special: SpecialTokens, ends: set[int], request: Request, ids: Sequence[int], written: str
) -> list[str]:
    """Warnings about a prompt, `written` so with token ids `ids`, and control tokens anywhere.

    `ends`: ids of the end tokens.
    """
    tokenizer, prompt = special.tokenizer, request.prompt
    warnings = template_warnings(tokenizer, prompt, written)
    warnings += special_warnings(special, ends, request, written)
    warnings += rendered_warnings(special, prompt)
    if isinstance(prompt, str) and not prompt.strip():
        warnings.append("The prompt is blank: the answer depends on no question.")
    first = tokenizer.bos_token_id
    if isinstance(prompt, str) and first is not None and list(ids[:2]) == [first, first]:
        warnings.append(
            f"The prompt begins with {tokenizer.bos_token!r}, and the tokenizer added another: "
            "leave it out of the text, or pass the chat as messages."
        )
    return warnings


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
    repeated = list(ids[: len(prompt_ids)]) == list(prompt_ids)
    if isinstance(prompt, str) and isinstance(answer, str):
        repeated = repeated or answer.lstrip().startswith(prompt.lstrip())
    found = [repeated_end(tokenizer, prompt_ids, scored_text)]
    if repeated and len(prompt_ids) >= 4:  # a short prompt may be repeated
        found = [
            "The answer begins with the whole prompt, like the output of `generate`: pass only "
            "what follows the prompt."
        ]
    if isinstance(answer, str):
        if not scored_text.startswith(answer):
            found.append(
                f"The tokenizer decodes the answer as {scored_text!r}: offsets refer to that text."
            )
        if isinstance(prompt, str):
            found.append(border_warning(prompt, answer, follows))
        found.append(stop_warning(answer, conditions.stop_strings))
    return list(filter(None, found))


def repeated_end(tokenizer: Any, prompt_ids: Sequence[int], answer: str) -> str | None:
    """Warning if the answer starts with the end of its prompt, such as "<think>", or None.

    Words that go on, as in a list, are none: the end is a mark such as "Answer:", or a whole line.
    """
    ids = list(prompt_ids[-END_TOKENS:])
    plain = decode(tokenizer, [token for token in ids if token not in tokenizer.all_special_ids])
    start = answer.lstrip()
    for before in (decode(tokenizer, ids).rstrip(), plain.rstrip()):
        lengths = range(min(len(before), len(start)), 1, -1)
        end = next((start[:n] for n in lengths if before.endswith(start[:n])), "").rstrip()
        is_line = before.removesuffix(end).endswith("\n")
        is_mark = not (end[-1:].isalnum() or end.endswith(","))
        if re.search(r"\w", end) and (is_line or is_mark) and end != plain.strip():
            return (
                f"The answer repeats the end of the prompt, {end!r}: pass only what follows the "
                "prompt."
            )
    return None


def border_warning(prompt: str, answer: str, follows: bool) -> str | None:
    """Warning about the border between a text prompt and its answer, with advice, or None.

    The score depends on the tokens: "8" and " 8" differ. `follows`: as of `answer_warnings`.
    """
    spaced = f"write the answer as {_start(' ' + answer)}"
    if not follows:
        advice = "end the prompt where a word ends, and write the space before the answer as its "
        advice += "first character"
        if prompt.endswith(" "):
            advice = f"end the prompt without its last space, and {spaced}"
        return (
            "The tokenizer would merge the end of the prompt and the start of the answer into one "
            f"token; they were scored as two, which no model would generate: {advice}."
        )
    last, first = prompt[-1:], answer[:1]
    if _spaced(last) and last not in OPENING and _spaced(first) and first.isalnum():
        return (
            f"The answer follows the prompt without a space: {_start(prompt[-10:] + answer)}. "
            f"If one belongs between them, {spaced}: its token and score differ."
        )
    return None


def stop_warning(answer: str, stops: Sequence[str]) -> str | None:
    """Warning if an answer continues after a stop string, or None.

    Blanks after it do not count: a token of two line breaks holds the stop and more.
    """
    for stop in stops:
        _, separator, rest = answer.partition(stop)
        if separator and rest.strip():
            return (
                f"The answer continues after the stop {stop!r}, with {_start(rest)}: all of it was "
                "scored, but a model that stops there would not generate it. End the answer before "
                "the stop, or leave this `stop` out."
            )
    return None


def _start(text: str) -> str:
    """repr of a text, or of its first 30 characters."""
    return repr(text) if len(text) <= 30 else f"{text[:30]!r}…"


def _spaced(character: str) -> bool:
    """Whether this is a non-space character of a script with spaces between words."""
    return bool(character.strip()) and not is_unspaced(character)
