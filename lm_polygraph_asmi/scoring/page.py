"""The page of scored answers: self-contained, light and dark, readable without colour."""

import math
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import regex
from jinja2 import Environment, Template
from markupsafe import Markup, escape

from lm_polygraph_asmi.scoring.tokens import FULL_SHADE

LEGEND = (0.0, 0.001, 0.01, 0.03, 0.1)
"""u in nats that the legend shows."""
SIGNS = {"\n": "⏎", "\t": "⇥"}
"""How line breaks and tabs are shown; other unprintable characters as �."""
JOINERS = "\u200c\u200d"
"""Unprintable, but they join their neighbours into one grapheme: emoji, words in Persian."""
FIXED_WIDTH = re.compile(
    r"^[ ]{0,3}(?P<fence>```|~~~).*?(?:^[ ]{0,3}(?P=fence)[^\n]*$|\Z)"  # a block of code
    r"|^[ ]*\|[^\n]*\|[ ]*$"  # a row of a table
    r"|`[^`\n]+`",
    re.MULTILINE | re.DOTALL,
)


def visible(text: str) -> str:
    """Replace characters that control a terminal or the text direction of a page."""
    return "".join(c if c.isprintable() or c in JOINERS else SIGNS.get(c, "\ufffd") for c in text)


def _with_signs(text: str) -> Markup:
    """`visible` for HTML; a real line break or tab follows its sign."""
    shown = str(escape(visible(text)))
    for character, sign in SIGNS.items():
        marked = f'<span class="sign" aria-hidden="true">{sign}</span>{character}'
        shown = shown.replace(sign, marked) if character in text else shown
    return Markup(shown)


def _without_signs(text: str) -> str:
    """`visible` for a prompt: line breaks and tabs stay, without signs."""
    return "".join(c if c in SIGNS else visible(c) for c in text)


class Piece(NamedTuple):
    """Tokens of one grapheme, such as the bytes of an emoji; usually a single token.

    Attributes:
        text: their characters.
        tokens: the tokens.
        code: whether to show it in a fixed-width font.
    """

    text: str
    tokens: list[Any]
    code: bool

    @property
    def shade(self) -> float:
        return max(token.shade for token in self.tokens)


def pieces(tokens: Sequence[Any]) -> list[Piece]:
    """Join tokens that split a grapheme."""
    text = "".join(token.text for token in tokens)
    grapheme_ends = {sign.end() for sign in regex.finditer(r"\X", text)}
    code_spans = [match.span() for match in FIXED_WIDTH.finditer(text)]
    joined: list[Piece] = []
    start, piece_tokens = 0, []
    end = 0
    for token in tokens:
        piece_tokens.append(token)
        end += len(token.text)
        if end > start and end in grapheme_ends:
            is_code = any(first < end and start < last for first, last in code_spans)
            joined.append(Piece(text[start:end], piece_tokens, is_code))
            start, piece_tokens = end, []
    if piece_tokens:  # tokens of an incomplete character
        joined.append(Piece(text[start:], piece_tokens, False))
    return joined


def short_verdict(score: Any) -> str:
    """The verdict in a few words."""
    if not score.answered:
        return "empty answer"
    decided = {True: "accept", False: "abstain", None: ""}[score.accept]
    if score.error_probability is None:
        return decided or "no verdict"
    mark = ", confident but fragile" if score.confident_but_fragile else ""
    text = f"probability of error {score.error_probability:.2f}{mark}"
    return f"{decided}, {text}" if decided else text


def probability(likelihood: float) -> str:
    """exp(-likelihood) in three digits; as a power of e where it would underflow.

    Args:
        likelihood: negative log-likelihood, nats.
    """
    return f"{math.exp(-likelihood):.3g}" if likelihood < 700 else f"e^-{likelihood:.0f}"


def _by_verdict(score: Any) -> tuple[Any, ...]:
    """Sort key: empty answers first, then by falling probability of error."""
    chance = score.error_probability
    return (score.answered, chance is None, -(chance or 0), -score.score)


def _ranks(scores: Sequence[Any], key: Any) -> list[int]:
    order = sorted(range(len(scores)), key=lambda number: key(scores[number]))
    return [order.index(number) for number in range(len(scores))]


def _shared(lists: Sequence[Sequence[str]]) -> list[str]:
    """Lines that all lists share; none for a single list."""
    if len(lists) < 2:
        return []
    return [line for line in lists[0] if all(line in other for other in lists[1:])]


@cache
def _template() -> Template:
    source = files("lm_polygraph_asmi.scoring").joinpath("page.html.jinja").read_text("utf-8")
    # Models write the answers: escape everything.
    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        source,
        globals={
            "legend_shades": [(u, min(1.0, (u / FULL_SHADE) ** 0.5)) for u in LEGEND],
            "pieces": pieces,
            "visible": visible,
            "with_signs": _with_signs,
            "without_signs": _without_signs,
            "short_verdict": short_verdict,
            "probability": probability,
        },
    )


def render_part(score: Any) -> str:
    """HTML of one `Score`, as part of a page, such as a notebook's output."""
    module: Any = _template().make_module()
    return str(Markup(module.style()) + Markup(module.card(score, [], 0)))


def render(scores: Sequence[Any], title: str) -> str:
    """A self-contained HTML page of `Score`s; several have a summary on top."""
    return _template().render(
        scores=scores,
        title=title,
        shared=_shared([score.verdict for score in scores]),
        by_score=_ranks(scores, lambda score: -score.score),
        by_verdict=_ranks(scores, _by_verdict),
    )
