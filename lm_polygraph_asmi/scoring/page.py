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

FULL_SHADE = 0.1
"""Nats of u from which a token has the darkest shade: the same on every page, so pages compare."""
LEGEND = (0.0, 0.001, 0.01, 0.03, 0.1)
"""Nats of u that the legend shows."""
SIGNS = {"\n": "⏎", "\t": "⇥"}
"""How characters that do not print are shown; any other as �."""
JOINERS = "\u200c\u200d"
"""Do not print either, but make what stands around them one sign: emoji, and words in Persian."""
SOURCES_SAY = (
    "Share of MI: MI under masks that take from heads only what comes from a source, over MI under "
    "the same masks where they take all (scope response). Shares need not add up. What an answer "
    "hangs on does not say whether it is right: on SmolLM2-135M a large share of the passage went "
    "with right answers on one data set, and with neither on another."
)
FIXED_WIDTH = re.compile(
    r"^[ ]{0,3}(?P<fence>```|~~~).*?(?:^[ ]{0,3}(?P=fence)[^\n]*$|\Z)"  # a block of code
    r"|^[ ]*\|[^\n]*\|[ ]*$"  # a row of a table
    r"|`[^`\n]+`",
    re.MULTILINE | re.DOTALL,
)


def visible(text: str) -> str:
    """A text without characters that steer a terminal or turn the direction of a page."""
    return "".join(c if c.isprintable() or c in JOINERS else SIGNS.get(c, "\ufffd") for c in text)


def _flowing(text: str) -> Markup:
    """The same in a page, where a line break or tab does what it says behind its sign."""
    shown = str(escape(visible(text)))
    for character, sign in SIGNS.items():
        marked = f'<span class="sign" aria-hidden="true">{sign}</span>{character}'
        shown = shown.replace(sign, marked) if character in text else shown
    return Markup(shown)


def _unsigned(text: str) -> str:
    """A prompt's text: line breaks and tabs do what they say, and nothing points at them."""
    return "".join(c if c in SIGNS else visible(c) for c in text)


class Piece(NamedTuple):
    """Tokens that share a sign, such as the bytes of an emoji; mostly a single one.

    Attributes:
        text: their characters.
        tokens: themselves.
        code: whether it is shown in a fixed width.
    """

    text: str
    tokens: list[Any]
    code: bool

    @property
    def shade(self) -> float:
        return max(token.shade for token in self.tokens)

    @property
    def hangs(self) -> float | None:
        """The context's share of MI; None where no context was given."""
        shares = [token.context_share for token in self.tokens]
        return None if None in shares else max(shares)


def pieces(tokens: Sequence[Any]) -> list[Piece]:
    """Tokens joined where a border between them would part a sign."""
    text = "".join(token.text for token in tokens)
    whole = {sign.end() for sign in regex.finditer(r"\X", text)}
    code = [match.span() for match in FIXED_WIDTH.finditer(text)]
    found: list[Piece] = []
    start, own = 0, []
    end = 0
    for token in tokens:
        own.append(token)
        end += len(token.text)
        if end > start and end in whole:
            inside = any(one < end and start < other for one, other in code)
            found.append(Piece(text[start:end], own, inside))
            start, own = end, []
    if own:  # tokens of a character that is never finished
        found.append(Piece(text[start:], own, False))
    return found


def standing(score: Any) -> str:
    """The verdict in a few words."""
    if not score.answered:
        return "answered nothing"
    decided = {True: "accepted", False: "refused", None: ""}[score.accept]
    if score.error_probability is None:
        return decided or "no verdict"
    mark = ", confident but fragile" if score.confident_but_fragile else ""
    said = f"probability of error {score.error_probability:.2f}{mark}"
    return f"{decided}, {said}" if decided else said


def probability(likelihood: float) -> str:
    """exp(-likelihood) in three digits; of a long answer, where none are left, as a power of e.

    Args:
        likelihood: negative and logarithmic, nats.
    """
    return f"{math.exp(-likelihood):.3g}" if likelihood < 700 else f"e^-{likelihood:.0f}"


def _by_verdict(score: Any) -> tuple[Any, ...]:
    """What asks for a reader first comes first."""
    chance = score.error_probability
    return (score.answered, chance is None, -(chance or 0), -score.score)


def _ranks(scores: Sequence[Any], key: Any) -> list[int]:
    order = sorted(range(len(scores)), key=lambda number: key(scores[number]))
    return [order.index(number) for number in range(len(scores))]


def _shared(lists: Sequence[Sequence[str]]) -> list[str]:
    """Lines that all of several lists hold; none of a single list."""
    if len(lists) < 2:
        return []
    return [line for line in lists[0] if all(line in other for other in lists[1:])]


@cache
def _template() -> Template:
    source = files("lm_polygraph_asmi.scoring").joinpath("page.html.jinja").read_text("utf-8")
    # Answers come from models: everything is escaped.
    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        source,
        globals={
            "full_shade": FULL_SHADE,
            "legend_at": [(u, min(1.0, (u / FULL_SHADE) ** 0.5)) for u in LEGEND],
            "pieces": pieces,
            "visible": visible,
            "flowing": _flowing,
            "unsigned": _unsigned,
            "standing": standing,
            "probability": probability,
            "sources_say": SOURCES_SAY,
        },
    )


def render_part(score: Any) -> str:
    """One answer, a `Score`, as a part of a page, such as a notebook's output."""
    module: Any = _template().make_module()
    return str(Markup(module.style()) + Markup(module.card(score, [], 0)))


def render(scores: Sequence[Any], title: str) -> str:
    """A whole page of answers, each a `Score`; above several of them a summary."""
    return _template().render(
        scores=scores,
        title=title,
        shared=_shared([score.verdict for score in scores]),
        by_score=_ranks(scores, lambda score: -score.score),
        by_verdict=_ranks(scores, _by_verdict),
    )
