"""Warnings about a prompt, its answer, and what a tokenizer or a chat template makes of them."""

import json
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

from lm_polygraph_asmi.host.prompts import rendered, template_names
from lm_polygraph_asmi.host.special_tokens import SpecialTokens
from lm_polygraph_asmi.host.stopping import StopConditions, decode
from lm_polygraph_asmi.inputs import Messages, Request, texts_of
from lm_polygraph_asmi.validation import is_unspaced

OPENING = "([{<\"'`/\\-_@#$€£“‘«„¿¡"
"""Characters that an answer may follow without a space."""
CLOCKS = {"strftime_now", "datetime", "now", "utcnow", "today", "localtime"}
"""Names by which a template reads the clock."""
PROMPT_END = 30
"""Characters, without white space and quotes, by which the end of a prompt is known again."""
SOME_ANSWER = "Edda"
MEANT_FOR_THE_MODEL = re.compile(
    r"(content|reasoning_content|reasoning|thinking|"
    r"tool_calls\[\d+\](\.function)?\.(name|arguments.*)) of message \d+"
)
"""Names of texts in messages; others, such as ids, are for programs."""


def special_warnings(
    special: SpecialTokens, ends: Collection[int], request: Request, written: str
) -> list[str]:
    """Warnings about special tokens that are spelled out in texts, with their places.

    Of an end token that ends an answer or a sample, there is no warning: it is meant. Nor is there
    one of a text that the chat template has left out of the prompt, which is `written`.
    """
    warnings = []
    for name, text in request.texts():
        answered = name != "prompt" and " of message " not in name
        spellings = special.spelled(text)
        last = spellings[-1][0] if spellings else ""
        if answered and spellings and text.endswith(last) and special.ids[last] in ends:
            spellings.pop()
        read = answered or name.startswith(("prompt", "content of"))
        if not (spellings and (read or any(form in written for form in _forms(text)))):
            continue
        places = ", ".join(f"{token!r} at character {start}" for token, start in spellings[:3])
        more = f" and {len(spellings) - 3} more" if len(spellings) > 3 else ""
        chat = "" if answered else " If it is a chat that a template rendered, pass its messages."
        warnings.append(
            f"In the {name}, {places}{more} became a control token: if it is text, "
            f"write it in another way, such as with a space in it.{chat}"
        )
    return warnings


def template_warnings(tokenizer: Any, request: Request, written: str) -> list[str]:
    """Warnings about a chat template, and the prompt that it has `written`.

    Raises ValueError: it writes another prompt of the same messages each time.
    """
    prompt = request.prompt
    if isinstance(prompt, str):
        return []
    if rendered(tokenizer, prompt, request.template) != written:
        raise ValueError(
            "the chat template writes another prompt of the same messages each time, so a score "
            "could not be computed again: use a template without chance"
        )
    names, warnings = template_names(tokenizer, request.template.get("tools")), []
    if changing := sorted({"random", *CLOCKS} & names):
        warnings.append(
            f"The chat template uses {changing[0]!r}, the clock or chance: the same messages are "
            "another prompt on another day, or the next time, and a calibration may not hold "
            "then. Use a template without it, or fix the date."
        )
    if header := _missing_header(tokenizer, request, written):
        warnings.append(
            f"The chat template ignores add_generation_prompt: before an answer it writes "
            f"{header!r}, but the prompt ends without it, and the answer was scored without it. "
            "Use a template that writes it."
        )
    if missing := _left_out(prompt, written):
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        warnings.append(
            f"The chat template leaves out or changes the {', the '.join(missing[:5])}{more}: the "
            "model does not see that text. Move it to where the template writes it, or use another "
            "template."
        )
    quoted = [
        name
        for name, text in texts_of(prompt)
        if re.fullmatch(r"tool_calls\[\d+\](\.function)?\.arguments of message \d+", name)
        and text not in written
        and json.dumps(text)[1:-1] in written
    ]
    if quoted:
        warnings.append(
            f"The chat template writes the {quoted[0]} in quotes, as it expects an object: pass "
            "the object (json.loads of the text), if the model got that."
        )
    return warnings


def _missing_header(tokenizer: Any, request: Request, written: str) -> str:
    """What the template writes between the prompt and an answer, if the prompt lacks it.

    Found by writing the messages without what begins an answer, and with an answer.
    """
    if rendered(tokenizer, request.prompt, request.template, False) != written:
        return ""
    answered = [*request.prompt, {"role": "assistant", "content": SOME_ANSWER}]
    with suppress(ValueError):
        whole = rendered(tokenizer, answered, request.template, False)
        if whole.startswith(written):
            return whole[len(written) :].partition(SOME_ANSWER)[0].strip()
    return ""


def _left_out(messages: Messages, written: str) -> list[str]:
    """Names of the texts that the template has not written, as "content of message 1 (system)".

    What is found is taken out of the prompt before the next text is sought, so that one place does
    not count for two texts. The longest texts come first, and of equally long ones the last.
    """
    rest, missing = _squeezed(written), set()
    texts = {name: text for name, text in texts_of(messages) if MEANT_FOR_THE_MODEL.fullmatch(name)}
    names = list(texts)
    for name in sorted(names, key=lambda n: (len(texts[n]), names.index(n)), reverse=True):
        forms = map(_squeezed, (*_forms(texts[name]), json.dumps(texts[name])))
        form = next((form for form in forms if form in rest), None)
        if form is None:
            missing.add(name)
        rest = rest.replace(form, "\0", 1) if form else rest
    return [f"{n} ({messages[int(n.split()[-1]) - 1]['role']})" for n in texts if n in missing]


def _squeezed(text: str) -> str:
    """A text without what templates and JSON change: white space, quotes, backslashes."""
    return re.sub(r"[\s\"'\\]+", "", text)


def _forms(text: str) -> tuple[str, str]:
    """How a template may write a text of a message: as it is, or inside JSON."""
    return text, json.dumps(text, ensure_ascii=False)[1:-1]


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

    An answer may begin with words that end the prompt, as in a list. So only a repeated mark, such
    as "Answer:", or a repeated whole line counts.
    """
    special, start = {*tokenizer.all_special_ids}, answer.lstrip().casefold()
    parts = groupby(prompt_ids, key=special.__contains__)
    texts = [decode(tokenizer, [*ids]) for is_special, ids in parts if not is_special]
    # Without special tokens, between which an answer's header stands alone, such as "assistant".
    plain = "\n".join(texts).casefold().rstrip()
    for before in (decode(tokenizer, prompt_ids).casefold().rstrip(), plain):
        lengths = range(min(len(before), len(start)), 1, -1)
        end = next((start[:n] for n in lengths if before.endswith(start[:n])), "").rstrip()
        is_line = before.removesuffix(end).endswith("\n")
        is_mark = not (end[-1:].isalnum() or end.endswith(","))
        if end and end == before.strip():  # a short prompt may be repeated
            is_line = is_mark = len(prompt_ids) >= 4
        if re.search(r"\w", end) and (is_line or is_mark):
            shown = answer.lstrip()[: len(end)][-40:]
            return (
                f"The answer repeats the end of the prompt, {shown!r}: pass only what follows "
                "the prompt, not the whole output of `generate`."
            )
    if len(end := _squeezed(plain)[-PROMPT_END:]) == PROMPT_END and end in _squeezed(start):
        return (
            f"The answer contains the end of the prompt, {plain[-40:]!r}: pass only what follows "
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
