"""Tables as LaTeX that a paper can take: booktabs, captions that say all, heads by model."""

import math
import re
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
import pandas as pd

from lm_polygraph_asmi.report.exhibit import Exhibit, brief, escape

ROWS_A_PAGE = 45
COLUMN, PAGE, HEIGHT = 220.0, 469.0, 550.0
"""Points of a page of two columns: of one, of both, and of what is turned on its side."""
CHARACTERS = {9: 4.6, 8: 4.25, 7: 4.0}
"""Points that a character takes, about, by the size of type."""
CAPTION = 5.0
"""The same of the caption."""
SIZES = {9: r"\small", 8: r"\footnotesize", 7: r"\scriptsize"}
LINES = {9: 11.0, 8: 9.5, 7: 8.0}
"""Points from line to line."""
GAP = 12.0
"""Points between columns, at every size."""
LEAST = 6
"""Points of the smallest type: what would be printed smaller is taken apart."""
MANY = 8
"""Cells side by side beyond which standard errors are left to the CSV file."""
LONG = 40
"""Characters from which a column of texts breaks its lines."""
BROKEN, LINE = 114.0, 24
"""Points of such a line, 4 cm, and characters that it surely holds."""
PREAMBLE = r"\usepackage{array,booktabs,graphicx,amssymb,textcomp,rotating}"
"""What a document needs to take these tables."""


class _Column(NamedTuple):
    """A column as it is printed: its head in lines, its values, and the model above it."""

    head: list[str]
    kind: str
    values: list[str]
    group: str

    def points(self, size: int) -> float:
        if "p{" in self.kind:
            return GAP + BROKEN
        return GAP + CHARACTERS[size] * max(map(_width, [*self.values, *self.head]), default=0)


def latex_tables(item: Exhibit) -> str:
    """An exhibit's table, in as many floats as pages want; needs `PREAMBLE`.

    No type is smaller than `LEAST`: of a table too wide for that, columns of one value go to the
    caption, and what is left is taken apart, each part with the columns that tell its rows apart.
    """
    assert item.table is not None
    columns = _columns(item)
    brief = _cells_beside(item) > MANY
    notes = item.said(figure=False, errors=not brief)
    if brief and notes != item.said(figure=False):
        notes.append("Standard errors: see the CSV file.")
    if _printed(columns) < LEAST:
        constant = [c for c in columns[1:] if len(c.values) > 1 and len({*c.values}) == 1]
        columns = [c for c in columns if c not in constant]
        notes += [f"{' '.join(c.head)}: {c.values[0]} in every row." for c in constant]
    notes += _terms(item)
    plain = [note if note.endswith("in every row.") else escape(note, "latex") for note in notes]
    caption = " ".join([escape(f"{item.title}.", "latex"), *plain])
    again = escape(f"{item.title}, continued.", "latex")
    parts = _parts(columns)
    ends = [0]
    while ends[-1] < len(item.table):
        said = again if ends[-1] else caption
        ends.append(ends[-1] + min(_room(part, said, ends[-1]) for part in parts))
    pages = [
        [column._replace(values=column.values[start:end]) for column in part]
        for start, end in pairwise(ends)
        for part in parts
    ]
    return "\n".join(
        _float(item, page, again if number else caption, number)
        for number, page in enumerate(pages)
    )


def _terms(item: Exhibit) -> list[str]:
    """What a reader of this table alone could not know: what u_sem is, and the depth."""
    assert item.table is not None
    text = " ".join(map(str, [*item.table, *item.table.to_numpy().ravel(), *item.notes]))
    found = []
    if "u_sem" in text:
        found.append("u_sem: the score of Sem-ASMI, MI_t (1 − A_t) averaged over an answer.")
    depths = sorted({cell.depth for cell in item.cells if cell.variants})
    if depths and re.search(r"u_sem|ASMI|\bMI\b|top Δ", text):
        named = " or ".join(f"{100 * depth:g} %" for depth in depths)
        found.append(f"ASMI's operating depth: {named}.")
    return found


def _cells_beside(item: Exhibit) -> int:
    """How many cells are columns of their own."""
    labels = {cell.label for cell in item.cells}
    return 0 if item.table is None else sum(name in labels for name in item.table)


def _columns(item: Exhibit) -> list[_Column]:
    assert item.table is not None
    by_cell = {cell.label: cell for cell in item.cells}
    shown = item.shown("latex", _cells_beside(item) > MANY).map(brief)
    columns = []
    for place, name in enumerate(item.table):
        head, group = brief(str(name)), ""
        if name in by_cell:  # model above, dataset below: the label of a cell is both
            head = by_cell[name].dataset + by_cell[name].suffix
            group = escape(by_cell[name].model, "latex")
        values = [str(value) for value in shown.iloc[:, place]]
        lines = _lines(escape(head, "latex"), max(map(_width, values), default=0))
        columns.append(_Column(lines, _format(item.table[name]), values, group))
    return columns


def _points(columns: Sequence[_Column], size: int) -> float:
    return sum(column.points(size) for column in columns)


def _printed(columns: Sequence[_Column]) -> float:
    """Points of the type if these columns stand in one float, the page turned if need be."""
    smallest = min(SIZES)
    return min(smallest, smallest * HEIGHT / _points(columns, smallest))


def _parts(columns: list[_Column]) -> list[list[_Column]]:
    """Columns in as few floats as their type allows, about equally wide; a model's together."""
    rows = list(zip(*(column.values for column in columns), strict=True))
    telling = (n for n in range(1, len(columns)) if len({row[:n] for row in rows}) == len(rows))
    own = next(telling, 1)
    keys, others = columns[:own], columns[own:]
    pieces = [list(model) for _, model in groupby(others, lambda c: c.group or id(c))]
    if any(_printed([*keys, *piece]) < LEAST for piece in pieces):
        pieces = [[column] for column in others]
    widths = np.array([_points(piece, min(SIZES)) for piece in pieces])
    middles = (widths.cumsum() - widths / 2) / max(1.0, widths.sum())
    for number in range(1, len(pieces)):
        places = (number * middles).astype(int)
        parts = [
            [
                *keys,
                *(c for piece, at in zip(pieces, places, strict=True) if at == part for c in piece),
            ]
            for part in sorted({*places})
        ]
        if all(_printed(part) >= LEAST for part in parts):
            return parts
    return [[*keys, *piece] for piece in pieces] or [columns]


def _size(columns: Sequence[_Column]) -> tuple[int, bool]:
    """Size of type, and whether the page is turned."""
    size = next((size for size in SIZES if _points(columns, size) <= PAGE), min(SIZES))
    return size, _points(columns, size) * LEAST > PAGE * size


def _room(columns: Sequence[_Column], caption: str, start: int) -> int:
    """Rows from `start` on, at least one, that a page has room for below the caption."""
    size, turned = _size(columns)
    height, line = (PAGE, HEIGHT) if turned else (HEIGHT, PAGE)
    above = 1 + max(len(column.head) for column in columns) + any(c.group for c in columns)
    left = height - 12 * (5 + math.ceil(_width(caption) * CAPTION / line)) - 12 * above
    for place, row in enumerate(zip(*(c.values[start:] for c in columns), strict=True)):
        broken = [value for value, c in zip(row, columns, strict=True) if "p{" in c.kind]
        left -= LINES[size] * max([math.ceil(_width(v) / LINE) for v in broken], default=1)
        if left < 0 or place == ROWS_A_PAGE:
            return max(1, place)
    return len(columns[0].values) - start


def _float(item: Exhibit, columns: Sequence[_Column], caption: str, number: int) -> str:
    size, turned = _size(columns)
    kind, place = ("table" if _points(columns, size) <= COLUMN else "table*"), "[t]"
    if turned:
        kind, place = "sidewaystable*", ""
    lines = [rf"\begin{{{kind}}}{place}", rf"\centering{SIZES[size]}"]
    # Never wider than the text, never stretched.
    lines.append(r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%")
    formats = "".join(column.kind for column in columns)
    lines += [rf"\begin{{tabular}}{{{formats}}}", r"\toprule"]
    if any(column.group for column in columns):
        lines += _group_heads([column.group for column in columns])
    lines += [" & ".join(_stacked(c.head, c.kind) for c in columns) + r" \\", r"\midrule"]
    rows = zip(*(column.values for column in columns), strict=True)
    lines += [" & ".join(row) + r" \\" for row in rows]
    label = f"tab:{item.name}" + (f"-{number + 1}" if number else "")
    lines += [r"\bottomrule", r"\end{tabular}}"]
    if number:  # one table, one number
        lines.append(r"\addtocounter{table}{-1}")
    lines += [rf"\caption{{{caption}}}", rf"\label{{{label}}}"]
    return "\n".join([*lines, rf"\end{{{kind}}}", ""])


def _group_heads(groups: Sequence[str]) -> list[str]:
    parts, rules, place = [], [], 1
    for name, run in groupby(groups):
        width = len(list(run))
        parts.append(rf"\multicolumn{{{width}}}{{c}}{{{name}}}" if name else " & " * (width - 1))
        if name:
            rules.append(rf"\cmidrule(lr){{{place}-{place + width - 1}}}")
        place += width
    return [" & ".join(parts) + r" \\", "".join(rules)]


def _format(column: pd.Series) -> str:
    """Numbers stand right, texts left, long texts in lines."""
    texts = [value for value in column if isinstance(value, str)]
    if all(re.fullmatch(r"[\d.]+", text) for text in texts):
        return "r"
    return r">{\raggedright\arraybackslash}p{4cm}" if max(map(len, texts)) > LONG else "l"


def _width(text: str) -> int:
    """Characters that a piece of LaTeX prints, about."""
    return len(re.sub(r"\\[a-zA-Z]+(\{\})?|[${}\\]", "", text))


def _lines(head: str, width: int) -> list[str]:
    """A head in lines about as wide as its column."""
    lines: list[str] = []
    for word in head.split(" "):
        if lines and _width(f"{lines[-1]} {word}") <= max(width, 8):
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _stacked(lines: Sequence[str], kind: str) -> str:
    if len(lines) == 1:
        return lines[0]
    return rf"\shortstack[{'r' if kind == 'r' else 'l'}]{{" + r"\\".join(lines) + "}"
