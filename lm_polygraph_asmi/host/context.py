"""Where the context of an answer stands in its prompt: from characters to tokens."""

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

if TYPE_CHECKING:
    from lm_polygraph.utils.model import Model

Span = tuple[int, int]
NO_CONTEXT = (
    "sources other than 'all' need to know the context of each prompt: set data.context_regex (in "
    "a calculator of your own, context_regex) to a regular expression whose first group it is"
)


def matched(regex: str, prompt: str) -> Span | None:
    """Characters of the first group where a regular expression matches; None where it does not.

    A group without a character is no match: there is no context to take anything from.

    Raises:
        ValueError: no regular expression, or one without a group.
    """
    try:
        compiled = re.compile(regex)
    except re.error as error:
        raise ValueError(
            f"context_regex {regex!r} is no regular expression as Python has them: {error}"
        ) from error
    if not compiled.groups:
        raise ValueError(f"context_regex {regex!r} has no group: put the context into (...)")
    found = compiled.search(prompt)
    return found.span(1) if found and found[1] else None


def unmatched(regex: str, prompts: Iterable[tuple[str, str]]) -> list[str]:
    """Ids of the prompts, given as (id, prompt), in which no context is found."""
    return [name for name, prompt in prompts if matched(regex, prompt) is None]


def token_spans(
    tokenizer: PreTrainedTokenizerBase, text: str, ids: Sequence[int], places: Sequence[Span]
) -> list[Span]:
    """Tokens that hold characters of these places, the ends of a place and all between.

    A token that holds a place's first character and others before it, such as the space or line
    break that many tokenizers put in front of a word, counts as the place's.

    Args:
        text: what was made into the tokens `ids`, a chat template's words included.
        places: characters (start, end) of it, in any order.

    Raises:
        ValueError: the tokenizer says no offsets, makes other tokens of the text, or has no token
            for a place.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} does not say which characters its tokens stand for, so "
            "the context's tokens are not known: load the fast tokenizer (use_fast=True)"
        )
    tokenize: Any = tokenizer
    for special in (True, False):
        found = tokenize(text, add_special_tokens=special, return_offsets_mapping=True)
        if list(found["input_ids"]) == list(ids):
            break
    else:
        raise ValueError(
            "the prompt's text gives other tokens than the prompt had, so the context's tokens are "
            "not known: give the context as positions of tokens"
        )
    spans = []
    for start, end in places:
        own = [
            number
            for number, (first, behind) in enumerate(found["offset_mapping"])
            if first < end and behind > start
        ]
        if not own:
            raise ValueError(f"no token stands for the context {text[start:end][:80]!r}")
        spans.append((own[0], own[-1] + 1))
    return spans


def context_span(model: "Model", prompt: str, ids: Sequence[int], regex: str) -> Span:
    """Tokens of a benchmark prompt that hold its context.

    Raises:
        ValueError: the regular expression does not match, or the tokens are not known; see
            `token_spans`.
    """
    place = matched(regex, prompt)
    if place is None:
        raise ValueError(f"context_regex {regex!r} finds no context in the prompt {prompt[:200]!r}")
    text = prompt
    if getattr(model, "instruct", False):  # as LM-Polygraph puts a question
        text = str(
            model.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
            )
        )
        # A template may strip the question.
        offset = place_of(text, prompt.strip()) - (len(prompt) - len(prompt.lstrip()))
        place = place[0] + offset, place[1] + offset
    return token_spans(model.tokenizer, text, ids, [place])[0]


def place_of(text: str, part: str, otherwise: str = "give its characters as (start, end)") -> int:
    """Where a part stands in a text.

    Args:
        otherwise: what to do where it does not stand there once.

    Raises:
        ValueError: nowhere, or in several places.
    """
    times = text.count(part) if part else 0
    if times != 1 or text.find(part) != text.rfind(part):
        where = "nowhere" if not times else "in several places"
        raise ValueError(
            f"{part[:80]!r} stands {where} in the prompt, and must stand in it once: {otherwise}"
        )
    return text.index(part)
