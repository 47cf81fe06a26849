"""An item that shows the paper's published numbers beside those of the runs."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd

from lm_polygraph_asmi.analysis.clusters import Interval
from lm_polygraph_asmi.analysis.prr import PRR
from lm_polygraph_asmi.report.item import Items, ReportItem, bare, computed, frame
from lm_polygraph_asmi.results.paper import (
    BENCHMARKS,
    MODELS,
    departures,
    paper_method,
    paper_setting,
    read_published,
)
from lm_polygraph_asmi.results.run_groups import RunGroup
from lm_polygraph_asmi.results.runs import SYMBOLS

NOTES = (
    "Here: as in the other tables. Difference: here minus paper. A difference alone does not show "
    "whether the paper's number is reproduced.",
    "Same protocol: model, data, prompt, generation, quality, number of rows and settings of ASMI "
    "are the paper's. Otherwise, the last column names what differs.",
)
OPERATING, HEAD_MASKS = 0.6, 300


def papers_numbers(groups: Sequence[RunGroup], made: Sequence[ReportItem]) -> Items:
    """Every number of the paper that the tables of these items also contain."""
    known = [group for group in groups if all(paper_setting(group))]
    beside = partial(_beside, groups=known, tables={item.name: item for item in made})
    return frame(
        "reproduction",
        "The paper's numbers beside these",
        computed(read_published().itertuples(), beside),
        NOTES,
        groups=known,
        digits=3,
        signed=("difference",),
        otherwise="the tables of this report have none of them"
        if known
        else "no run has a model and data of the paper",
    )


def _beside(
    number: Any, groups: Sequence[RunGroup], tables: Mapping[str, ReportItem]
) -> dict[str, Any] | None:
    """The row for one of the paper's numbers; None if the tables do not contain it."""
    item = tables.get(number.table)
    if item is None or (number.table == "depth_selection" and not _sixteen(item.groups)):
        return None
    for group in _places(number, groups):
        here = bare(_value(number, item, group))
        if isinstance(here, PRR):
            here = here.value
        if here is None or pd.isna(here.value if isinstance(here, Interval) else here):
            continue
        if number.unit == "percent" and number.table != "causal_probe":  # that table is in percent
            here = 100 * here
        reasons = _other_protocol(number, group, tables)
        return {
            "of the paper": number.label,
            "setting": number.where,
            "method": number.method or None,
            "depth": None if pd.isna(number.depth) else f"{number.depth:.0%}",
            "quantity": number.quantity,
            "paper": number.value,
            "here": here,
            "difference": (here.value if isinstance(here, Interval) else here) - number.value,
            "same protocol": not reasons,
            "but": "; ".join(reasons) or None,
        }
    return None


def _sixteen(groups: Sequence[RunGroup]) -> bool:
    """Whether these are the sixteen settings over which the paper chooses a depth."""
    settings = {paper_setting(group) for group in groups if not departures(group)}
    return len(settings) == len(groups) == len(MODELS) * (len(BENCHMARKS) - 1)


def _places(number: Any, groups: Sequence[RunGroup]) -> list[RunGroup]:
    """Settings with the number's model and data, those nearest to the paper's protocol first."""
    printed = number.model, number.dataset
    alike = [
        group
        for group in groups
        if all(
            not name or name == other
            for name, other in zip(printed, paper_setting(group), strict=True)
        )
    ]
    return sorted(alike, key=lambda g: (bool(departures(g)), abs(len(g) - _rows(number, g))))


def _rows(number: Any, group: RunGroup) -> int:
    """Rows that one of the paper's numbers is about; the n of a coverage counts tokens instead."""
    whole = number.unit == "coverage" or pd.isna(number.n)
    return BENCHMARKS[paper_setting(group)[1]].rows if whole else int(number.n)


def _value(number: Any, item: ReportItem, group: RunGroup) -> Any:
    """The value of a table that is the same quantity; None if there is none."""
    table, column = item.table, number.column
    conditions = dict(part.split("=", 1) for part in number.row.split("; ") if part)
    if number.table == "benchmark":  # a column per setting
        column = group.label
        if number.method in SYMBOLS:
            method = paper_method(
                group, number.method, OPERATING if pd.isna(number.depth) else number.depth
            )
            table = table[table["method"] == method]
            conditions = {}
    elif "setting" in table:
        table = table[table["setting"] == group.label]
    if column not in table or not {*conditions} <= {*table}:
        return None
    for name, start in conditions.items():
        table = table[table[name].astype(str).str.startswith(start)]
    return next((value for value in table[column] if value is not None), None)


def _other_protocol(number: Any, group: RunGroup, tables: Mapping[str, ReportItem]) -> list[str]:
    """Names of what differs between a setting and the paper's protocol for this number."""
    reasons = [*departures(group)]
    sizes = (_rows(number, group), BENCHMARKS[paper_setting(group)[1]].rows)
    # Allow for rounding ("8K" on CoQA) and for rows that were left out.
    if not any(abs(len(group) - rows) <= 0.02 * rows for rows in sizes):
        reasons.append("rows")
    if number.item in ("head_coupling", "causal_probe") and "head_coupling" in tables:
        masks = number._replace(table="head_coupling", column="S", row="depth=60%")
        if _value(masks, tables["head_coupling"], group) != HEAD_MASKS:
            reasons.append("masks of heads")
    elif not pd.isna(number.depth) and number.table != "benchmark":
        papers = {symbol: paper_method(group, symbol, OPERATING) for symbol in group.variants}
        reasons += ["settings of ASMI"] * (papers != group.variants)
    return reasons
