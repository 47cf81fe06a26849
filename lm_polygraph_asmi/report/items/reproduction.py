"""The paper's published numbers beside those of the runs."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from lm_polygraph_asmi.analysis.clusters import Interval
from lm_polygraph_asmi.report.item import Items, MissingItem, ReportItem
from lm_polygraph_asmi.report.items.measured import Measure, alike
from lm_polygraph_asmi.results.paper import (
    BENCHMARKS,
    Published,
    about,
    departures,
    paper_setting,
    read_published,
)
from lm_polygraph_asmi.results.run_groups import RunGroup

NOTE = (
    "Here: with its 95 % interval, where one is computed. Difference: here minus paper; it tells "
    "nothing of whether the paper's number is reproduced. Same protocol: model, data, prompt, "
    "generation, quality and number of rows are the paper's; the note says what is not, or why "
    "there is no value. A score of other masks, K, scope or gate than the paper's is never used."
)

NO_ENDS = (float("nan"), float("nan"))


def _places(number: Published, groups: Sequence[RunGroup]) -> list[RunGroup]:
    """Settings to look in, the number's setting with the nearest number of rows first.

    Only those of the paper's protocol, unless the number's setting has none of them; empty if no
    run has its model and data.
    """
    same = [group for group in groups if not departures(group)]
    chosen = same if alike(number, same) else groups
    run = alike(number, chosen)
    run.sort(key=lambda group: abs(len(group) - _rows(number, group)))
    return run and [*run, *(group for group in chosen if group not in run)]


def _rows(number: Published, group: RunGroup) -> int:
    """Rows that a number of the paper is about; the n of a coverage counts tokens."""
    known = None if number.unit == "coverage" else number.n
    return known or BENCHMARKS[paper_setting(group).dataset].rows


def _beside(
    number: Published, groups: Sequence[RunGroup], measures: Mapping[str, Measure]
) -> dict[str, Any]:
    """The row of a number; without a value if the runs lack it."""
    here, same, note = None, None, "not run"
    places = _places(number, groups)
    if places:
        first = places[0]
        try:
            measured = measures[number.item](number, places)
        except ValueError as error:
            note = str(error)
        else:
            here = measured if isinstance(measured, Interval) else Interval(measured, *NO_ENDS)
            reasons = departures(first)
            sizes = (_rows(number, first), BENCHMARKS[paper_setting(first).dataset].rows)
            if not any(about(len(first), rows) for rows in sizes):
                reasons.append(f"{len(first)} rows, not {sizes[0]}")
            same, note = not reasons, "; ".join(reasons)
    return {
        "item": number.item,
        "label": number.label,
        "setting": number.where,
        "method": number.method or None,
        "depth": None if number.depth is None else f"{number.depth:.0%}",
        "quantity": number.quantity,
        "unit": number.unit,
        "paper": number.value,
        "here": here,
        "difference": None if here is None else here.value - number.value,
        "same protocol": same,
        "note": note,
    }


def compare(groups: Sequence[RunGroup], measures: Mapping[str, Measure]) -> Items:
    """Every number of the paper, and that of the runs; `measures`: by item of the report."""
    title = "The paper's numbers beside these"
    known = [group for group in groups if all(paper_setting(group))]
    if not known:
        return [MissingItem(title, "no run has a model and data of the paper")]
    table = pd.DataFrame([_beside(number, known, measures) for number in read_published()])
    return [
        ReportItem(
            "reproduction", title, known, table, None, [NOTE], 3, signed=("difference",),
            inline=False,
        )
    ]  # fmt: skip
