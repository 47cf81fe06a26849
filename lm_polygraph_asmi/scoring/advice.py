"""Warnings about a prompt and its answer: what a tokenizer or a chat template makes of them.

Each function yields its warnings, as sentences for a user.
"""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

from lm_polygraph_asmi.host.prompts import rendered, template_names
from lm_polygraph_asmi.host.special_tokens import SpecialTokens
from lm_polygraph_asmi.host.stopping import StopConditions, decode
from lm_polygraph_asmi.inputs import Messages, Prompt, Request, texts_of
from lm_polygraph_asmi.validation import is_unspaced

OPENING = "([{<\"'`/\\-_@#$€£“‘«„¿¡"
"""Characters that an answer may follow without a space."""
CLOCKS = {"strftime_now", "datetime", "now", "utcnow", "today", "localtime"}
"""Names by which a template reads the clock."""
PROMPT_END = 30
"""Characters of a prompt's end, without white space and quotes, that no answer has by chance."""
SOME_ANSWER = "Edda"
MEANT_FOR_THE_MODEL = re.compile(
    r"(content|reasoning_content|reasoning|thinking|"
    r"tool_calls\[\d+\](\.function)?\.(name|arguments.*)) of message \d+"
)
"""Names of the texts in messages that a model should see; others, such as ids, are for programs."""
ARGUMENTS = re.compile(r"tool_calls\[\d+\](\.function)?\.arguments of message \d+")
"""Names of tool calls' arguments that are a text."""


def special_warnings(
    special: SpecialTokens, ends: Collection[int], request: Request, written: str
) -> Iterator[str]:
    """Special tokens that are spelled out in texts, with their places.

    An end token at the end of an answer or a sample is meant, so there is no warning. Nor is there
    one for a text of a message that is not in the prompt, which the chat template has `written`.
    """
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
        yield (
            f"In the {name}, {places}{more} became a control token: if it is text, "
            f"write it in another way, such as with a space in it.{chat}"
        )


def template_warnings(tokenizer: Any, request: Request, written: str) -> Iterator[str]:
    """What a chat template changes, leaves out or adds in the prompt that it has `written`.

    Raises ValueError: it writes another prompt of the same messages each time.
    """
    prompt = request.prompt
    if isinstance(prompt, str):
        return
    if rendered(tokenizer, prompt, request.template) != written:
        raise ValueError(
            "the chat template writes another prompt of the same messages each time, so a score "
            "could not be computed again: use a template without chance"
        )
    names = template_names(tokenizer, request.template.get("tools"))
    if changing := sorted({"random", *CLOCKS} & names):
        yield (
            f"The chat template uses {changing[0]!r}, the clock or chance: the same messages are "
            "another prompt on another day, or the next time, and a calibration may not hold "
            "then. Use a template without it, or fix the date."
        )
    if header := _missing_header(tokenizer, request, written):
        yield (
            f"The chat template ignores add_generation_prompt: before an answer it writes "
            f"{header!r}, but the prompt ends without it, and the answer was scored without it. "
            "Use a template that writes it."
        )
    if missing := _left_out(prompt, written):
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        yield (
            f"The chat template leaves out or changes the {', the '.join(missing[:5])}{more}: the "
            "model does not see that text. Move it to where the template writes it, or use another "
            "template."
        )
    for name, text in texts_of(prompt):
        if ARGUMENTS.fullmatch(name) and text not in written and json.dumps(text)[1:-1] in written:
            yield (
                f"The chat template writes the {name} in quotes, as it expects an object: pass "
                "the object (json.loads of the text), if the model got that."
            )
            return


def _missing_header(tokenizer: Any, request: Request, written: str) -> str:
    """What the template writes before an answer, if the prompt lacks it; else an empty text.

    The template writes the messages alone, and then with an answer. The header lies between.
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
    for name in sorted(texts, key=lambda name: len(texts[name]))[::-1]:
        forms = map(_squeezed, (*_forms(texts[name]), json.dumps(texts[name])))
        form = next((form for form in forms if form in rest), None)
        if form is None:
            missing.add(name)
        else:
            rest = rest.replace(form, "\0", 1)
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
) -> Iterator[str]:
    """Whether the model's own answer was cut off, or a given one repeats its prompt.

    `ids`: the answer's tokens, which the tokenizer decodes as `scored_text`.
    """
    if request.answer is not None:
        yield from repeated_prompt(conditions.tokenizer, prompt_ids, scored_text)
    elif not conditions.closes(ids):
        stop = "" if conditions.stop_strings else ", or pass a `stop` such as '\\n'"
        yield (
            f"The model's answer was cut off after {len(ids)} tokens without an end: increase "
            f"max_new_tokens{stop}."
        )


def repeated_prompt(tokenizer: Any, prompt_ids: Sequence[int], answer: str) -> Iterator[str]:
    """Whether an answer starts with its prompt, or with the end of it, such as "<think>".

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
            yield (
                f"The answer repeats the end of the prompt, {shown!r}: pass only what follows "
                "the prompt, not the whole output of `generate`."
            )
            return
    if len(end := _squeezed(plain)[-PROMPT_END:]) == PROMPT_END and end in _squeezed(start):
        yield (
            f"The answer contains the end of the prompt, {plain[-40:]!r}: pass only what follows "
            "the prompt, not the whole output of `generate`."
        )


def border_warnings(prompt: Prompt, answer: str, follows: bool) -> Iterator[str]:
    """Whether a text prompt and its answer meet in a doubtful place, where tokens depend on it.

    "8" and " 8" are other tokens, with another score.

    Args:
        follows: whether the answer's tokens follow the prompt's in one text (`answer_tokens`).
    """
    if not isinstance(prompt, str):
        return
    last, first = prompt[-1:], answer[:1]
    blank_or_open = not last.strip() or last in OPENING
    if not follows:
        yield (
            "The tokenizer would merge the end of the prompt and the start of the answer into one "
            "token; they were scored as two, which no model would generate: end the prompt where a "
            "word ends, and write the space before the answer as its first character."
        )
    elif first.isalnum() and not (blank_or_open or is_unspaced(last) or is_unspaced(first)):
        yield (
            f"The answer follows the prompt without a space, {prompt[-10:] + answer[:20]!r}: if "
            "one belongs there, write it as the answer's first character; its token differs."
        )
