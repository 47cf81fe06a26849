"""A self-contained HTML page of scores or decisions, light and dark, readable without colour."""

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from jinja2 import Environment, Template
from markupsafe import Markup

FULL_SHADE = 0.1  # nats of u from which a token has the darkest shade, on all pages
SIGNS = {"\n": "⏎", "\t": "⇥"}
"""Signs shown for line breaks and tabs. Other unprintable characters are shown as �."""
JOINERS = "\u200c\u200d"
"""Unprintable characters that join their neighbours into one grapheme, as in emoji or Persian."""


def visible(text: str) -> str:
    """Replace characters that control a terminal or the text direction of a page."""
    return "".join(c if c.isprintable() or c in JOINERS else SIGNS.get(c, "\ufffd") for c in text)


def _with_signs(text: str) -> str:
    """`visible`, but each line break and tab is kept after its sign."""
    return "".join(SIGNS[c] + c if c in SIGNS else visible(c) for c in text)


class Card(NamedTuple):
    """One score or decision on a page."""

    heading: str  # method and score, or the decision
    prompt: Any  # text or messages
    text: str  # the answer
    sentences: Sequence[str]  # the explanation; sentences that all cards share are written once
    short: str  # score or decision in the summary of several cards
    rank: float  # sorts the summary: the most uncertain first
    score: Any  # the `Score` whose tokens are shaded and listed; None: plain text


def pieces(tokens: Sequence[Any]) -> list[list[Any]]:
    """Group the tokens: tokens that together make up one character are one group."""
    joined: list[list[Any]] = [[]]
    for token in tokens:
        joined[-1].append(token)
        if token.text:
            joined.append([])
    return joined if joined[-1] else joined[:-1]


@cache
def template(name: str = "scoring/page.html.jinja") -> Template:
    """A Jinja template of the package, which escapes all values."""
    source = files("lm_polygraph_asmi").joinpath(name).read_text("utf-8")
    names = {"full_shade": FULL_SHADE, "pieces": pieces, "visible": visible}
    # Models write the answers, so every value is escaped.
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(source, globals=names | {"with_signs": _with_signs})


def render_part(card: Card) -> str:
    """HTML of one card, to be shown inside another page, such as a notebook."""
    module: Any = template().make_module()
    return str(Markup(module.style()) + Markup(module.card(card, [], 0)))


def render(cards: Sequence[Card], title: str) -> str:
    """A self-contained HTML page. If there are several cards, a summary comes first."""
    order = sorted(range(len(cards)), key=lambda number: cards[number].rank)
    first, *others = (card.sentences for card in cards)
    shared = [line for line in first if others and all(line in other for other in others)]
    return template().render(cards=cards, title=title, shared=shared, order=order)
