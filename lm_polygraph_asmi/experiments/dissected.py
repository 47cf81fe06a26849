"""The runs of a setting that saved masks, for the analysis of heads."""

from typing import Any

from lm_polygraph_asmi.results.run_groups import RunGroup, once, row_keys
from lm_polygraph_asmi.results.runs import Run


def runs_of(group: RunGroup) -> list[Run]:
    """Runs over a setting's answers or some of them."""
    return [*group.runs, *group.separate_runs]


def dissected(group: RunGroup, depth: float) -> tuple[Run, list[dict[str, Any]]] | None:
    """The run with the most masks at a depth, of those that saved details, and these."""
    found = ((run, run.at(depth, "masks", "kl")) for run in runs_of(group))
    saved = [(run, rows) for run, rows in found if rows]
    return max(saved, key=lambda each: len(each[1][0]["masks"]), default=None)


@once
def dissected_depths(group: RunGroup) -> list[float]:
    """Depths at which a run saved masks and divergences."""
    depths = {used["depth"] for run in runs_of(group) for used in run.settings()}
    return sorted(depth for depth in depths if dissected(group, depth))


def places(group: RunGroup, run: Run) -> list[tuple[int, int]]:
    """(row in use, row of the run) for a run of a setting, or of a part of it."""
    if any(run is method for method in group.runs):
        return list(enumerate(group.rows.tolist()))
    group_keys, run_keys = row_keys(group.run, run)
    run_rows = {key: row for row, key in enumerate(run_keys)}
    pairs = ((i, run_rows.get(group_keys[row])) for i, row in enumerate(group.rows))
    return [(i, row) for i, row in pairs if row is not None]
