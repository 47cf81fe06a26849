"""The runs of a setting that saved masks, for the analysis of heads."""

from lm_polygraph_asmi.results.names import at_depth
from lm_polygraph_asmi.results.run_groups import RunGroup, once, row_keys
from lm_polygraph_asmi.results.runs import Run


def runs_of(group: RunGroup) -> list[Run]:
    """Runs over a setting's answers or some of them."""
    return [*group.runs, *group.separate_runs]


def dissected(group: RunGroup, depth: float) -> Run | None:
    """The run that saved masks and divergences at a depth, with the most masks."""
    names = [at_depth(name, depth) for name in ("asmi_masks", "asmi_kl")]
    runs = [run for run in runs_of(group) if not run.lacks(names)]
    return max(runs, key=lambda run: len(run.stats[names[0]][0]), default=None)


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
