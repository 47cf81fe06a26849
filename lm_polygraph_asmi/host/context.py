"""Position of the context in a prompt: from characters to tokens."""

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

if TYPE_CHECKING:
    from lm_polygraph.utils.model import Model

Span = tuple[int, int]
NO_CONTEXT = (
    "sources other than 'all' need to know the context of each prompt: set data.context_regex (in "
    "your own calculator, context_regex) to a regular expression whose first group matches it"
)


def matched(regex: str, prompt: str) -> Span | None:
    """Characters of a regular expression's first group in a prompt; None if it does not match.

    An empty group counts as no match.

    Raises:
        ValueError: an invalid regular expression, or one without a group.
    """
    try:
        compiled = re.compile(regex)
    except re.error as error:
        raise ValueError(
            f"context_regex {regex!r} is not a valid Python regular expression: {error}"
        ) from error
    if not compiled.groups:
        raise ValueError(f"context_regex {regex!r} has no group: put the context into (...)")
    match = compiled.search(prompt)
    return match.span(1) if match and match[1] else None


def unmatched(regex: str, prompts: Iterable[tuple[str, str]]) -> list[str]:
    """Ids of the prompts, as (id, prompt), without a context."""
    return [name for name, prompt in prompts if matched(regex, prompt) is None]


def token_spans(
    tokenizer: PreTrainedTokenizerBase, text: str, ids: Sequence[int], places: Sequence[Span]
) -> list[Span]:
    """Token spans that cover these character spans.

    A token that also has characters before the span, such as the space or line break that many
    tokenizers put before a word, belongs to the span.

    Args:
        text: text of the tokens `ids`, including a chat template.
        places: character spans (start, end) of the text, in any order.

    Raises:
        ValueError: the tokenizer has no offsets, splits the text into other tokens, or has no
            token for a span.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} gives no character offsets, so the context's tokens are "
            "unknown: load the fast tokenizer (use_fast=True)"
        )
    tokenize: Any = tokenizer
    for special in (True, False):
        encoded = tokenize(text, add_special_tokens=special, return_offsets_mapping=True)
        if list(encoded["input_ids"]) == list(ids):
            break
    else:
        raise ValueError(
            "the text tokenizes to other ids than the prompt, so the context's tokens "
            "are unknown: give the context as token positions"
        )
    spans = []
    for start, end in places:
        covering = [
            number
            for number, (first, after) in enumerate(encoded["offset_mapping"])
            if first < end and after > start
        ]
        if not covering:
            raise ValueError(f"no token covers the context {text[start:end][:80]!r}")
        spans.append((covering[0], covering[-1] + 1))
    return spans


def context_span(model: "Model", prompt: str, ids: Sequence[int], regex: str) -> Span:
    """Token span of the context in a benchmark prompt.

    Raises:
        ValueError: the regular expression does not match, or the tokens are unknown; see
            `token_spans`.
    """
    place = matched(regex, prompt)
    if place is None:
        raise ValueError(f"context_regex {regex!r} finds no context in the prompt {prompt[:200]!r}")
    text = prompt
    if getattr(model, "instruct", False):  # as LM-Polygraph applies the template
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
    """Start of a part in a text, which must contain it once.

    Args:
        otherwise: advice that ends the error message.

    Raises:
        ValueError: the part is missing, or occurs several times.
    """
    times = text.count(part) if part else 0
    if times != 1 or text.find(part) != text.rfind(part):
        where = "nowhere" if not times else "in several places"
        raise ValueError(
            f"expected {part[:80]!r} once in the prompt, found it {where}: {otherwise}"
        )
    return text.index(part)
