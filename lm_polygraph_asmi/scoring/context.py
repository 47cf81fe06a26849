"""The context that a caller names, as tokens of the prompt: texts, characters, messages, parts."""

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
        tokens: which tokens of the prompt hold them.
    """

    text: str
    tokens: Span


def passages_of(
    tokenizer: PreTrainedTokenizerBase,
    given: Any,
    prompt: Prompt,
    prompt_ids: Sequence[int],
    context: Any,
) -> list[Passage]:
    """The passages that `context` names, in its order.

    Args:
        given: the prompt as the caller gave it, parts of messages included.
        prompt: as it is scored, text or messages of text.
        prompt_ids: its tokens.
        context: one passage or a list of them. A passage is a text that stands in the prompt once,
            or, of a text prompt, its characters (start, end), or, of a chat, the number of a
            message, or (message, part).

    Raises:
        ValueError: no passage, one that is not there or there several times, two that overlap.
    """
    chat = not isinstance(prompt, str)
    whole = prompt if isinstance(prompt, str) else _rendered(tokenizer, prompt)
    pair = _is_pair(context) and (isinstance(context, tuple) or not chat)
    single = pair or not isinstance(context, Sequence) or isinstance(context, str)
    wanted = [context] if single else list(context)  # of a chat, [0, 2] are two messages
    if not wanted:
        raise ValueError(f"the context names no passage: {context!r}")
    if chat:
        places = [_place_in_chat(tokenizer, whole, given, prompt, passage) for passage in wanted]
    else:
        places = [_place(whole, passage) for passage in wanted]
    for one, other in pairwise(sorted(places)):
        if other[0] < one[1]:
            raise ValueError(
                f"the passages {whole[slice(*one)][:60]!r} and {whole[slice(*other)][:60]!r} of "
                "the context overlap: a token has one source"
            )
    found = token_spans(tokenizer, whole, prompt_ids, places)
    behind = 0
    for number in sorted(range(len(found)), key=lambda number: places[number]):
        start, end = found[number]
        if end <= behind:
            raise ValueError(
                f"no token stands for the passage {whole[slice(*places[number])][:60]!r} alone"
            )
        found[number] = max(start, behind), end  # a token of two passages is the first one's
        behind = end
    return [
        Passage(whole[start:end], span) for (start, end), span in zip(places, found, strict=True)
    ]


def _is_pair(passage: Any) -> bool:
    """Whether this is (start, end) or (message, part); JSON has lists for them."""
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


def _place(whole: str, passage: Any) -> Span:
    """Characters of a passage in a text prompt."""
    if isinstance(passage, str):
        start = place_of(whole, passage)
        return start, start + len(passage)
    if not _is_pair(passage):
        raise ValueError(
            "a passage is a text that stands in the prompt, or its characters (start, end); "
            f"got {passage!r:.80}"
        )
    start, end = map(int, passage)
    if not 0 <= start < end <= len(whole):
        raise ValueError(
            f"the context must lie within the {len(whole)} characters of the prompt and hold "
            f"at least one, got {passage}"
        )
    return start, end


MARK = "\ue000"
"""A character of nobody's, put around a passage to see where a template takes it."""


def _place_in_chat(
    tokenizer: PreTrainedTokenizerBase, whole: str, given: Any, prompt: Any, passage: Any
) -> Span:
    """Characters of a passage in a chat, as the template writes it."""
    if isinstance(passage, str):
        text = passage.strip()  # as many templates do
        start = place_of(whole, text, "name the message, by its number, or (message, part)")
        return start, start + len(text)
    number, start, text = _of_message(given, passage)
    prompt = list(prompt)  # without the answer, which the chat as given may end in
    if number >= len(prompt):
        raise ValueError(f"message {passage} is the answer: the context stands in the prompt")
    if text.strip():
        content = str(prompt[number]["content"])
        start += len(text) - len(text.lstrip())
        end = start + len(text.strip())
        marked = f"{content[:start]}{MARK}{content[start:end]}{MARK}{content[end:]}"
        changed = {**prompt[number], "content": marked}
        seen = _rendered(tokenizer, [*prompt[:number], changed, *prompt[number + 1 :]])
        if seen.count(MARK) == 2 and seen.replace(MARK, "") == whole:
            first, behind = seen.index(MARK), seen.rindex(MARK) - 1
            return first, behind
    # The template writes it otherwise, or not at all.
    start = place_of(whole, text.strip(), "give a text that stands in it once")
    return start, start + len(text.strip())


def _of_message(messages: Any, passage: Any) -> tuple[int, int, str]:
    """The number of a message, where in its text a part of it begins, and the part's text."""
    if not (_is_pair(passage) or (isinstance(passage, Integral) and not isinstance(passage, bool))):
        raise ValueError(
            "a passage of a chat is a text that stands in it, the number of a message, or "
            f"(message, part); got {passage!r:.80}"
        )
    number, part = passage if _is_pair(passage) else (passage, None)
    try:
        number = range(len(messages))[number]
        content = messages[number]["content"]
        parts = [content] if isinstance(content, str) else list(content or ())
        texts = [_text(own) for own in parts]
        if part is None:
            return number, 0, "".join(texts)
        part = range(len(texts))[part]
    except (IndexError, KeyError) as error:
        raise ValueError(f"the chat has no message or part {passage}") from error
    return number, len("".join(texts[:part])), texts[part]


def _text(part: Any) -> str:
    return str(part["text"]) if isinstance(part, Mapping) else str(part)
