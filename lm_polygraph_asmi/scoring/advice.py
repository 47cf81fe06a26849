"""Warnings about prompts and answers, and about what tokenizer and chat template do with them.

Each function yields its warnings as sentences for the user.
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

OPENING = "([{<\"'`/\\-_@#$€£“‘«„¿¡"  # after these, an answer may begin without a space
CLOCKS = {"strftime_now", "datetime", "now", "utcnow", "today", "localtime"}
"""Names with which a template reads the clock."""
PROMPT_END = 30  # characters but white space and quotes, which no answer repeats by chance
SOME_ANSWER = "Edda"
MEANT_FOR_THE_MODEL = re.compile(
    r"(content|reasoning_content|reasoning|thinking|"
    r"tool_calls\[\d+\](\.function)?\.(name|arguments.*)) of message \d+"
)
"""Names of the texts in messages that the model should see. Others, such as ids, are metadata."""
ARGUMENTS = re.compile(r"tool_calls\[\d+\](\.function)?\.arguments of message \d+")
"""Names of tool-call arguments that are written as text."""


def special_warnings(
    special: SpecialTokens, ends: Collection[int], request: Request, written: str
) -> Iterator[str]:
    """Warn of special tokens that are spelled out in texts, with their places.

    An end token at the end of an answer or sample is intended, so there is no warning for it. There
    is none either for a text of a message, other than its content, that the chat template left out
    of the prompt it has `written`.
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
        chat = "" if answered else " If a chat template wrote the prompt, pass its messages."
        yield (
            f"In the {name}, {places}{more} became a control token. If it is meant as text, write "
            f"it in another way, such as with a space in it.{chat}"
        )


def template_warnings(tokenizer: Any, request: Request, written: str) -> Iterator[str]:
    """Warn of what a chat template changes, leaves out or adds in the prompt it has `written`.

    Raises ValueError: the template does not render the same messages to the same prompt each time.
    """
    prompt = request.prompt
    if isinstance(prompt, str):
        return
    if rendered(tokenizer, prompt, request.template) != written:
        raise ValueError(
            "the chat template is random: it renders the same messages to another prompt each "
            "time, so a score could not be reproduced. Use a deterministic template"
        )
    names = template_names(tokenizer, request.template.get("tools"))
    if changing := sorted({"random", *CLOCKS} & names):
        yield (
            f"The chat template uses {changing[0]!r}, the clock or chance, so the same messages "
            "give another prompt on another day or in another call. A calibration may not hold "
            "then. Use a template without it, or fix the date."
        )
    if header := _missing_header(tokenizer, request, written):
        yield (
            f"The chat template ignores add_generation_prompt: it writes {header!r} before an "
            "answer, but the prompt ends without it, and the answer was scored without it. Use a "
            "template that writes it."
        )
    if missing := _left_out(prompt, written):
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        yield (
            f"The chat template leaves out or changes the {', the '.join(missing[:5])}{more}: the "
            "model does not see that text. Move it to where the template writes it, or use "
            "another template."
        )
    for name, text in texts_of(prompt):
        if ARGUMENTS.fullmatch(name) and text not in written and json.dumps(text)[1:-1] in written:
            yield (
                f"The chat template expects an object, so it writes the {name} in quotes. If the "
                "model was given the object, pass the object (json.loads of the text)."
            )
            return


def _missing_header(tokenizer: Any, request: Request, written: str) -> str:
    """The header that the template writes before an answer, if the prompt lacks it; otherwise "".

    The messages are rendered alone, and with an answer. The header is the text between them.
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
    """Names of the texts that the template left out, such as "content of message 1 (system)".

    A text that is found is removed from the prompt before the next is searched, so that one place
    does not count for two texts. Longer texts are searched first; of equally long ones, the last.
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
    """A text without the characters that templates and JSON change: space, quotes, backslashes."""
    return re.sub(r"[\s\"'\\]+", "", text)


def _forms(text: str) -> tuple[str, str]:
    """The two ways in which a template may write a message's text: as it is, or as JSON."""
    return text, json.dumps(text, ensure_ascii=False)[1:-1]


def answer_warnings(
    conditions: StopConditions,
    request: Request,
    prompt_ids: Sequence[int],
    ids: Sequence[int],
    scored_text: str,
) -> Iterator[str]:
    """Warn if the model's own answer was cut off, or if a given answer repeats its prompt.

    `ids`: the answer's tokens; the tokenizer decodes them as `scored_text`.
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
    """Warn if an answer begins with its prompt or the prompt's end, such as "<think>".

    An answer may rightly begin with words that end the prompt, for example in a list. So only these
    repetitions count: of a mark, such as "Answer:"; of a whole line; of a whole prompt of at least
    four tokens; and anywhere in the answer, of the prompt's last `PROMPT_END` characters.
    """
    special, start = {*tokenizer.all_special_ids}, answer.lstrip().casefold()
    parts = groupby(prompt_ids, key=special.__contains__)
    texts = [decode(tokenizer, [*ids]) for is_special, ids in parts if not is_special]
    # Leave out special tokens, so that a header between two of them, "assistant", is a line.
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
                f"The answer repeats the end of the prompt, {shown!r}: pass only what follows the "
                "prompt, not the whole output of `generate`."
            )
            return
    if len(end := _squeezed(plain)[-PROMPT_END:]) == PROMPT_END and end in _squeezed(start):
        yield (
            f"The answer contains the end of the prompt, {plain[-40:]!r}: pass only what follows "
            "the prompt, not the whole output of `generate`."
        )


def border_warnings(prompt: Prompt, answer: str, follows: bool) -> Iterator[str]:
    """Warn if the border between a text prompt and its answer may be wrong, which changes tokens.

    For example, "8" and " 8" are different tokens with different scores.

    Args:
        follows: whether the answer's token ids continue the prompt's (`answer_tokens`).
    """
    if not isinstance(prompt, str):
        return
    last, first = prompt[-1:], answer[:1]
    blank_or_open = not last.strip() or last in OPENING
    if not follows:
        yield (
            "The tokenizer would merge the end of the prompt and the start of the answer into "
            "one token. They were scored as two tokens, which no model would generate. End the "
            "prompt where a word ends, and write the space before the answer as its first "
            "character."
        )
    elif first.isalnum() and not (blank_or_open or is_unspaced(last) or is_unspaced(first)):
        yield (
            f"The answer follows the prompt without a space, {prompt[-10:] + answer[:20]!r}. If "
            "there should be one, write it as the answer's first character, since this gives "
            "other tokens."
        )
