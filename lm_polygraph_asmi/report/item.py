"""A table or figure of the report, and how its values are written."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from lm_polygraph_asmi.analysis.clusters import FEW, RESAMPLES, Interval
from lm_polygraph_asmi.analysis.prr import PRR
from lm_polygraph_asmi.results.run_groups import RunGroup

SHORT = {
    "MaximumSequenceProbability": "MSP", "MeanTokenEntropy": "Token entropy",
    "SelfCertainty": "Self-certainty", "MeanPointwiseMutualInformation": "PMI",
    "MeanConditionalPointwiseMutualInformation": "CPMI", "SemanticEntropy": "Semantic entropy",
    "MonteCarloSequenceEntropy": "MC-SE", "MonteCarloNormalizedSequenceEntropy": "MC-NSE",
    "KernelLanguageEntropy": "KLE", "PTrueSampling": "P(True), samples", "PTrue": "P(True)",
}  # fmt: skip
"""Short names of LM-Polygraph's methods; a name that contains another comes first."""


class Marked(NamedTuple):
    """The best value: "bold", or "underline" if not significantly different from the next."""

    value: Any
    mark: str


def leading(value: Any, ahead: Interval) -> Marked:
    """The best of several values, marked by its difference from the next best."""
    return Marked(value, "bold" if ahead.excludes(0) else "underline")


@dataclass
class ReportItem:
    """One item of the report.

    Attributes:
        name: of its files.
        title: its heading.
        groups: settings it was computed from.
        table: raw values: floats, `Interval`, `PRR`, `Marked` and text.
        draw: makes the figure; None if there is only a table.
        notes: the caption.
        pictured: caption of the figure alone.
        digits: after the point.
        signed: columns of differences, written with their sign, and with an asterisk if the
            interval excludes 0.
        p_values: columns in which a value that rounds to 0 is written as "< 0.001".
        finer: columns of small values, written with one more digit.
        inline: False if the table is too long for the report, which then links its file.
        resamples: of clusters, for the intervals of the table.
    """

    name: str
    title: str
    groups: Sequence[RunGroup]
    table: pd.DataFrame | None = None
    draw: Callable[[], Figure] | None = None
    notes: Sequence[str] = ()
    digits: int = 2
    signed: Sequence[str] = field(default_factory=tuple)
    p_values: Sequence[str] = field(default_factory=tuple)
    finer: Sequence[str] = field(default_factory=tuple)
    inline: bool = True
    resamples: int = RESAMPLES
    pictured: str = ""

    @cached_property
    def figure(self) -> Figure | None:
        """Drawn when first asked for."""
        return self.draw() if self.draw else None

    @property
    def caption(self) -> list[str]:
        """The notes, and the meaning of brackets and asterisks if the table has them."""
        table = pd.DataFrame() if self.table is None else self.table
        values = {name: [_bare(value) for value in table[name]] for name in table}
        notes = [*self.notes, *filter(None, [self.pictured])]
        if any(isinstance(v, PRR) for column in values.values() for v in column):
            notes.append("±: standard error, 1,000 resamples of answers.")
        bounded = [
            name
            for name, column in values.items()
            if any(isinstance(v, Interval) and not pd.isna(v.low) for v in column)
        ]
        if not bounded:
            return notes
        if small := [group.label for group in self.groups if group.too_small]:
            labels = "All settings" if len(small) == len(self.groups) else "; ".join(small)
            notes.append(f"Too small for reliable intervals: {labels}. {FEW}")
        brackets = f"[low, high]: 95 % interval, {self.resamples:,} resamples of clusters"
        starred = ""
        if {*bounded} & {*self.signed}:
            starred = "; asterisk: it excludes 0"
        return [*notes, f"{brackets}{starred}."]

    def shown(self, markup: str) -> pd.DataFrame:
        """The table as text, for "markdown" or "latex"."""
        assert self.table is not None
        table = self.table.astype(object)
        for column in table:
            signed = column in self.signed
            digits = self.digits + (column in self.finer)
            texts = [text(value, digits, signed, markup) for value in table[column]]
            smallest = 10**-self.digits
            if column in self.p_values:
                below = escape(f"< {smallest:.{self.digits}f}", markup)
                pairs = zip(map(_bare, table[column]), texts, strict=True)
                texts = [
                    below if value is not None and value < smallest else shown
                    for value, shown in pairs
                ]
            table[column] = texts
        return table.rename(columns=lambda column: escape(str(column), markup))

    def flat(self) -> pd.DataFrame:
        """The table as numbers: an interval becomes three columns, a PRR two."""
        assert self.table is not None
        columns: dict[str, list[Any]] = {}
        for name in self.table:
            values = [_bare(v) for v in self.table[name]]
            parts = [f for v in values if isinstance(v, Interval | PRR) for f in v._fields]
            for part in dict.fromkeys(parts) or [None]:
                column = f"{name} {part.replace('_', ' ')}" if part not in (None, "value") else name
                columns[str(column)] = [_part(value, part) for value in values]
        return pd.DataFrame(columns)


class MissingItem(NamedTuple):
    """An item that these runs lack the data for, and the reason."""

    title: str
    reason: str


Items = Sequence[ReportItem | MissingItem]
"""Return type of a function of the report."""


Reason = tuple[str, str]
"""(what is missing, such as a setting's label; the reason)."""


def frame(
    name: str,
    title: str,
    groups: Iterable[Any],
    compute: Callable[[Any], Any],
    notes: Sequence[str] | Callable[[ReportItem], Sequence[str]],
    figure: Callable[[Any], Figure] | None = None,
    *,
    label: Callable[[Any], str] = lambda group: group.label,
    otherwise: str = "no run has the data",
    **shown: Any,
) -> list[ReportItem] | list[MissingItem]:
    """An item whose rows are computed per setting; `MissingItem` if there are none.

    Args:
        name, title: of `ReportItem`.
        groups: settings, or tuples that contain settings.
        compute: a row of the table, or several, from one element of `groups`; or a pair of them and
            of what is drawn, by the panels' titles. If it raises ValueError, the element is left
            out and a note names the reason; without rows, there is no note.
        notes: the caption, or a function that makes it from the item.
        figure: draws all panels; the table, if `compute` returns none.
        label: names an element that is left out.
        otherwise: reason of a missing item without any other.
        shown: other fields of `ReportItem`, such as `digits` and `signed`.
    """
    rows: list[dict[str, Any]] = []
    used: list[RunGroup] = []
    panels: dict[str, Any] = {}
    missing: list[Reason] = []
    for group in groups:
        try:
            made = compute(group)
        except ValueError as error:
            missing.append((label(group), str(error)))
            continue
        new_rows, own_panels = made if isinstance(made, tuple) else (made, {})
        panels |= own_panels
        if new_rows:
            rows += [new_rows] if isinstance(new_rows, dict) else new_rows
            parts = group if isinstance(group, tuple) else (group,)
            used += [p for p in parts if isinstance(p, RunGroup) and p not in used]
    if not rows:
        return [MissingItem(title, listed(missing) or otherwise)]
    table = pd.DataFrame(rows)
    draw = partial(figure, panels or table) if figure else None
    item = ReportItem(name, title, used, table, draw, **shown)
    item.notes = [*(notes(item) if callable(notes) else notes)]
    if missing:
        item.notes.append(f"Left out: {listed(missing)}.")
    return [item]


def listed(reasons: Sequence[Reason]) -> str:
    """Reasons in one line, each with all it applies to."""
    named: dict[str, list[str]] = {}
    for group, why in reasons:
        named.setdefault(why, []).append(group)
    return "; ".join(f"{why} ({'; '.join(groups)})" for why, groups in named.items())


def _bare(value: Any) -> Any:
    return value.value if isinstance(value, Marked) else value


def _part(value: Any, part: str | None) -> Any:
    if part is None or value is None:
        return value
    return getattr(value, part) if isinstance(value, Interval | PRR) else value


def text(value: Any, digits: int, signed: bool = False, markup: str = "markdown") -> str:
    """One value of a table; a dash where it is undefined."""
    if isinstance(value, Marked):
        inner = text(value.value, digits, signed, markup)
        marks = {
            ("bold", "markdown"): "**{}**", ("underline", "markdown"): "<u>{}</u>",
            ("bold", "latex"): r"\textbf{{{}}}", ("underline", "latex"): r"\underline{{{}}}",
        }  # fmt: skip
        return marks[value.mark, markup].format(inner)
    plus_minus = {"markdown": " ± ", "latex": r" $\pm$ "}[markup]
    sign = "+" if signed else ""

    def number(value: float, digits: int = digits) -> str:
        # A value that rounds to 0 has no sign.
        return f"{round(float(value), digits) + 0.0:{sign}.{digits}f}"

    def end(value: float, excluded: bool) -> str:
        # The end of an interval that excludes 0 is not written as 0.
        finer = digits
        while excluded and value and not round(float(value), finer):
            finer += 1
        return number(value, finer)

    if isinstance(value, Interval):
        if pd.isna(value.value):
            return "–"
        if pd.isna(value.low) or value.low == value.high:  # no spread, no interval
            return _minus(number(value.value), markup)
        star = "*" if signed and value.excludes(0) else ""
        ends = ", ".join(end(bound, value.excludes(0)) for bound in (value.low, value.high))
        return _minus(f"{number(value.value)}{star} [{ends}]", markup)
    if isinstance(value, PRR):
        if pd.isna(value.value):
            return "–"
        error = "" if pd.isna(value.standard_error) else f"{value.standard_error:.{digits}f}"
        return _minus(number(value.value), markup) + (plus_minus + error if error else "")
    if value is None or value is pd.NA or (isinstance(value, float) and pd.isna(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return _minus(number(value), markup)
    return escape(str(value), markup)


def brief(text: str) -> str:
    """The text with the names of `SHORT` shortened."""
    for name, short in SHORT.items():
        text = text.replace(name, short)
    return text


def _minus(number: str, markup: str) -> str:
    return re.sub(r"-(?=\d)", "−" if markup == "markdown" else r"$-$", number)


_LATEX = {"\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
          "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
          "|": r"\textbar{}", "Δ": r"$\Delta$", "ρ": r"$\rho$", "−": "$-$", "±": r"$\pm$",
          "†": r"\dag{}", "τ": r"$\tau$", "α": r"$\alpha$", "×": r"$\times$", "≥": r"$\geq$",
          "≤": r"$\leq$", "⏎": r"$\hookleftarrow$", "–": "--", "<": r"\textless{}",
          ">": r"\textgreater{}"}  # fmt: skip

_SYMBOLS = {"p̄": r"$\bar{p}$", "u_sem": r"$u_{\mathrm{sem}}$", "MI_t": r"$\mathrm{MI}_t$",
            "A_t": "$A_t$", "H_t": "$H_t$", " %": r"~\%"}  # fmt: skip
"""Symbols replaced as a whole; the first is a letter and a combining accent."""


def _latex(letter: str) -> str:
    # Plain LaTeX has only Latin letters; the CSV file has all.
    latin = ord(letter) < 0x180 and letter.isprintable()
    return _LATEX.get(letter, letter if latin else "?")


def escape(raw: str, markup: str) -> str:
    """Text, possibly a model's, escaped for a table; line breaks become ⏎."""
    raw = raw.replace("\n", " ⏎ ").strip()
    if markup == "latex":
        pieces = re.split(f"({'|'.join(_SYMBOLS)})", raw)
        return "".join(_SYMBOLS.get(piece) or "".join(map(_latex, piece)) for piece in pieces)
    return re.sub(r"([|*_`<>\\])", r"\\\1", raw)
