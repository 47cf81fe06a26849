"""Parts of a long answer: sentences, lines of code, list items, each with a score."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.maths.scores import aggregate

if TYPE_CHECKING:
    from lm_polygraph_asmi.scoring.tokens import Token

FENCE = re.compile(r"\s*(```|~~~)")
ITEM = re.compile(r"\s*([-*+•]|\(?\d{1,3}[.)])\s+\S")
ROW = re.compile(r"\s*\|.*\|\s*$")
HEADING = re.compile(r" {0,3}#{1,6}\s")
INDENTED = re.compile(r"( {4}| {0,3}\t)\s*\S")
"""A line of code outside a fence, unless it continues a list item."""
SENTENCE_END = re.compile(r"[.!?…؟।][\"'”’)\]]*\s|[。！？]")
"""A paragraph without one of these is one sentence, without a call of spaCy."""

UNSPACED = re.compile(r"[^。！？]*[。！？]+[”’」』）]*|[^。！？]+")
"""Sentences in scripts without spaces between them, which spaCy's rules do not split."""


@dataclass(frozen=True)
class Span:
    """A part of an answer. Not validated: the paper finds the effect for whole answers.

    Attributes:
        text: its characters, scored_text[start:end].
        start, end: character offsets in `Score.scored_text`.
        tokens: number of the answer's tokens that overlap it.
        u: over these tokens, aggregated as the score (default: mean), nats; higher = more fragile.
        mi, entropy: means over these tokens, nats.
        perplexity: mean negative log-likelihood under the unmasked model, nats.
        alternative: the subnetworks' most frequent replacement of one of its tokens, which is
            `instead_of`; None if there is none.
        alternative_share: share of masks that choose it, 0 to 1.

    Example:
        >>> first, second = scorer.score(prompt, " Edda Holm did. She came from Brask.").spans
        >>> isinstance(first, Span), first.text
        (True, 'Edda Holm did.')
    """

    text: str
    start: int
    end: int
    tokens: int
    u: float
    mi: float
    entropy: float
    perplexity: float
    alternative: str | None
    instead_of: str | None
    alternative_share: float


def segment_answer(text: str) -> list[tuple[int, int]]:
    """(start, end) offsets of an answer's sentences, lines of code, list items and table rows.

    Blank lines and code fences are in no part. spaCy's language-independent rules split sentences;
    it is imported only if a paragraph may hold two.
    """
    parts: list[tuple[int, int]] = []
    paragraph: tuple[int, int] | None = None
    fence, start, in_item = "", 0, False
    for line in text.splitlines(keepends=True):
        end = start + len(line)
        mark, item = FENCE.match(line), ITEM.match(line)
        continues = in_item and not (fence or mark or item) and line[0] in " \t" and line.strip()
        is_part = fence or mark or item or any(p.match(line) for p in (ROW, HEADING, INDENTED))
        if (is_part or continues or not line.strip()) and paragraph:
            parts += _sentences(text, *paragraph)
            paragraph = None
        if mark and (not fence or mark[1] == fence):
            fence = "" if fence else mark[1]
        elif continues:
            parts[-1] = (parts[-1][0], end)
        elif is_part and line.strip():
            parts.append((start, end))
        elif line.strip():
            paragraph = (paragraph[0] if paragraph else start, end)
        in_item = bool(continues or (item and not fence))
        start = end
    if paragraph:
        parts += _sentences(text, *paragraph)
    return [_trimmed(text, *part) for part in parts]


def _trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """Offsets without white space at either end."""
    part = text[start:end]
    return start + len(part) - len(part.lstrip()), start + len(part.rstrip())


def _sentences(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    part = text[start:end].rstrip()
    if not SENTENCE_END.search(part):
        yield start, end
        return
    for sentence in _splitter()(part).sents:
        for piece in UNSPACED.finditer(sentence.text):
            if piece[0].strip():
                first = start + sentence.start_char + piece.start()
                yield first, first + len(piece[0])


@cache
def _splitter() -> Any:
    import spacy

    # English knows "Mr." and "e.g."; the sentencizer has the sentence marks of all languages.
    pipeline = spacy.blank("en")
    pipeline.add_pipe("sentencizer")
    return pipeline


def span_of(
    text: str,
    start: int,
    end: int,
    tokens: Sequence["Token"],
    aggregation: str = ASMIConfig.aggregation,
) -> Span:
    """The `Span` of the tokens that overlap text[start:end].

    Args:
        aggregation: of u: "mean", "sum" or "max".

    Raises:
        ValueError: offsets outside the text, or no token between them.
    """
    if not 0 <= start < end <= len(text):
        raise ValueError(
            f"expected a span within the {len(text)} characters of the scored text, got {start} to "
            f"{end}"
        )
    # A token without characters belongs to the next one that has some.
    overlapping = [
        token for token in tokens if token.start < end and max(token.end, token.start + 1) > start
    ]
    if not overlapping:
        raise ValueError(f"expected a token in characters {start} to {end}, got none")
    replaced = [token for token in overlapping if token.alternative is not None]
    strongest = max(replaced, key=lambda token: token.alternative_share, default=None)
    mean = {name: float(np.mean([getattr(t, name) for t in overlapping]))
            for name in ("mi", "entropy", "log_likelihood")}  # fmt: skip
    return Span(
        text=text[start:end],
        start=start,
        end=end,
        tokens=len(overlapping),
        u=aggregate([token.u for token in overlapping], aggregation),
        mi=mean["mi"],
        entropy=mean["entropy"],
        perplexity=-mean["log_likelihood"],
        alternative=None if strongest is None else strongest.alternative,
        instead_of=None if strongest is None else strongest.text,
        alternative_share=0.0 if strongest is None else strongest.alternative_share,
    )
