"""A scored answer in a terminal: shades, explanation, and a table of the most fragile tokens."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from lm_polygraph_asmi.scoring.page import visible

if TYPE_CHECKING:
    from lm_polygraph_asmi.scoring.tokens import Token


def ink(token: "Token") -> str:
    """Rich style of a token: the darker, the more fragile."""
    if token.shade <= 0.05:
        return ""
    red, rest = round(255 - 100 * token.shade), round(235 - 200 * token.shade)
    return f"{'white' if token.shade > 0.5 else 'black'} on rgb({red},{rest},{rest})"


def in_terminal(score: Any) -> Iterator[Text | Table]:
    """The shaded answer, the explanation, and the most fragile tokens of a `Score`."""
    # Control characters would steer the terminal.
    yield Text.assemble(*((visible(token.text), ink(token)) for token in score.tokens))
    yield from map(Text, score.explanation)
    yield Text(
        "Most fragile tokens. Chosen by: masks under which the token is the most likely one; "
        "alternative: the most frequent other.",
        style="dim",
    )
    table = Table("token", "u", "", "MI", "chosen by", "alternative", box=None, header_style="dim")
    for token in sorted(score.tokens, key=lambda token: -token.u)[:5]:
        other = "" if token.alternative is None else repr(token.alternative)
        share = f" {token.alternative_share:.0%}" if other else ""
        table.add_row(Text(repr(token.text)), f"{token.u:.4f}", token.bar, f"{token.mi:.4f}",
                      f"{token.vote:.0%}", Text(other + share))  # fmt: skip
    yield table
