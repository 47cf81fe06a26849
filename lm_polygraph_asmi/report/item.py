"""A table or figure of the report, and how its values are written."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure
from pandas.io.formats.style import Styler

from lm_polygraph_asmi.analysis.clusters import FEW, RESAMPLES, Interval
from lm_polygraph_asmi.analysis.prr import PRR
from lm_polygraph_asmi.results.run_groups import RunGroup, once

SHORT = {
    "MaximumSequenceProbability": "MSP", "MeanTokenEntropy": "Token entropy",
    "SelfCertainty": "Self-certainty", "MeanPointwiseMutualInformation": "PMI",
    "MeanConditionalPointwiseMutualInformation": "CPMI", "SemanticEntropy": "Semantic entropy",
    "MonteCarloSequenceEntropy": "MC-SE", "MonteCarloNormalizedSequenceEntropy": "MC-NSE",
    "KernelLanguageEntropy": "KLE", "PTrueSampling": "P(True), samples", "PTrue": "P(True)",
}  # fmt: skip
"""Short names of LM-Polygraph's methods; a name that contains another comes first."""
BOLD, ITALIC = "font-weight: bold", "font-style: italic"


class Marked(NamedTuple):
    """The best value: bold, or italic if not significantly different from the next."""

    value: Any
    css: str


def leading(value: Any, ahead: Interval) -> Marked:
    """The best of several values, marked by its difference from the next best."""
    return Marked(value, BOLD if ahead.excludes(0) else ITALIC)


@dataclass
class ReportItem:
    """One item of the report, computed from some settings (`groups`).

    Its table has raw values: floats, `Interval`, `PRR`, `Marked` and text, written with so many
    `digits` after the point. Columns in `signed` are differences, written with their sign, and with
    an asterisk if the interval excludes 0. `draw` makes the figure.
    """

    name: str
    title: str
    groups: Sequence[RunGroup]
    table: pd.DataFrame
    draw: Callable[[], Figure] | None = None
    notes: Sequence[str] = ()
    digits: int = 2
    signed: Sequence[str] = field(default_factory=tuple)
    resamples: int = RESAMPLES

    @property
    def caption(self) -> list[str]:
        """The notes, and the meaning of brackets and asterisks if the table has them."""
        values = map(bare, self.table.to_numpy().ravel())
        written = [value for value in values if isinstance(value, Interval | PRR)]
        notes = list(self.notes)
        if any(isinstance(value, PRR) for value in written):
            notes.append("±: standard error, 1,000 resamples of answers.")
        small = [group.label for group in self.groups if group.answers.too_few]
        if written and small:  # a figure may have intervals that the table has not
            labels = ["All settings"] if len(small) == len(self.groups) else small
            notes.append(f"Too small for reliable intervals: {'; '.join(labels)}. {FEW}")
        if any(isinstance(value, Interval) and pd.notna(value.low) for value in written):
            starred = "; asterisk: it excludes 0" if self.signed else ""
            notes.append(
                f"[low, high]: 95 % interval, {self.resamples:,} resamples of clusters unless "
                f"stated otherwise{starred}."
            )
        return notes

    def shown(self) -> pd.DataFrame:
        """The table as text."""
        return pd.DataFrame(
            {
                name: [text(value, self.digits, name in self.signed) for value in self.table[name]]
                for name in self.table
            }
        )

    def styled(self, escape: str) -> Styler:
        """The table as text with its marks, for "html" or "latex"."""
        marks = self.table.map(lambda value: value.css if isinstance(value, Marked) else "")
        styler = self.shown().map(brief).style.hide(axis="index").apply(lambda _: marks, axis=None)
        return styler.format(escape=escape).format_index(escape=escape, axis=1)

    def flat(self) -> pd.DataFrame:
        """The table as numbers: an interval becomes three columns, a PRR two."""
        columns: dict[str, list[Any]] = {}
        for name in map(str, self.table):
            values = [bare(value) for value in self.table[name]]
            kind = next((type(v) for v in values if isinstance(v, Interval | PRR)), None)
            columns[name] = [v.value if kind and isinstance(v, kind) else v for v in values]
            for part in kind._fields[1:] if kind else ():
                columns[f"{name} {part.replace('_', ' ')}"] = [
                    getattr(v, part, None) for v in values
                ]
        return pd.DataFrame(columns)


class MissingItem(NamedTuple):
    """An item that these runs lack the data for, and what would make it."""

    title: str
    reason: str


Items = Sequence[ReportItem | MissingItem]
"""Return type of a function of the report."""


def frame(
    name: str,
    title: str,
    each: Iterable[Any],
    compute: Callable[[Any], Any],
    notes: Sequence[str] | Callable[[ReportItem], Sequence[str]] = (),
    figure: Callable[[Any], Figure] | None = None,
    *,
    label: Callable[[Any], str] = lambda group: group.label,
    otherwise: str = "no run has the data",
    **shown: Any,
) -> list[ReportItem] | list[MissingItem]:
    """An item whose rows are computed for `each` setting, or tuple of settings.

    `compute` returns a row or several; or a pair of them and of panels for `figure`, by title, else
    the figure gets the table. If it raises ValueError, a note names the setting (`label`) and the
    reason. Without any row, the item is missing, for these reasons or `otherwise`. `shown`: other
    fields of `ReportItem`; its groups are those with rows unless named here.
    """
    rows: list[dict[str, Any]] = []
    used: list[RunGroup] = []
    panels: dict[str, Any] = {}
    missing: list[tuple[str, str]] = []
    for group in each:
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
    item = ReportItem(name, title, table=pd.DataFrame(rows), **{"groups": used} | shown)
    item.draw = partial(figure, panels or item.table) if figure else None
    item.notes = [*(notes(item) if callable(notes) else notes)]
    if missing:
        item.notes.append(f"Left out: {listed(missing)}.")
    return [item]


def per_setting(
    name: str, title: str, *notes: str, **shown: Any
) -> Callable[[Callable[[RunGroup], Any]], Callable[[Sequence[RunGroup]], Items]]:
    """Make an item of a function that computes the rows of one setting; arguments of `frame`."""

    def declare(compute: Callable[[RunGroup], Any]) -> Callable[[Sequence[RunGroup]], Items]:
        kept = once(compute)

        @wraps(compute)
        def make(groups: Sequence[RunGroup]) -> Items:
            return frame(name, title, groups, kept, notes, **shown)

        return make

    return declare


def listed(reasons: Sequence[tuple[str, str]]) -> str:
    """(setting, reason) in one line, each reason with all it applies to."""
    named: dict[str, list[str]] = {}
    for group, why in reasons:
        named.setdefault(why, []).append(group)
    return "; ".join(f"{why} ({'; '.join(groups)})" for why, groups in named.items())


def bare(value: Any) -> Any:
    """A value without its mark."""
    return value.value if isinstance(value, Marked) else value


def text(value: Any, digits: int, signed: bool = False) -> str:
    """One value of a table; a dash where it is undefined."""
    value = bare(value)
    if isinstance(value, Interval | PRR):
        center, *ends = (text(number, digits, signed) for number in value)
        if isinstance(value, PRR):
            return center if pd.isna(value.standard_error) else f"{center} ± {ends[0].strip('+')}"
        if pd.isna(value.value) or pd.isna(value.low) or value.low == value.high:  # no spread
            return center
        star = "*" if signed and value.excludes(0) else ""
        return f"{center}{star} [{', '.join(ends)}]"
    if value is None or pd.isna(value):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value)
    # A value that would be written as 0 has its first digit.
    form = "1g" if value and not round(value, digits) else f"{digits}f"
    return f"{value:{'+' if signed else ''}.{form}}".replace("-", "−")


def brief(text: str) -> str:
    """The text with the names of `SHORT` shortened."""
    for name, short in SHORT.items():
        text = text.replace(name, short)
    return text
