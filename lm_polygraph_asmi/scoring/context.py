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
    places = [_place(whole, given if chat else None, passage) for passage in wanted]
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


def _place(whole: str, messages: Any, passage: Any) -> Span:
    """Characters of a passage in the prompt.

    Args:
        messages: those of a chat, as they were given; None of a text prompt.
    """
    if isinstance(passage, str):
        text = passage
    elif messages is None:
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
    else:
        text = _of_message(messages, passage)
    text = text if messages is None else text.strip()  # as many templates do
    start = place_of(whole, text)
    return start, start + len(text)


def _of_message(messages: Any, passage: Any) -> str:
    """The text of a message, or of a part of one."""
    if not (_is_pair(passage) or (isinstance(passage, Integral) and not isinstance(passage, bool))):
        raise ValueError(
            "a passage of a chat is a text that stands in it, the number of a message, or "
            f"(message, part); got {passage!r:.80}"
        )
    number, part = passage if _is_pair(passage) else (passage, None)
    try:
        content = messages[number]["content"]
        if part is not None:
            content = [content] if isinstance(content, str) else content
            content = content[part]
    except (IndexError, KeyError) as error:
        raise ValueError(f"the chat has no message or part {passage}") from error
    if isinstance(content, list | tuple):
        content = "".join(_text(own) for own in content)
    return _text(content)


def _text(part: Any) -> str:
    return str(part["text"]) if isinstance(part, Mapping) else str(part)
