"""The paper's published numbers beside those of the runs, each with a verdict."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from lm_polygraph_asmi.analysis.clusters import Interval
from lm_polygraph_asmi.analysis.reproduction import (
    AGREES,
    DIFFERS,
    INCONCLUSIVE,
    REPRODUCTIONS,
    Reproduction,
    compare_published,
    reproduction_verdicts,
    standard_error,
)
from lm_polygraph_asmi.report import figures
from lm_polygraph_asmi.report.item import Items, MissingItem, ReportItem, listed
from lm_polygraph_asmi.report.items.measured import CLOSING, WITHOUT, Measure, alike
from lm_polygraph_asmi.results.paper import (
    BENCHMARKS,
    PAPER,
    NotComparable,
    Published,
    about,
    departures,
    open_choices,
    paper_setting,
    read_published,
)
from lm_polygraph_asmi.results.run_groups import RunGroup, once

SHOWN, NOT_RUN, NOT_COMPARABLE = "shown", "not run", "not comparable"
VERDICTS = (*REPRODUCTIONS, SHOWN, NOT_COMPARABLE, NOT_RUN)
CHECKS = ("tab:datasets", "tab:h2h", "app:mechanism-details")
"""Labels of the numbers of data sets that tell the protocol."""
UNTESTED = {
    "cost": "seconds and memory depend on the machine",
    "stability": "the paper gives no error; with five seeds, an sd is known to about a third",
    "depth_selection": "the paper gives no error",
    "mechanism": "the paper gives neither error nor model",
    "matched_flags": "a p-value has no error",
    "tokens an answer": "the paper does not tell whether closing tokens count",
    "PRR of head_to_head": "the benchmark has the same",
    "analysis draw": "the paper's two draws differ, and a run has one",
    "deployed draw": "the paper's two draws differ, and a run has one",
    "correlation of two draws": "the paper gives no error",
    "Spearman with H": "the lowest and the highest of three have no error",
    "four layers from the top": "the paper gives no error",
    "flips of low MI": "a bound has no error",
    "error rates, tokens": "the paper does not name the data",
}
"""Item, or part of a quantity -> why it is shown and not judged."""


class Compared(NamedTuple):
    """A published number and its measured counterpart.

    Attributes:
        number: of the paper.
        verdict: one of `VERDICTS`.
        why: the reason, where it is none of `REPRODUCTIONS`.
        group: the setting it was measured on.
        measured: with its 95 % interval.
        assumed: whether the paper's standard error is assumed, from that of the runs.
        result: the difference, if it was judged.
        p_value: after Holm over all that were judged.
    """

    number: Published
    verdict: str
    why: str = ""
    group: RunGroup | None = None
    measured: Interval | None = None
    assumed: bool = False
    result: Reproduction | None = None
    p_value: float | None = None


@once
def _departures(group: RunGroup) -> tuple[str, ...]:
    return tuple(departures(group))


def _reason(number: Published) -> str:
    """Why a number is not judged; empty if it is."""
    if number.item == "head_to_head" and number.unit == "PRR":
        return UNTESTED["PRR of head_to_head"]
    known = (why for key, why in UNTESTED.items() if key == number.item or key in number.quantity)
    without = "the same answers as with it" if number.quantity.endswith(WITHOUT) else ""
    return next(known, "") or without


def _readings(published: Sequence[Published]) -> Iterator[Published]:
    """The numbers, tokens of an answer once with and once without the closing token."""
    for number in published:
        if number.unit == "tokens" and number.item == "datasets" and "answer" in number.quantity:
            for reading in (CLOSING, WITHOUT):
                yield replace(number, quantity=number.quantity + reading)
        else:
            yield number


def _places(number: Published, groups: Sequence[RunGroup]) -> list[RunGroup]:
    """Settings to look in, the number's setting with the nearest number of rows first.

    Empty if no run has that model and data.

    Raises:
        NotComparable: all runs of that model and data depart from the paper's protocol.
    """

    def rows(group: RunGroup) -> list[int]:
        benchmark = BENCHMARKS[paper_setting(group).dataset].rows
        return [number.rows or benchmark, benchmark]

    run = [group for group in alike(number, groups) if all(paper_setting(group))]
    kept = [group for group in run if not _departures(group)]
    sized = [group for group in kept if any(about(len(group), n) for n in rows(group))]
    if run and not sized:
        reasons = [(group.label, "; ".join(_departures(group))) for group in run]
        reasons = [
            (label, why or f"{len(group)} rows, not {rows(group)[0]}")
            for (label, why), group in zip(reasons, run, strict=True)
        ]
        raise NotComparable(listed(reasons))
    sized.sort(key=lambda group: abs(len(group) - rows(group)[0]))
    others = [group for group in groups if group not in run and all(paper_setting(group))]
    return sized and [*sized, *(group for group in others if not _departures(group))]


def _measured(
    number: Published, groups: Sequence[RunGroup], measures: Mapping[str, Measure]
) -> Compared:
    """The comparison without its verdict, or the reason for none."""
    try:
        places = _places(number, groups)
        if not places:
            return Compared(number, NOT_RUN)
        measured = measures[number.item](number, places)
    except NotComparable as error:
        return Compared(number, NOT_COMPARABLE, str(error))
    except ValueError as error:
        return Compared(number, NOT_RUN, str(error))
    group = places[0]
    shown = Compared(number, SHOWN, _reason(number), group, measured)
    if shown.why or number.margin is None:
        return shown
    if group.too_small:
        return shown._replace(why="too small for reliable intervals")
    spread, assumed = number.error, number.error is None
    if spread is None:  # as uncertain as here, with the paper's number of rows
        spread = standard_error(measured) * math.sqrt(len(group) / (number.rows or len(group)))
    try:
        result = compare_published(measured, number.value, spread, number.rounding)
    except ValueError:
        return shown._replace(why="undefined on these answers")
    return Compared(number, "", "", group, measured, assumed, result)


def compare(
    groups: Sequence[RunGroup], measures: Mapping[str, Measure], file: str | Path = PAPER
) -> list[Compared]:
    """Every published number with its verdict; a difference printed twice is judged once.

    Raises:
        ValueError: the file of published numbers is damaged; see `read_published`.
    """
    rows, printed = [], set()
    for number in _readings(read_published(file)):
        row = _measured(number, groups, measures)
        key = (number.item, number.where, number.method, number.depth, number.unit, number.value)
        if row.result and number.item == "head_to_head" and key in printed:
            row = row._replace(verdict=SHOWN, why="printed twice, judged once", result=None)
        printed.add(key)
        rows.append(row)
    tested = [i for i, row in enumerate(rows) if row.result]
    results = [result for row in rows if (result := row.result)]
    margins = [float(rows[i].number.margin or 0) for i in tested]
    for i, (verdict, p) in zip(tested, reproduction_verdicts(results, margins), strict=True):
        rows[i] = rows[i]._replace(verdict=verdict, p_value=p)
    return rows


def _row(compared: Compared) -> dict[str, Any]:
    number, result = compared.number, compared.result
    return {
        "item": number.item,
        "label": number.label,
        "setting": number.where,
        "method": number.method or None,
        "depth": None if number.depth is None else f"{number.depth:.0%}",
        "quantity": number.quantity,
        "unit": number.unit,
        "paper": number.value,
        "its error": number.error,
        "here": compared.measured,
        "difference": result and result.difference,
        "90 % low": result and result.low,
        "90 % high": result and result.high,
        "margin": number.margin if result else None,
        "margin in reach": result and result.reach,
        "p, Holm": compared.p_value,
        "verdict": compared.verdict,
        "why": compared.why or ("its error assumed as here" if compared.assumed else None),
    }


RULE = (
    "Difference: here minus paper. Agrees: its 90 % interval, from the errors of both and the "
    "rounding of the paper's value, is within the margin, which was fixed beforehand. Differs: "
    "p < 0.05 after Holm over all that were judged. Else inconclusive, which is not agreement: "
    "where the margin is not in reach, more answers would be needed."
)


def reproduction(rows: Sequence[Compared], groups: Sequence[RunGroup]) -> Items:
    """First checks of the protocol, counts of verdicts, and every number of the paper.

    Args:
        rows: from `compare`.
        groups: the settings they were compared with.
    """
    title = "The paper's numbers beside these"
    used = [group for group in groups if any(row.group is group for row in rows)]
    left = [
        (group.label, "; ".join(_departures(group)) or f"{len(group)} rows")
        for group in groups
        if group not in used
    ]
    if not used:
        return [MissingItem(title, f"no run is comparable with the paper's: {listed(left)}")]
    notes = [RULE, *([f"Not comparable: {listed(left)}."] if left else [])]
    choices = [(group.label, chosen) for group in used if (chosen := open_choices(group))]
    if choices:
        notes.append(f"Settings that the paper does not give: {listed(choices)}.")
    table = pd.DataFrame([_row(row) for row in rows])
    checks = table[
        (table["item"] == "datasets") & table["label"].isin(CHECKS) & table["here"].notna()
    ]
    shown = ["setting", "quantity", "paper", "here", "difference", "90 % low", "90 % high",
             "margin", "verdict"]  # fmt: skip
    items = []
    if len(checks):
        about_checks = [
            "Read these first: another prompt, other rows, another stop or another metric shows "
            "here, and then nothing below means much. Prompt and answer tokens: medians. Tokens an "
            "answer: the paper's count over 500 answers, shown and not judged. Its 2.18 on BabiQA "
            "is low for a median of 3, with and without closing tokens.",
        ]
        items.append(
            ReportItem(
                "first_checks", "First checks: is this the paper's protocol?", used,
                checks[shown].reset_index(drop=True), None, [*about_checks, *notes], 3,
                signed=("difference",),
            )
        )  # fmt: skip
    panels = _panels(rows)
    counts = Counter((row.number.item, row.verdict) for row in rows)
    by_item = [
        {"item": item} | {verdict: counts[item, verdict] for verdict in VERDICTS}
        for item in dict.fromkeys(row.number.item for row in rows)
    ]
    items.append(
        ReportItem("reproduction_counts", "The paper's numbers: verdicts by item", used,
                   pd.DataFrame(by_item), None, notes)
    )  # fmt: skip
    items.append(
        ReportItem(
            "reproduction", title, used, table,
            partial(figures.identity, panels) if panels else None,
            [*notes, "Intervals of PRR: 10,000 resamples."], 3, signed=("difference",),
            p_values=("p, Holm",), inline=False,
            pictured="Figure: 95 % intervals of both; the line is equality; only judged numbers.",
        )
    )  # fmt: skip
    return items


def _panels(rows: Sequence[Compared]) -> dict[str, list[tuple[float, float, Interval, str]]]:
    """Unit -> (paper's value, its 95 % half width, measured, verdict) of what was judged."""
    panels: dict[str, list[tuple[float, float, Interval, str]]] = {}
    for row in rows:
        if row.result and row.measured:
            spread = 1.96 * (row.number.error or 0)
            panels.setdefault(row.number.unit, []).append(
                (row.number.value, spread, row.measured, row.verdict)
            )
    return panels


def reproduced(rows: Sequence[Compared]) -> list[str]:
    """One line for the top of the report: a count of each verdict; none if nothing was compared."""
    counts = Counter(row.verdict for row in rows)
    total = sum(counts[verdict] for verdict in REPRODUCTIONS)
    if not total + counts[SHOWN]:
        return []
    differing = [row for row in rows if row.verdict == DIFFERS]
    checks = [row for row in differing if row.number.item == "datasets"]
    first = f" **First checks that differ: {_named(checks)}.**" if checks else ""
    rest = [row for row in differing if row not in checks]
    return [
        f"**Of the paper's numbers, {counts[AGREES]} agree, {counts[DIFFERS]} differ and "
        f"{counts[INCONCLUSIVE]} are inconclusive, of {total} judged.** {SHOWN.capitalize()} "
        f"only: {counts[SHOWN]}; {NOT_COMPARABLE}: {counts[NOT_COMPARABLE]}; {NOT_RUN}: "
        f"{counts[NOT_RUN]}.{first}{f' Others that differ: {_named(rest)}.' if rest else ''}"
    ]


def _named(rows: Sequence[Compared], most: int = 5) -> str:
    names = [
        f"{' '.join(filter(None, (row.number.method, row.number.quantity)))} on {row.number.where}"
        for row in rows[:most]
    ]
    return "; ".join(names) + (f" and {len(rows) - most} more" if len(rows) > most else "")
