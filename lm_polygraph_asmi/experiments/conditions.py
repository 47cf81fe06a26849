"""The runs of a setting that are no methods of it: controls, and those that saved masks."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.results.names import at_depth
from lm_polygraph_asmi.results.run_groups import (
    RunGroup,
    Unavailable,
    is_control,
    once,
    row_keys,
    same_depth,
)
from lm_polygraph_asmi.results.runs import Run


class ConditionRun(NamedTuple):
    """A run of a control condition on a setting's answers.

    Attributes:
        condition: what was perturbed, such as "mlp".
        perturbation_scale: factor of the change; None: unscaled.
        matching: how the scale was matched, "effect" or "norm"; None if it was a given number.
        times: factor of the matched scale.
    """

    condition: str
    perturbation_scale: float | None
    matching: str | None
    times: float
    run: Run

    @classmethod
    def of(cls, run: Run) -> "ConditionRun":
        """Read it from the settings and the manifest of a control's run."""
        used = next(iter([*run.methods.values(), *map(ASMIConfig.from_dict, run.settings())]))
        config = run.recorded("config")
        controls: Mapping[str, Any] = config.get("controls") or {}
        matching, times = None, float(controls.get("times") or 1)
        if controls.get("scales"):
            matching = controls.get("matching")
        elif used.perturbation != "heads" and isinstance(
            (config.get("asmi") or {}).get("perturbation_scale"), str
        ):  # of version 0.1: a file, from which the calculator took the scale by effect
            matching, times = "effect", 1.0
        return cls(used.perturbation, used.perturbation_scale, matching, times, run)

    def method(self, symbol: str, depth: float) -> str:
        """Name of a score in this run; Unavailable without it."""
        for name, config in self.run.methods.items():
            if config.symbol == symbol and same_depth(config.depth, depth):
                return name
        raise Unavailable(f"the run of {self.condition} has no {symbol} at {depth:.1%}")

    def score(self, group: RunGroup, symbol: str) -> np.ndarray:
        """(n,) one of its scores, at the operating depth of the setting; Unavailable if unknown."""
        method = self.method(symbol, group.depth)
        scores = self.run.scores[method].to_numpy(dtype=float)[group.rows]
        if not np.isfinite(scores).all():
            raise Unavailable(f"{method} is not finite for every row")
        return scores

    def counterpart(self, group: RunGroup, symbol: str) -> str:
        """The method of heads to compare it with: the same masks and settings."""
        used = self.run.methods[self.method(symbol, group.depth)]
        for name, config in group.methods.items():
            if config.same_but(used, "perturbation", "perturbation_scale"):
                return name
        raise Unavailable(f"no run of heads has the settings of the run of {self.condition}")


def conditions(group: RunGroup, partly: bool = False) -> list[ConditionRun]:
    """Runs of control conditions over a setting's answers; `partly`: also over some of them."""
    rows = len(group.run.scores)
    runs = [run for run in group.separate_runs if is_control(run)]
    return [ConditionRun.of(run) for run in runs if partly or len(run.scores) >= rows]


def runs_of_heads(group: RunGroup) -> list[Run]:
    """Runs of masked heads over a setting's answers or some of them."""
    return [*group.runs, *(run for run in group.separate_runs if not is_control(run))]


def dissected(group: RunGroup, depth: float) -> Run | None:
    """The run of heads that saved masks and divergences at a depth, with the most masks."""
    names = [at_depth(name, depth) for name in ("asmi_masks", "asmi_kl")]
    runs = [run for run in runs_of_heads(group) if not run.lacks(names)]
    return max(runs, key=lambda run: len(run.stats[names[0]][0]), default=None)


@once
def dissected_depths(group: RunGroup) -> list[float]:
    """Depths at which a run saved masks and divergences."""
    depths = {used["depth"] for run in runs_of_heads(group) for used in run.settings()}
    return sorted(depth for depth in depths if dissected(group, depth))


def places(group: RunGroup, run: Run) -> list[tuple[int, int]]:
    """(row in use, row of the run) for a run of a setting, or of a part of it."""
    if any(run is method for method in group.runs):
        return list(enumerate(group.rows.tolist()))
    group_keys, run_keys = row_keys(group.run, run)
    run_rows = {key: row for row, key in enumerate(run_keys)}
    pairs = ((i, run_rows.get(group_keys[row])) for i, row in enumerate(group.rows))
    return [(i, row) for i, row in pairs if row is not None]
