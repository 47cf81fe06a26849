"""Tables as LaTeX for a paper: booktabs, full captions, columns grouped by model."""

import re
from textwrap import wrap

import numpy as np
import pandas as pd

from lm_polygraph_asmi.report.item import ReportItem, brief, escape

NARROW = 6
"""With more columns, or with texts of several lines, a table takes both columns of a page."""
ROWS = 25
"""Lines of a float; the caption takes the rest of the page."""
MANY = 8
"""With more settings side by side, standard errors are only in the CSV file."""
LONG, LINE, HEAD = 40, 24, 12
"""A column of longer texts breaks its lines; characters of such a line, and of one of a head."""
BROKEN = r">{\raggedright\arraybackslash}p{4cm}"
RESIZED = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%" "\n"
"""Never wider than the text, never stretched."""
PREAMBLE = r"\usepackage{array,booktabs,graphicx,amssymb,textcomp}"
"""Packages that a document with these tables needs."""


def latex_tables(item: ReportItem) -> str:
    """An item's table, in as many floats as fit on pages; needs `PREAMBLE`."""
    assert item.table is not None
    by_group = {group.label: group for group in item.groups}
    many = sum(name in by_group for name in item.table) > MANY
    shown = item.shown("latex", many).map(brief)
    formats = [_format(item.table[name]) for name in item.table]
    groups = [by_group.get(name) for name in item.table]
    models = [escape(group.model, "latex") if group else "" for group in groups]
    heads = [
        _head(group.dataset + group.suffix if group else brief(str(name)))
        for name, group in zip(item.table, groups, strict=True)
    ]
    shown.columns = pd.MultiIndex.from_arrays([models, heads]) if any(models) else pd.Index(heads)
    wide = len(heads) > NARROW or BROKEN in formats
    broken = shown.loc[:, [column == BROKEN for column in formats]]
    height = np.ceil(broken.map(len) / LINE).max(axis=1).clip(1).fillna(1)
    caption = " ".join(escape(note, "latex") for note in [f"{item.title}.", *_notes(item, many)])
    floats: list[str] = []
    for number, (_, rows) in enumerate(shown.groupby((height.cumsum() - 1) // ROWS)):
        text = rows.style.hide(axis="index").to_latex(
            column_format="".join(formats),
            environment="table*" if wide else "table",
            position="t",
            position_float="centering",
            hrules=True,
            multicol_align="c",
            caption=escape(f"{item.title}, continued.", "latex") if number else caption,
            label=f"tab:{item.name}" + (f"-{number + 1}" if number else ""),
        )
        text = text.replace(r"\begin{tabular}", r"\small" "\n" + RESIZED + r"\begin{tabular}", 1)
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


def _head(text: str) -> str:
    lines = wrap(text, HEAD, break_long_words=False, break_on_hyphens=False)
    stacked = r"\\".join(escape(line, "latex") for line in lines)
    return rf"\shortstack{{{stacked}}}" if len(lines) > 1 else stacked


def _format(column: pd.Series) -> str:
    """Numbers are aligned right, texts left; long texts are wrapped."""
    texts = [value for value in column if isinstance(value, str)]
    if all(re.fullmatch(r"[\d.]+", text) for text in texts):
        return "r"
    return BROKEN if max(map(len, texts)) > LONG else "l"
