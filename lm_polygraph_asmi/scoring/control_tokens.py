"""Warnings about texts in which a tokenizer reads control tokens, and about chat templates."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from os.path import commonprefix
from typing import Any, NamedTuple

from jinja2 import Environment, TemplateSyntaxError

from lm_polygraph_asmi.host.special_tokens import SpecialTokens
from lm_polygraph_asmi.scoring.text import Answer, Messages, Prompt, texts_of

MARKS = ("FIRST-TURN", "SECOND-TURN", "THIRD-TURN")
"""Contents of the chats whose rendering shows what a template writes around a message."""
CLOCKS = {"strftime_now", "datetime", "now", "utcnow", "today", "localtime"}
"""Names by which a template reads the clock."""
MEANT_FOR_THE_MODEL = re.compile(
    r"content|reasoning_content|reasoning|thinking|"
    r"tool_calls\[\d+\](\.function)?\.(name|arguments.*)"
)
"""Paths of texts in messages; others, such as ids, are for programs."""


def special_warnings(
    special: SpecialTokens,
    ends: Collection[int],
    prompt: Prompt,
    answer: Answer | None,
    samples: Sequence[Answer] | None,
) -> list[str]:
    """Warnings about special tokens that are written out in texts: their names and places.

    An end token at the end of an answer or sample is its end; for a BOS token at the start of a
    text prompt, see `prompt_warning`. Fields of messages that the template leaves out are none.
    """
    answers = [("answer", answer)]
    answers += [(f"sample {number}", text) for number, text in enumerate(samples or (), start=1)]
    warnings = []
    for name, text in [*texts_of(prompt), *answers]:
        spellings = special.spelled(text) if isinstance(text, str) else []
        if not (spellings and isinstance(text, str)):
            continue
        answered = (name, text) in answers
        if answered:
            token, start = spellings[-1]
            if start + len(token) == len(text) and special.ids[token] in ends:
                spellings.pop()
        elif name == "prompt":
            spellings = spellings[text.startswith(_bos(special)) :]
        elif not (name.startswith("content of") or _is_rendered(special, prompt, text)):
            continue
        if not spellings:
            continue
        places = ", ".join(f"{token!r} at character {start}" for token, start in spellings[:3])
        more = f" and {len(spellings) - 3} more" if len(spellings) > 3 else ""
        chat = "" if answered else " If it is a chat that a template rendered, pass its messages."
        warnings.append(
            f"In {_with_article(name)}, {places}{more} became a control token: if it is text, "
            f"write it in another way, such as with a space in it.{chat}"
        )
    return warnings


def rendered_warnings(special: SpecialTokens, prompt: Prompt) -> list[str]:
    """Warnings about texts that the chat template has rendered, as far as no token shows it.

    `special_warnings` names the special tokens of a template, except the BOS token.
    """
    if not getattr(special.tokenizer, "chat_template", None):
        return []
    texts = [("prompt", prompt)] if isinstance(prompt, str) else [
        (f"content of message {number}", message["content"])
        for number, message in enumerate(prompt, start=1)
        if message.get("role") == "user" and isinstance(message.get("content"), str)
    ]  # fmt: skip
    frame, warnings = _frame(special), []
    for name, text in texts:
        if frame and (shown := frame.around(text.strip().removeprefix(_bos(special)).strip())):
            warnings.append(
                f"{_with_article(name).capitalize()} looks as if the chat template had rendered "
                f"it: it {shown}. Pass its messages instead."
            )
    return warnings


def template_warnings(special: SpecialTokens, prompt: Prompt) -> list[str]:
    """Warnings about a chat template that reads the clock, or leaves out text of the messages."""
    if isinstance(prompt, str):
        return []
    warnings = []
    if reads_clock(special.tokenizer):
        warnings.append(
            "The chat template reads the clock: the same messages are another prompt on another "
            "day, and a calibration may not hold then. Fix the date in the template."
        )
    if missing := _left_out(special, prompt):
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        warnings.append(
            f"The chat template leaves out or changes the {', the '.join(missing[:5])}{more}: the "
            "model does not see that text. Move it to where the template writes it, or use another "
            "template."
        )
    return warnings


def reads_clock(tokenizer: Any) -> bool:
    """Whether the chat template makes another prompt of the same messages on another day."""
    try:
        tokens = list(Environment().lex(tokenizer.get_chat_template()))
    except (AttributeError, ValueError, TemplateSyntaxError):  # `prompt_tokens` says what is wrong
        return False
    names = [value for _, kind, value in tokens if kind == "name"]
    own = {name for before, name in pairwise(names) if before == "set"}  # as in set today = "..."
    return not CLOCKS.isdisjoint(set(names) - own)


class Text(NamedTuple):
    """A text of a message, by its name, and the mark put around it to find where it is written."""

    name: str
    text: str
    mark: str


def _left_out(special: SpecialTokens, messages: Messages) -> list[str]:
    """Names of the texts that the template does not write, as "content of message 1 (system)".

    A text that occurs elsewhere, too, is missed by its mark in a second rendering.
    """
    texts: list[Text] = []
    marked = [
        {field: _marked(value, field, f"message {number} ({message['role']})", texts)
         for field, value in message.items()}
        for number, message in enumerate(messages, start=1)
    ]  # fmt: skip
    written = _as_written(special, [dict(message) for message in messages])
    if written is None:
        return []
    written_marked, squeezed, missing = _as_written(special, marked), _squeezed(written), []
    for name, text, mark in texts:
        forms = (text, json.dumps(text, ensure_ascii=False), json.dumps(text))
        found = any(_squeezed(form) in squeezed for form in forms)
        if not found or mark not in (written_marked or mark):
            missing.append(name)
    return missing


def _marked(value: Any, path: str, message: str, texts: list[Text]) -> Any:
    """A part of a message with marks around its texts for the model, which `texts` gets."""
    if isinstance(value, Mapping):
        return {n: _marked(part, f"{path}.{n}", message, texts) for n, part in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(part, f"{path}[{i}]", message, texts) for i, part in enumerate(value)]
    if not (isinstance(value, str) and MEANT_FOR_THE_MODEL.fullmatch(path) and _squeezed(value)):
        return value
    mark = f"Zq{len(texts)}q"
    texts.append(Text(f"{path} of {message}", value, mark))
    return f"{mark}{value}{mark}"


def _squeezed(text: str) -> str:
    """A text without what templates and JSON change: white space, quotes, backslashes."""
    return re.sub(r"[\s\"'\\]+", "", text)


class Frame(NamedTuple):
    """What a chat template writes around messages, without blanks and BOS token.

    Attributes:
        opening: before the user's message.
        closing: after it, up to the answer.
        starts: before the first message: a system's or the user's, with what is always written.
    """

    opening: str
    closing: str
    starts: tuple[str, ...]

    def around(self, text: str) -> str | None:
        """How a text shows that it is a rendered chat; None if it does not."""
        if self.opening not in text:
            return None
        if self.closing and text.endswith(self.closing):
            return f"holds {self.opening!r} and ends with {self.closing!r}"
        start = next(filter(text.startswith, self.starts), None)
        return None if start is None else f"begins with {start!r} and holds {self.opening!r}"


def _frame(special: SpecialTokens) -> Frame | None:
    """The template's frame; None if it writes nothing before a message, or special tokens."""
    user, assistant, again = MARKS
    single = _rendered(special, ("user", user))
    turns = _rendered(special, ("user", user), ("assistant", assistant), ("user", again))
    system = _rendered(special, ("system", user), ("user", assistant))
    before, _, closing = single.partition(user)
    later = turns.partition(assistant)[2].partition(again)[0]
    opening = commonprefix([before[::-1], (later or before)[::-1]])[::-1]

    def bare(text: str) -> str:
        return text.replace(_bos(special), "").strip()

    starts = (bare(system.partition(user)[0]), bare(before), bare(opening))
    frame = Frame(bare(opening), bare(closing), tuple(filter(None, starts)))
    if not frame.opening or special.pattern.search(frame.opening + frame.closing):
        return None
    return frame


def _rendered(special: SpecialTokens, *messages: tuple[str, str]) -> str:
    """A chat of roles and contents as the template writes it; empty if it does not support it."""
    chat = [{"role": role, "content": content} for role, content in messages]
    return _as_written(special, chat) or ""


def _as_written(special: SpecialTokens, messages: Any) -> str | None:
    try:
        return str(
            special.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        )
    except Exception:  # a template may raise any; `prompt_tokens` names it where it is used
        return None


def _is_rendered(special: SpecialTokens, messages: Any, text: str) -> bool:
    """Whether the template writes this text of a message, maybe as JSON."""
    written = _as_written(special, [dict(message) for message in messages]) or ""
    return any(form in written for form in (text, json.dumps(text, ensure_ascii=False)[1:-1]))


def _bos(special: SpecialTokens) -> str:
    """The BOS token; if there is none, a text that no other contains."""
    return str(special.tokenizer.bos_token or "\0")


def _with_article(name: str) -> str:
    """A name of a text in a sentence."""
    return name if name.startswith(("sample", "a ")) else f"the {name}"
