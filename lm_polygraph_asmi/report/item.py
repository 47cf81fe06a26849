"""A table or figure of the report, and how its values are written."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from lm_polygraph_asmi.analysis.clusters import RESAMPLES, Interval
from lm_polygraph_asmi.analysis.prr import PRR
from lm_polygraph_asmi.results.run_groups import RunGroup

ADJUSTED = "p < 0.05, adjusted for the number of comparisons"
"""What an asterisk and a filled marker stand for, of `TestedValue` values."""

SHORT = {
    "MaximumSequenceProbability": "MSP", "MeanTokenEntropy": "Token entropy",
    "SelfCertainty": "Self-certainty", "MeanPointwiseMutualInformation": "PMI",
    "MeanConditionalPointwiseMutualInformation": "CPMI", "SemanticEntropy": "Semantic entropy",
    "MonteCarloSequenceEntropy": "MC-SE", "MonteCarloNormalizedSequenceEntropy": "MC-NSE",
    "KernelLanguageEntropy": "KLE", "PTrueSampling": "P(True), samples", "PTrue": "P(True)",
}  # fmt: skip
"""LM-Polygraph's names as print has them; longer ones first where one holds another."""


class Marked(NamedTuple):
    """A value that stands out: "bold" the best, "underline" one that is not told from the next."""

    value: Any
    mark: str


def leading(value: Any, ahead: Interval) -> Marked:
    """The best of several, by how far it is ahead of the next best."""
    return Marked(value, "bold" if ahead.excludes(0) else "underline")


class TestedValue(NamedTuple):
    """A difference whose verdict is that of an adjusted p-value, not of its own interval.

    Attributes:
        value: with its interval, adjusted for nothing.
        sure: whether the p-value, adjusted for the number of comparisons, is below 0.05.
    """

    value: Interval
    sure: bool


class AtMost(NamedTuple):
    """A p-value as small as its resamples could have made it."""

    value: float


@dataclass
class ReportItem:
    """One item of the report.

    Attributes:
        name: of its files.
        title: its heading.
        groups: what it was computed from.
        table: values as they are; floats, `Interval`, `PRR`, `Marked`, `TestedValue`, `AtMost` and
            text.
        figure: None where a table says it all.
        notes: what a reader has to know.
        pictured: what a reader of the figure has to know besides.
        digits: after the point.
        signed: columns of differences, written with their sign and an asterisk where the interval
            excludes zero or, of a `TestedValue` one, where it is sure.
        p_values: columns in which what would be written as zero is "< 0.001" instead.
        finer: columns of small values, written with one digit more.
        inline: False where the table is too long for the report, which then names its file.
        resamples: of clusters, behind the intervals of the table.
    """

    name: str
    title: str
    groups: Sequence[RunGroup]
    table: pd.DataFrame | None = None
    figure: Figure | None = None
    notes: Sequence[str] = ()
    digits: int = 2
    signed: Sequence[str] = field(default_factory=tuple)
    p_values: Sequence[str] = field(default_factory=tuple)
    finer: Sequence[str] = field(default_factory=tuple)
    inline: bool = True
    resamples: int = RESAMPLES
    pictured: str = ""

    @property
    def caption(self) -> list[str]:
        """The notes, and what brackets and asterisks stand for where the table has them."""
        return self.said()

    def said(self, figure: bool = True, errors: bool = True) -> list[str]:
        """The caption, with or without what is only of the figure or of standard errors."""
        table = pd.DataFrame() if self.table is None else self.table
        values = {name: [_bare(value) for value in table[name]] for name in table}
        found = [*self.notes, *([self.pictured] if figure and self.pictured else [])]
        if errors and any(isinstance(v, PRR) for own in values.values() for v in own):
            found.append("±: standard error, 1,000 resamples of answers.")
        bounded = [
            name
            for name, own in values.items()
            if any(isinstance(v, Interval) and not pd.isna(v.low) for v in own)
        ]
        if not bounded:
            return found
        if small := [group.label for group in self.groups if group.too_small]:
            which = "All settings" if len(small) == len(self.groups) else "; ".join(small)
            found.append(f"Too small for their intervals (see the first lines): {which}.")
        brackets = f"[low, high]: 95 % interval, {self.resamples:,} resamples of clusters"
        starred = ""
        if {*bounded} & {*self.signed}:
            tested = any(isinstance(v, TestedValue) for name in self.signed for v in table[name])
            starred = f"; asterisk: {ADJUSTED if tested else 'it excludes zero'}"
        return [*found, f"{brackets}{starred}."]

    def shown(self, markup: str, brief: bool = False) -> pd.DataFrame:
        """The table as text, for "markdown" or "latex"; `brief` leaves out standard errors."""
        assert self.table is not None
        table = self.table.astype(object)
        for column in table:
            signed = column in self.signed
            values = [_without_error(value) if brief else value for value in table[column]]
            digits = self.digits + (column in self.finer)
            written = [text(value, digits, signed, markup) for value in values]
            least = 10**-self.digits
            if column in self.p_values:
                below = escape(f"< {least:.{self.digits}f}", markup)
                pairs = zip(map(_bare, table[column]), written, strict=True)
                written = [
                    below if value is not None and value < least else shown
                    for value, shown in pairs
                ]
            table[column] = written
        return table.rename(columns=lambda column: escape(str(column), markup))

    def flat(self) -> pd.DataFrame:
        """The table as numbers: an interval becomes three columns, a PRR two."""
        assert self.table is not None
        columns: dict[str, list[Any]] = {}
        for name in self.table:
            values = [_bare(v) for v in self.table[name]]
            parts = [f for v in values if isinstance(v, Interval | PRR) for f in v._fields]
            for part in dict.fromkeys(parts) or [None]:
                own = f"{name} {part.replace('_', ' ')}" if part not in (None, "value") else name
                columns[str(own)] = [_part(value, part) for value in values]
        return pd.DataFrame(columns)


class MissingItem(NamedTuple):
    """An item that these runs do not hold, and why."""

    title: str
    reason: str


Items = Sequence[ReportItem | MissingItem]
"""What a function of the report returns."""


Reason = tuple[str, str]
"""What is missing, such as a setting's label, and why."""


def frame(
    name: str,
    title: str,
    groups: Iterable[Any],
    compute: Callable[[Any], list[dict[str, Any]]],
    notes: Sequence[str] | Callable[[ReportItem], Sequence[str]],
    figure: Callable[[pd.DataFrame], Figure] | None = None,
    *,
    digits: int = 2,
    signed: Sequence[str] = (),
    p_values: Sequence[str] = (),
    finer: Sequence[str] = (),
    tabulated: bool = True,
    inline: bool = True,
    resamples: int = RESAMPLES,
    pictured: str = "",
    finish: Callable[[pd.DataFrame], pd.DataFrame] = lambda table: table,
    label: Callable[[Any], str] = lambda group: group.label,
    reasons: Iterable[Reason] = (),
    otherwise: str = "no run holds it",
) -> list[ReportItem] | list[MissingItem]:
    """The frame of an item: rows setting by setting, a gap where there are none, notes on the
    missing.

    Args:
        name, title, digits, signed, p_values, finer, inline, resamples,
            pictured: of the report item.
        groups: settings, or tuples of what belongs together, settings among it.
        compute: rows of the table from one group. A group where it raises ValueError is passed
            over with its message, one without rows in silence.
        notes: what a reader has to know; a function of the report item where that depends on it.
        figure: drawn from the table, once there are rows.
        tabulated: False where the rows are for the figure alone.
        finish: what can be said of a row only once all rows are there.
        label: names a group that is passed over.
        reasons: why others were left out before.
        otherwise: reason of a gap without any other.
    """
    rows: list[dict[str, Any]] = []
    used: list[RunGroup] = []
    missing = list(reasons)
    for group in groups:
        try:
            own = compute(group)
        except ValueError as error:
            missing.append((label(group), str(error)))
            continue
        if own:
            rows += own
            parts = group if isinstance(group, tuple) else (group,)
            used += [p for p in parts if isinstance(p, RunGroup) and p not in used]
    if not rows:
        return [MissingItem(title, _listed(missing) or otherwise)]
    table = finish(pd.DataFrame(rows))
    drawn = figure(table) if figure else None
    item = ReportItem(
        name, title, used, table, drawn, (), digits, signed, p_values, finer, inline, resamples,
        pictured,
    )  # fmt: skip
    item.notes = [*(notes(item) if callable(notes) else notes), *_left_out(missing)]
    item.table = table if tabulated else None
    return [item]


def _left_out(reasons: Sequence[Reason]) -> list[str]:
    """A note on what is missing in a table."""
    return [f"Not here: {_listed(reasons)}."] if reasons else []


def _listed(reasons: Sequence[Reason]) -> str:
    """Reasons in a line, those of one kind together."""
    named: dict[str, list[str]] = {}
    for group, why in reasons:
        named.setdefault(why, []).append(group)
    return "; ".join(f"{why} ({'; '.join(groups)})" for why, groups in named.items())


def _bare(value: Any) -> Any:
    return value.value if isinstance(value, Marked | TestedValue | AtMost) else value


def _without_error(value: Any) -> Any:
    if isinstance(value, Marked):
        return value._replace(value=_without_error(value.value))
    return PRR(value.value, float("nan")) if isinstance(value, PRR) else value


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
    if isinstance(value, AtMost):
        # Rounded up: it is no less than what the resamples could show.
        above = math.ceil(value.value * 10**digits - 1e-9) / 10**digits
        return f"{escape('≤', markup)} " + text(above, digits, False, markup)
    sure = value.sure if isinstance(value, TestedValue) else None
    value = _bare(value)
    plus_minus = {"markdown": " ± ", "latex": r" $\pm$ "}[markup]
    sign = "+" if signed else ""

    def number(value: float, digits: int = digits) -> str:
        # Without the sign of what rounds to zero.
        return f"{round(float(value), digits) + 0.0:{sign}.{digits}f}"

    def end(value: float, excluded: bool) -> str:
        # The end of an interval that excludes zero is not written as zero.
        finer = digits
        while excluded and value and not round(float(value), finer):
            finer += 1
        return number(value, finer)

    if isinstance(value, Interval):
        if pd.isna(value.value):
            return "–"
        if pd.isna(value.low) or value.low == value.high:  # resamples without spread know nothing
            return _minus(number(value.value), markup)
        star = "*" if signed and (value.excludes(0) if sure is None else sure) else ""
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
    """A text with LM-Polygraph's names as `SHORT` has them."""
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
"""What LaTeX sets as a whole; the first is a letter and a combining accent."""


def _latex(letter: str) -> str:
    # A plain LaTeX has no letters beyond the Latin ones; the CSV file has them.
    plain = ord(letter) < 0x180 and letter.isprintable()
    return _LATEX.get(letter, letter if plain else "?")


def escape(raw: str, markup: str) -> str:
    """Text that may come from a model, safe in a table; line breaks are shown as ⏎."""
    raw = raw.replace("\n", " ⏎ ").strip()
    if markup == "latex":
        pieces = re.split(f"({'|'.join(_SYMBOLS)})", raw)
        return "".join(_SYMBOLS.get(piece) or "".join(map(_latex, piece)) for piece in pieces)
    return re.sub(r"([|*_`<>\\])", r"\\\1", raw)
