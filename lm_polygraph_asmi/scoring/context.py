"""The context as token spans of the prompt, from texts, offsets, messages or parts."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from numbers import Integral
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from lm_polygraph_asmi.host.context import Span, place_of, token_spans
from lm_polygraph_asmi.scoring.text import Prompt


class Passage(NamedTuple):
    """One passage of the context.

    Attributes:
        text: its characters.
        tokens: (start, end) tokens of the prompt that hold them.
    """

    text: str
    tokens: Span


def passages_of(
    tokenizer: PreTrainedTokenizerBase,
    original: Any,
    prompt: Prompt,
    prompt_ids: Sequence[int],
    context: Any,
) -> list[Passage]:
    """The passages of `context`, in its order.

    Args:
        original: the caller's prompt; messages may have parts and include the answer.
        prompt: the scored prompt, text or messages of text.
        prompt_ids: (P,) its tokens.
        context: one passage or a list. A passage is a text that occurs once in the prompt; in a
            text prompt also its (start, end) characters; in a chat also the index of a message, or
            (message, part).

    Raises:
        ValueError: no passage, one that does not occur exactly once, or two that overlap.
    """
    chat = not isinstance(prompt, str)
    text = prompt if isinstance(prompt, str) else _rendered(tokenizer, prompt)
    pair = _is_pair(context) and (isinstance(context, tuple) or not chat)
    single = pair or not isinstance(context, Sequence) or isinstance(context, str)
    passages = [context] if single else list(context)  # in a chat, [0, 2] are two messages
    if not passages:
        raise ValueError(f"expected at least one passage in the context, got {context!r}")
    if chat:
        char_spans = [_characters_in_chat(tokenizer, text, original, prompt, p) for p in passages]
    else:
        char_spans = [_characters(text, passage) for passage in passages]
    for first, second in pairwise(sorted(char_spans)):
        if second[0] < first[1]:
            raise ValueError(
                f"the passages {text[slice(*first)][:60]!r} and {text[slice(*second)][:60]!r} of "
                "the context overlap: each token needs one source"
            )
    spans = token_spans(tokenizer, text, prompt_ids, char_spans)
    last_end = 0
    for number in sorted(range(len(spans)), key=lambda number: char_spans[number]):
        start, end = spans[number]
        if end <= last_end:
            raise ValueError(
                f"no token belongs only to the passage {text[slice(*char_spans[number])][:60]!r}"
            )
        spans[number] = max(start, last_end), end  # a token in two passages is the first's
        last_end = end
    return [
        Passage(text[start:end], span) for (start, end), span in zip(char_spans, spans, strict=True)
    ]


def _is_pair(passage: Any) -> bool:
    """Whether this is (start, end) or (message, part), as tuple or list (JSON)."""
    return (
        isinstance(passage, tuple | list)
        and len(passage) == 2
        and all(isinstance(number, Integral) and not isinstance(number, bool) for number in passage)
    )


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]) -> str:
    return str(
        tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
        )
    )


def _characters(text: str, passage: Any) -> Span:
    """Characters of a passage in a text prompt."""
    if isinstance(passage, str):
        start = place_of(text, passage)
        return start, start + len(passage)
    if not _is_pair(passage):
        raise ValueError(
            "expected a passage as a text of the prompt, or its characters (start, end); got "
            f"{passage!r:.80}"
        )
    start, end = map(int, passage)
    if not 0 <= start < end <= len(text):
        raise ValueError(
            f"expected 0 <= start < end <= {len(text)}, the characters of the prompt; got {passage}"
        )
    return start, end


MARK = "\ue000"
"""A private-use character, put around a passage to find it in the template's output."""


def _characters_in_chat(
    tokenizer: PreTrainedTokenizerBase, full_text: str, original: Any, prompt: Any, passage: Any
) -> Span:
    """Characters of a passage in a chat after the template."""
    if isinstance(passage, str):
        text = passage.strip()  # many templates strip
        start = place_of(full_text, text, "name the message, by its number, or (message, part)")
        return start, start + len(text)
    number, start, text = _message_part(original, passage)
    prompt = list(prompt)  # without the answer, unlike `original`
    if number >= len(prompt):
        raise ValueError(f"expected a message of the prompt as context, got {passage}, the answer")
    if text.strip():
        content = str(prompt[number]["content"])
        start += len(text) - len(text.lstrip())
        end = start + len(text.strip())
        marked = f"{content[:start]}{MARK}{content[start:end]}{MARK}{content[end:]}"
        changed = {**prompt[number], "content": marked}
        rendered = _rendered(tokenizer, [*prompt[:number], changed, *prompt[number + 1 :]])
        if rendered.count(MARK) == 2 and rendered.replace(MARK, "") == full_text:
            return rendered.index(MARK), rendered.rindex(MARK) - 1
    # The template changes or drops it.
    start = place_of(full_text, text.strip(), "pass a text that occurs once")
    return start, start + len(text.strip())


def _message_part(messages: Any, passage: Any) -> tuple[int, int, str]:
    """Index of a message, start of the part in its text, and the part's text."""
    if not (_is_pair(passage) or (isinstance(passage, Integral) and not isinstance(passage, bool))):
        raise ValueError(
            "expected a passage of a chat as a text that occurs in it, the index of a message, or "
            f"(message, part); got {passage!r:.80}"
        )
    number, part = passage if _is_pair(passage) else (passage, None)
    try:
        number = range(len(messages))[number]
        content = messages[number]["content"]
        parts = [content] if isinstance(content, str) else list(content or ())
        texts = [_text(content_part) for content_part in parts]
        if part is None:
            return number, 0, "".join(texts)
        part = range(len(texts))[part]
    except (IndexError, KeyError) as error:
        raise ValueError(f"the chat has no message or part {passage}") from error
    return number, len("".join(texts[:part])), texts[part]


def _text(part: Any) -> str:
    return str(part["text"]) if isinstance(part, Mapping) else str(part)
