"""The page of scores and decisions: self-contained, light and dark, readable without colour."""

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from jinja2 import Environment, Template
from markupsafe import Markup

FULL_SHADE = 0.1
"""u in nats from which a token has the darkest shade; the same everywhere."""
SIGNS = {"\n": "⏎", "\t": "⇥"}
"""How line breaks and tabs are shown; other unprintable characters as �."""
JOINERS = "\u200c\u200d"
"""Unprintable, but they join their neighbours into one grapheme: emoji, words in Persian."""


def visible(text: str) -> str:
    """Replace characters that control a terminal or the text direction of a page."""
    return "".join(c if c.isprintable() or c in JOINERS else SIGNS.get(c, "\ufffd") for c in text)


def _with_signs(text: str) -> str:
    """`visible`, with each line break and tab kept behind its sign."""
    return "".join(SIGNS[c] + c if c in SIGNS else visible(c) for c in text)


class Card(NamedTuple):
    """A score or a decision on a page."""

    heading: str  # its name and number
    prompt: Any  # text or messages
    text: str  # the answer
    sentences: Sequence[str]  # what all cards of a page say is written once
    short: str  # the number or the word for it in the list of several cards
    rank: float  # key by which that list is sorted, the most uncertain first
    score: Any  # the `Score` whose tokens are shaded and listed; None: the answer as plain text


def pieces(tokens: Sequence[Any]) -> list[list[Any]]:
    """Tokens in groups: those that make up one character together are a group."""
    joined: list[list[Any]] = [[]]
    for token in tokens:
        joined[-1].append(token)
        if token.text:
            joined.append([])
    return joined if joined[-1] else joined[:-1]


@cache
def template(name: str = "scoring/page.html.jinja") -> Template:
    """A template of the package, where everything is escaped."""
    source = files("lm_polygraph_asmi").joinpath(name).read_text("utf-8")
    names = {"full_shade": FULL_SHADE, "pieces": pieces, "visible": visible}
    # Models write the answers: escape everything.
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(source, globals=names | {"with_signs": _with_signs})


def render_part(card: Card) -> str:
    """HTML of one card, as part of a page, such as a notebook's output."""
    module: Any = template().make_module()
    return str(Markup(module.style()) + Markup(module.card(card, [], 0)))


def render(cards: Sequence[Card], title: str) -> str:
    """A self-contained HTML page; several cards have a summary on top."""
    order = sorted(range(len(cards)), key=lambda number: cards[number].rank)
    first, *others = (card.sentences for card in cards)
    shared = [line for line in first if others and all(line in other for other in others)]
    return template().render(cards=cards, title=title, shared=shared, order=order)
