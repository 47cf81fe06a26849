"""Tables as LaTeX for a paper: booktabs, full captions, column heads grouped by model."""

import math
import re
from collections.abc import Sequence
from itertools import groupby
from textwrap import wrap

import numpy as np
import pandas as pd

from lm_polygraph_asmi.report.item import ReportItem, brief, escape

LAYOUTS = (
    (47, "table", r"\small"),
    (101, "table*", r"\small"),
    (136, "table*", r"\scriptsize"),
    (160, "sidewaystable*", r"\scriptsize"),
)
"""(characters in a row, float in which they fit on a two-column page, font size). No text is scaled
below 6 points; wider tables are split."""
GAP = 3
"""Approximate space between columns, in characters."""
ROWS = 25
"""Lines of a float; the caption takes the rest of the page."""
MANY = 8
"""With more settings side by side, standard errors are only in the CSV file."""
LONG, LINE = 40, 24
"""A column of longer texts breaks its lines; characters of such a line."""
RESIZED = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%" "\n"
"""Never wider than the text, never stretched."""
PREAMBLE = r"\usepackage{array,booktabs,graphicx,amssymb,textcomp,rotating}"
"""Packages that a document with these tables needs."""


def latex_tables(item: ReportItem) -> str:
    """An item's table, in as many floats as fit on pages; needs `PREAMBLE`.

    Each part of a table that is too wide repeats the columns that identify its rows.
    """
    assert item.table is not None
    by_group = {group.label: group for group in item.groups}
    many = sum(name in by_group for name in item.table) > MANY
    shown = item.shown("latex", many).map(brief)
    formats = [_format(item.table[name]) for name in item.table]
    groups, heads, widths = [], [], []
    for name, column_format, (_, values) in zip(item.table, formats, shown.items(), strict=True):
        group = by_group.get(name)  # its label: model above, data set below
        head = group.dataset + group.suffix if group else brief(str(name))
        width = LINE if "p{" in column_format else max(map(_width, values), default=0)
        lines = wrap(head, max(width, 8), break_long_words=False, break_on_hyphens=False)
        groups.append(escape(group.model, "latex") if group else "")
        heads.append(_stacked([escape(line, "latex") for line in lines], column_format))
        widths.append(GAP + max(width, *map(len, lines), 0))
    shown.columns = pd.MultiIndex.from_arrays([groups, heads]) if any(groups) else pd.Index(heads)
    caption = " ".join(escape(note, "latex") for note in [f"{item.title}.", *_notes(item, many)])
    continued = escape(f"{item.title}, continued.", "latex")
    parts = _parts(shown, groups, widths)
    height = [
        max(
            math.ceil(_width(value) / LINE) if "p{" in column_format else 1
            for value, column_format in zip(row, formats, strict=True)
        )
        for row in shown.to_numpy()
    ]
    floats: list[str] = []
    for _, rows in shown.groupby((np.cumsum(height) - 1) // ROWS):
        for part in parts:
            number = len(floats)
            row_width = sum(widths[i] for i in part)
            fitting = (layout for layout in LAYOUTS if row_width <= layout[0])
            _, kind, size = next(fitting, LAYOUTS[-1])
            text = (
                rows.iloc[:, part]
                .style.hide(axis="index")
                .to_latex(
                    column_format="".join(formats[i] for i in part),
                    environment=kind,
                    position=None if "sideways" in kind else "t",
                    position_float="centering",
                    hrules=True,
                    multicol_align="c",
                    caption=continued if number else caption,
                    label=f"tab:{item.name}" + (f"-{number + 1}" if number else ""),
                )
            )
            text = text.replace(r"\centering", rf"\centering{size}", 1)
            text = text.replace(r"\begin{tabular}", RESIZED + r"\begin{tabular}", 1)
            text = text.replace(r"\end{tabular}", r"\end{tabular}}", 1)
            if number:  # one table, one number
                text = text.replace(r"\caption", r"\addtocounter{table}{-1}" "\n" r"\caption", 1)
            floats.append(text)
    return "\n".join(floats)


def _notes(item: ReportItem, brief: bool) -> list[str]:
    """The caption, and the meaning of u_sem and the depth for readers without the report."""
    assert item.table is not None
    notes = item.caption_lines(figure=False, errors=not brief)
    if brief and notes != item.caption_lines(figure=False):
        notes.append("Standard errors: see the CSV file.")
    text = " ".join(map(str, [*item.table, *item.table.to_numpy().ravel(), *item.notes]))
    if "u_sem" in text:
        notes.append("u_sem: the score of Sem-ASMI, MI_t (1 − A_t) averaged over an answer.")
    depths = sorted({group.depth for group in item.groups if group.variants})
    if depths and re.search(r"u_sem|ASMI|\bMI\b|top Δ", text):
        named = " or ".join(f"{100 * depth:g} %" for depth in depths)
        notes.append(f"ASMI's operating depth: {named}.")
    return notes


def _parts(shown: pd.DataFrame, groups: Sequence[str], widths: Sequence[int]) -> list[list[int]]:
    """Column numbers per float, so that they fit; a model's columns stay together."""
    count, most = len(widths), LAYOUTS[-1][0]
    identifying = (n for n in range(1, count) if not shown.iloc[:, :n].duplicated().any())
    repeated = next(identifying, 1)
    keys, others = list(range(repeated)), range(repeated, count)
    room = most - sum(widths[:repeated])
    pieces = [list(piece) for _, piece in groupby(others, lambda i: groups[i] or i)]
    if any(sum(widths[i] for i in piece) > room for piece in pieces):
        pieces = [[i] for i in others]
    parts: list[list[int]] = [[]]
    for piece in pieces:
        if parts[-1] and sum(widths[i] for i in [*parts[-1], *piece]) > room:
            parts.append([])
        parts[-1] += piece
    return [[*keys, *part] for part in parts]


def _format(column: pd.Series) -> str:
    """Numbers are aligned right, texts left; long texts are wrapped."""
    texts = [value for value in column if isinstance(value, str)]
    if all(re.fullmatch(r"[\d.]+", text) for text in texts):
        return "r"
    return r">{\raggedright\arraybackslash}p{4cm}" if max(map(len, texts)) > LONG else "l"


def _width(text: str) -> int:
    """Approximate number of characters that a piece of LaTeX prints."""
    return len(re.sub(r"\\[a-zA-Z]+(\{\})?|[${}\\]", "", text))


def _stacked(lines: Sequence[str], kind: str) -> str:
    if len(lines) < 2:
        return "".join(lines)
    return rf"\shortstack[{'r' if kind == 'r' else 'l'}]{{" + r"\\".join(lines) + "}"
