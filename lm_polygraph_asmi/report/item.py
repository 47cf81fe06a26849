"""One table or figure of the report, and how its values become text."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, NamedTuple, TypeVar

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
"""Short names of LM-Polygraph's methods. If a name contains another one, it comes first."""
ROUNDING = 1e-9
"""A part of an interval that is smaller, relative to the largest, is 0."""
BOLD, ITALIC = "font-weight: bold", "font-style: italic"


class Marked(NamedTuple):
    """The best value: bold, or italic if it does not differ significantly from the next best."""

    value: Any
    css: str


def leading(value: Any, ahead: Interval) -> Marked:
    """The best of several values, marked by the interval `ahead` of its lead over the next best."""
    return Marked(value, BOLD if ahead.excludes(0) else ITALIC)


@dataclass
class ReportItem:
    """One item of the report: a table, perhaps with a figure, computed from some settings.

    Attributes:
        name: name of the item's files.
        title: its heading.
        groups: the settings.
        table: raw values: numbers, `Interval`, `PRR`, `Marked` and text.
        draw: makes the figure; None: there is no figure.
        notes: sentences printed below the table.
        digits: number of digits after the decimal point.
        signed: columns of differences. They are written with a sign, and with an asterisk if the
            interval excludes 0.
        resamples: number of resamples of the intervals.
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
        """The notes, with explanations of brackets and asterisks if the table has them."""
        values = map(bare, self.table.to_numpy().ravel())
        written = [value for value in values if isinstance(value, Interval | PRR)]
        small = [group.label for group in self.groups if group.answers.too_few]
        labels = ["All settings"] if len(small) == len(self.groups) else small
        star = "; asterisk: it excludes 0" if self.signed else ""
        explained = {
            "±: standard error, 1,000 resamples of answers.": any(
                isinstance(value, PRR) for value in written
            ),
            # Written even if only the figure has intervals.
            f"Too small for reliable intervals: {'; '.join(labels)}. {FEW}": written and small,
            f"[low, high]: 95 % interval, {self.resamples:,} resamples of clusters unless stated "
            f"otherwise{star}.": any(
                isinstance(value, Interval) and pd.notna(value.low) for value in written
            ),
        }
        return [*self.notes, *(note for note, holds in explained.items() if holds)]

    def shown(self) -> pd.DataFrame:
        """The table with all values as text."""
        return pd.DataFrame(
            {
                name: [text(value, self.digits, name in self.signed) for value in self.table[name]]
                for name in self.table
            }
        )

    def styled(self, escape: str) -> Styler:
        """The table as text with bold and italic marks, for "html" or "latex"."""
        marks = self.table.map(lambda value: value.css if isinstance(value, Marked) else "")
        styler = self.shown().map(brief).style.hide(axis="index").apply(lambda _: marks, axis=None)
        return styler.format(escape=escape).format_index(escape=escape, axis=1)

    def flat(self) -> pd.DataFrame:
        """The table as numbers. An interval becomes three columns, a PRR two."""
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
    """An item for which these runs lack data, with the reason and what to run instead."""

    title: str
    reason: str


Items = Sequence[ReportItem | MissingItem]
"""What a function of the report returns."""


Row = dict[str, Any]
Made = Row | list[Row] | tuple[Row | list[Row], dict[str, Any]] | None
"""Result for one unit: one or several rows, perhaps with panels of the figure by title."""
Unit = TypeVar("Unit")
"""A unit from which rows are computed: a setting, or a tuple that contains settings."""


class Computed(NamedTuple):
    """The rows of an item, and where they come from."""

    rows: list[Row]
    panels: dict[str, Any]  # title -> data of one panel of the figure
    groups: list[RunGroup]  # the settings that have rows
    missing: str  # why other settings have no rows


def computed(
    units: Iterable[Unit],
    compute: Callable[[Unit], Made],
    label: Callable[[Unit], str] = lambda unit: getattr(unit, "label", ""),
) -> Computed:
    """Compute the rows of each unit. If this raises ValueError, the unit is listed as missing."""
    found = Computed([], {}, [], "")
    missing: dict[str, list[str]] = {}
    for unit in units:
        try:
            made = compute(unit)
        except ValueError as error:
            missing.setdefault(str(error), []).append(label(unit))
            continue
        rows, panels = made if isinstance(made, tuple) else (made, {})
        found.panels.update(panels)
        if rows:
            found.rows.extend([rows] if isinstance(rows, dict) else rows)
            parts = unit if isinstance(unit, tuple) else (unit,)
            found.groups.extend(
                part for part in parts if isinstance(part, RunGroup) and part not in found.groups
            )
    reasons = [f"{why} ({'; '.join(units)})" for why, units in missing.items()]
    return found._replace(missing="; ".join(reasons))


def frame(
    name: str,
    title: str,
    found: Computed,
    notes: Sequence[str] = (),
    figure: Callable[[Any], Figure] | None = None,
    otherwise: str = "no run has the data",
    **shown: Any,
) -> list[ReportItem] | list[MissingItem]:
    """Make an item from computed rows.

    Args:
        name, title, notes: see `ReportItem`. A note on units without rows is added.
        figure: draws the panels, or the table if there are no panels.
        otherwise: why the item is missing, if there are no rows and no unit gave a reason.
        **shown: other fields of `ReportItem`. By default, `groups` are the settings with rows.
    """
    if not found.rows:
        return [MissingItem(title, found.missing or otherwise)]
    table = pd.DataFrame(found.rows)
    draw = partial(figure, found.panels or table) if figure else None
    left_out = [f"Left out: {found.missing}."] if found.missing else []
    fields = {"groups": found.groups} | shown
    return [ReportItem(name, title, table=table, draw=draw, notes=[*notes, *left_out], **fields)]


def per_setting(
    name: str, title: str, *notes: str, **shown: Any
) -> Callable[[Callable[[RunGroup], Made]], Callable[[Sequence[RunGroup]], Items]]:
    """Make an item from a function that computes the rows of one setting.

    The decorated function takes all settings and returns items. Arguments: see `frame`.
    """

    def declare(compute: Callable[[RunGroup], Made]) -> Callable[[Sequence[RunGroup]], Items]:
        kept = once(compute)

        @wraps(compute)
        def make(groups: Sequence[RunGroup]) -> Items:
            return frame(name, title, computed(groups, kept), notes, **shown)

        return make

    return declare


def bare(value: Any) -> Any:
    """A value without its `Marked`."""
    return value.value if isinstance(value, Marked) else value


def text(value: Any, digits: int, signed: bool = False) -> str:
    """One value of a table as text. Undefined values become a dash."""
    value = bare(value)
    if isinstance(value, Interval | PRR):
        largest = max(map(abs, value))
        least = ROUNDING * largest if math.isfinite(largest) else 0
        center, *ends = (text(0.0 if abs(n) < least else n, digits, signed) for n in value)
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
    # Show the first significant digit of a value that would be rounded to 0.
    form = "1g" if value and not round(value, digits) else f"{digits}f"
    return f"{value:{'+' if signed else ''}.{form}}".replace("-", "−")


def brief(text: str) -> str:
    """A text in which the names of `SHORT` are shortened."""
    for name, short in SHORT.items():
        text = text.replace(name, short)
    return text
