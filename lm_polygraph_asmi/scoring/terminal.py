"""A scored answer in a terminal: heat map, explanation, and tables of the most fragile tokens."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
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


def in_terminal(score: Any, width: int) -> Iterator[Text | Table]:
    """Lines and tables for a `Score`.

    Args:
        width: columns of the terminal.
    """
    shaded, bars = Text(), Text(style="red")
    for token in score.tokens:
        # Line breaks would split the two lines, and control characters would steer the terminal.
        text = Text(visible(token.text), style=ink(token))
        shaded.append_text(text)
        bars.append(token.bar * text.cell_len)
    # Wrapped here, so that each line of a long answer stays above its bars.
    cuts: list[tuple[int, int]] = []  # characters and columns before each cut
    columns = start = 0  # columns so far, and those of finished lines
    for position, character in enumerate(shaded.plain):
        wide = cell_len(character)
        if columns - start + wide > width:
            cuts.append((position, columns))
            start = columns
        columns += wide
    lines = shaded.divide([position for position, _ in cuts])
    for line, bar in zip(lines, bars.divide([column for _, column in cuts]), strict=True):
        yield from (line, bar)
    yield from (Text(line) for line in score.explanation)
    yield Text(
        "Most fragile tokens. Chosen by: masks under which the token is the most likely one; "
        "alternative: the most frequent other.",
        style="dim",
    )
    table = Table("token", "u", "MI", "chosen by", "alternative", box=None, header_style="dim")
    for token in sorted(score.tokens, key=lambda token: -token.u)[:5]:
        other = "" if token.alternative is None else repr(token.alternative)
        share = f" {token.alternative_share:.0%}" if other else ""
        table.add_row(Text(repr(token.text)), f"{token.u:.4f}", f"{token.mi:.4f}",
                      f"{token.vote:.0%}", Text(other + share))  # fmt: skip
    yield table
