"""A long answer in parts: its sentences, lines of code and items of lists, each with a score."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.results.aggregation import aggregate

if TYPE_CHECKING:
    from lm_polygraph_asmi.scoring.calibration import Calibration
    from lm_polygraph_asmi.scoring.result import Token

FENCE = re.compile(r"\s*(```|~~~)")
ITEM = re.compile(r"\s*([-*+•]|\(?\d{1,3}[.)])\s+\S")
ROW = re.compile(r"\s*\|.*\|\s*$")
HEADING = re.compile(r" {0,3}#{1,6}\s")
INDENTED = re.compile(r"( {4}| {0,3}\t)\s*\S")
"""A line of code outside a fence, unless it goes on with an item of a list."""
SENTENCE_END = re.compile(r"[.!?…؟।][\"'”’)\]]*\s|[。！？]")
"""Without one of these inside, a paragraph is a sentence, and spaCy need not be asked."""

UNSPACED = re.compile(r"[^。！？]*[。！？]+[”’」』）]*|[^。！？]+")
"""Sentences of scripts that put no space behind them, which spaCy's rules leave in one."""


@dataclass(frozen=True)
class Span:
    """A part of an answer.

    Attributes:
        text: its characters, scored_text[start:end].
        start, end: character offsets in `Score.scored_text`.
        tokens: so many of the answer's tokens reach into it.
        u: of them as the score is of all tokens, their mean if nothing else was asked for, nats.
        mi, entropy: means over them, nats.
        perplexity: exp of their mean negative log-likelihood under the unmasked model.
        alternative: what the subnetworks would most often say in place of one of its tokens, and
            `instead_of` which one; None if there is no other choice.
        alternative_share: of the masks for it.
        validated: whether labelled parts of answers showed that u ranks errors among them. The
            paper finds the effect for whole answers alone.
        error_probability: calibrated on these; None if not validated.

    Example:
        >>> first, second = scorer.score(prompt, " Edda Holm did. She came from Brask.").spans
        >>> isinstance(first, Span), first.text, first.validated
        (True, 'Edda Holm did.', False)
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
    validated: bool = False
    error_probability: float | None = None


def segment_answer(text: str) -> list[tuple[int, int]]:
    """Offsets of an answer's sentences, lines of code, items of lists and rows of tables.

    Blank lines and fences of code belong to none. Sentences are found by spaCy's rules, which know
    no language; it is imported only where a paragraph may hold two.
    """
    found: list[tuple[int, int]] = []
    paragraph: tuple[int, int] | None = None
    fence, start, in_item = "", 0, False
    for line in text.splitlines(keepends=True):
        end = start + len(line)
        mark, item = FENCE.match(line), ITEM.match(line)
        goes_on = in_item and not (fence or mark or item) and line[0] in " \t" and line.strip()
        own = fence or mark or item or any(p.match(line) for p in (ROW, HEADING, INDENTED))
        if (own or goes_on or not line.strip()) and paragraph:
            found += _sentences(text, *paragraph)
            paragraph = None
        if mark and (not fence or mark[1] == fence):
            fence = "" if fence else mark[1]
        elif goes_on:
            found[-1] = (found[-1][0], end)
        elif own and line.strip():
            found.append((start, end))
        elif line.strip():
            paragraph = (paragraph[0] if paragraph else start, end)
        in_item = bool(goes_on or (item and not fence))
        start = end
    if paragraph:
        found += _sentences(text, *paragraph)
    return [_trimmed(text, *place) for place in found]


def _trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """Offsets without the white space at both ends."""
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

    pipeline = spacy.blank("en")  # knows "Mr." and "e.g."; the marks are those of any language
    pipeline.add_pipe("sentencizer")
    return pipeline


def span_of(
    text: str,
    start: int,
    end: int,
    tokens: Sequence["Token"],
    calibration: "Calibration | None" = None,
    aggregation: str = ASMIConfig.aggregation,
) -> Span:
    """What the tokens that reach into text[start:end] say together.

    Args:
        calibration: labelled parts that were scored with the same settings.
        aggregation: of u.

    Raises:
        ValueError: offsets outside the text, or none of its tokens between them.
    """
    if not 0 <= start < end <= len(text):
        raise ValueError(
            f"a span must lie within the {len(text)} characters of the scored text, got "
            f"{start} to {end}"
        )
    # A token without characters is part of the next one that has some.
    own = [
        token for token in tokens if token.start < end and max(token.end, token.start + 1) > start
    ]
    if not own:
        raise ValueError(f"no token of the answer reaches into characters {start} to {end}")
    others = [token for token in own if token.alternative is not None]
    strongest = max(others, key=lambda token: token.alternative_share, default=None)
    mean = {name: float(np.mean([getattr(t, name) for t in own]))
            for name in ("mi", "entropy", "log_likelihood")}  # fmt: skip
    u = aggregate([token.u for token in own], aggregation)
    return Span(
        text=text[start:end],
        start=start,
        end=end,
        tokens=len(own),
        u=u,
        mi=mean["mi"],
        entropy=mean["entropy"],
        perplexity=math.exp(-mean["log_likelihood"]),
        alternative=None if strongest is None else strongest.alternative,
        instead_of=None if strongest is None else strongest.text,
        alternative_share=0.0 if strongest is None else strongest.alternative_share,
        validated=calibration is not None and calibration.ranks,
        error_probability=None if calibration is None else calibration.error_probability(u),
    )
