"""Tables as LaTeX for a paper: booktabs, full captions, over both columns of a page."""

import re

import pandas as pd

from lm_polygraph_asmi.report.item import ReportItem, brief, escape

LONG = 40
"""A column of texts with more characters breaks its lines."""
BROKEN = r">{\raggedright\arraybackslash}p{4cm}"
RESIZED = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%" "\n"
"""Never wider than the text, never stretched."""
PREAMBLE = r"\usepackage{array,booktabs,graphicx,amssymb,textcomp}"
"""Packages that a document with these tables needs."""


def latex_table(item: ReportItem) -> str:
    """An item's table; needs `PREAMBLE`."""
    assert item.table is not None
    shown = item.shown("latex").map(brief).rename(columns=brief)
    caption = [f"{item.title}.", *(note for note in item.caption if note != item.pictured)]
    text = shown.style.hide(axis="index").to_latex(
        column_format="".join(_format(item.table[name]) for name in item.table),
        environment="table*",
        position="t",
        position_float="centering",
        hrules=True,
        caption=escape(" ".join([*caption, *_terms(item)]), "latex"),
        label=f"tab:{item.name}",
    )
    text = text.replace(r"\begin{tabular}", r"\small" "\n" + RESIZED + r"\begin{tabular}", 1)
    return text.replace(r"\end{tabular}", r"\end{tabular}}", 1)


def _terms(item: ReportItem) -> list[str]:
    """The meaning of u_sem and the depth, for readers without the report."""
    assert item.table is not None
    text = " ".join(map(str, [*item.table, *item.table.to_numpy().ravel(), *item.notes]))
    terms = []
    if "u_sem" in text:
        terms.append("u_sem: the score of Sem-ASMI, MI_t (1 − A_t) averaged over an answer.")
    depths = sorted({group.depth for group in item.groups if group.variants})
    if depths and re.search(r"u_sem|ASMI|\bMI\b|top Δ", text):
        named = " or ".join(f"{100 * depth:g} %" for depth in depths)
        terms.append(f"ASMI's operating depth: {named}.")
    return terms


def _format(column: pd.Series) -> str:
    """Numbers are aligned right, texts left; long texts are wrapped."""
    texts = [value for value in column if isinstance(value, str)]
    if all(re.fullmatch(r"[\d.]+", text) for text in texts):
        return "r"
    return BROKEN if max(map(len, texts)) > LONG else "l"
