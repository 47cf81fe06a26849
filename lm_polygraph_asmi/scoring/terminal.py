"""A scored answer in a terminal: its text, explanation, and most fragile tokens."""

from collections.abc import Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from lm_polygraph_asmi.scoring.page import visible

CAPTION = (
    "Most fragile tokens. Chosen by: masks under which the token is the most likely one; "
    "alternative: the most frequent other."
)


def in_terminal(score: Any) -> Iterator[Text | Table]:
    """Texts and a table for a `Score`; no character of the answer controls the terminal."""
    yield Text(visible(score.scored_text))
    yield from map(Text, score.explanation)
    yield Text(CAPTION, style="dim")
    table = Table("token", "u", "", "MI", "chosen by", "alternative", box=None, header_style="dim")
    for token in sorted(score.tokens, key=lambda token: -token.u)[:5]:
        other = "" if token.alternative is None else repr(token.alternative)
        share = f" {token.alternative_share:.0%}" if other else ""
        table.add_row(Text(repr(token.text)), f"{token.u:.4f}", token.bar, f"{token.mi:.4f}",
                      f"{token.vote:.0%}", Text(other + share))  # fmt: skip
    yield table
