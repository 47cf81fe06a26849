"""Tables as LaTeX that a paper can take: booktabs, captions that say all, heads by model."""

import math
import re
from collections.abc import Sequence
from itertools import groupby

import pandas as pd

from lm_polygraph_asmi.report.exhibit import Exhibit, escape

SHORT = {
    "MaximumSequenceProbability": "MSP", "MeanTokenEntropy": "Token entropy",
    "SelfCertainty": "Self-certainty", "MeanPointwiseMutualInformation": "PMI",
    "MeanConditionalPointwiseMutualInformation": "CPMI", "SemanticEntropy": "Semantic entropy",
    "MonteCarloSequenceEntropy": "MC-SE", "MonteCarloNormalizedSequenceEntropy": "MC-NSE",
    "KernelLanguageEntropy": "KLE", "PTrueSampling": "P(True), samples", "PTrue": "P(True)",
}  # fmt: skip
"""LM-Polygraph's names as tables print them; longer ones first where one holds another."""
ROWS_A_PAGE = 45
CAPTION_LINE = 60
"""Characters of a line of the caption, about; beyond four lines they take the place of rows."""
COLUMN = 50
"""Characters that fit one column of a page of two; a wider table spans both."""
SIZES = {100: r"\small", 115: r"\footnotesize", 135: r"\scriptsize"}
"""Characters that fit the page's width by size of type; a wider table is turned on its side."""
MANY = 8
"""Cells side by side beyond which standard errors are left to the CSV file."""
LONG = 40
"""Characters from which a column of texts breaks its lines."""
BROKEN = 24
"""Characters of such a line."""
PREAMBLE = r"\usepackage{booktabs,graphicx,amssymb,textcomp,rotating}"
"""What a document needs to take these tables."""


def latex_tables(item: Exhibit) -> str:
    """An exhibit's table, in as many floats as pages want; needs `PREAMBLE`."""
    assert item.table is not None
    by_cell = {cell.label: cell for cell in item.cells}
    own = [name for name in item.table if name in by_cell]
    brief = len(own) > MANY
    shown = _short(item.shown("latex", brief))
    heads = [escape(_brief(str(name)), "latex") for name in item.table]
    groups = None
    if own:
        # Model above, dataset below: the label of a cell is both.
        groups = [escape(by_cell[n].model, "latex") if n in by_cell else "" for n in item.table]
        heads = [
            escape(by_cell[n].dataset + by_cell[n].suffix, "latex") if n in by_cell else head
            for n, head in zip(item.table, heads, strict=True)
        ]
    notes = [*item.caption, *(["Standard errors: see the CSV file."] if brief else [])]
    caption = " ".join(escape(text, "latex") for text in [item.title + ".", *notes])
    beyond = max(0.0, _width(caption) / CAPTION_LINE - 4)
    first = max(10, ROWS_A_PAGE - math.ceil(1.5 * beyond))  # a line is higher than a row
    starts = range(first, len(shown), ROWS_A_PAGE)
    pages = [shown[:first], *(shown[start : start + ROWS_A_PAGE] for start in starts)]
    return "\n".join(
        _float(item, page, heads, groups, caption if not i else f"{item.title}, continued.", i)
        for i, page in enumerate(pages)
    )


def _float(
    item: Exhibit,
    page: pd.DataFrame,
    heads: Sequence[str],
    groups: Sequence[str] | None,
    caption: str,
    number: int,
) -> str:
    assert item.table is not None
    formats = [_format(item.table[name]) for name in item.table]
    values = [max([_width(v) for v in page[name]], default=0) for name in page]
    lines_of = [_lines(head, width) for head, width in zip(heads, values, strict=True)]
    heads = [_stacked(own, kind) for own, kind in zip(lines_of, formats, strict=True)]
    width = sum(
        2 + (BROKEN if kind[0] == "p" else max(value, *map(_width, own)))
        for kind, value, own in zip(formats, values, lines_of, strict=True)
    )
    size = next((size for most, size in SIZES.items() if width <= most), r"\scriptsize")
    kind = "table" if width <= COLUMN else "table*"
    place = "[t]"
    if width > max(SIZES):
        kind, place = "sidewaystable*", ""
    lines = [rf"\begin{{{kind}}}{place}", rf"\centering{size}"]
    # Never wider than the text, never stretched.
    lines.append(r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%")
    lines += [rf"\begin{{tabular}}{{{''.join(formats)}}}", r"\toprule"]
    if groups:
        lines += _group_heads(groups)
    lines += [" & ".join(heads) + r" \\", r"\midrule"]
    lines += [" & ".join(row) + r" \\" for row in page.itertuples(index=False)]
    label = f"tab:{item.name}" + (f"-{number + 1}" if number else "")
    lines += [r"\bottomrule", r"\end{tabular}}", rf"\caption{{{caption}}}", rf"\label{{{label}}}"]
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
    if not texts:
        return "r"
    return "p{4cm}" if max(map(len, texts)) > LONG else "l"


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


def _brief(text: str) -> str:
    for name, short in SHORT.items():
        text = text.replace(name, short)
    return text


def _short(shown: pd.DataFrame) -> pd.DataFrame:
    return shown.map(_brief)
