"""Whether a run will work, and its cost: the checks before a run, then two of its rows."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from huggingface_hub.errors import HFValidationError
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from lm_polygraph_asmi.config import target_layer
from lm_polygraph_asmi.host.configs import container
from lm_polygraph_asmi.host.window import read_sizes
from lm_polygraph_asmi.maths import operating_point
from lm_polygraph_asmi.results.manifest import model_of, read_manifest
from lm_polygraph_asmi.results.runs import load_run
from lm_polygraph_asmi.runs.checks import Finding, Plan, findings_of, read_plan
from lm_polygraph_asmi.runs.compose import compose_run

STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
ROWS = 2


@dataclass(frozen=True)
class Diagnosis:
    """Findings about a run.

    Attributes:
        config: name of its config.
        checks: (check, state, what to do) of each finding, states of `STYLES`.
        cost: estimated cost of the whole run, from two rows; empty if none were scored.
        protocol: part -> what the run will do; empty if its config cannot be read.
    """

    config: str
    checks: list[tuple[str, str, str]] = field(default_factory=list)
    cost: dict[str, Any] = field(default_factory=dict)
    protocol: dict[str, str] = field(default_factory=dict)

    @property
    def works(self) -> bool:
        """Whether no check found a problem."""
        return all(state != "problem" for _, state, _ in self.checks)

    def add(self, name: str, findings: Sequence[Finding]) -> None:
        """Add the findings of a check; without any, it is ok."""
        states = [("problem" if fatal else "warning", text) for text, fatal in findings]
        self.checks.extend((name, state, text) for state, text in states or [("ok", "")])

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        named = [dict(zip(("check", "state", "text"), check, strict=True)) for check in self.checks]
        return asdict(self) | {"checks": named, "works": self.works}


def diagnose(
    console: Console,
    config_name: str,
    config_dir: str | None = None,
    overrides: Sequence[str] = (),
    run: bool = True,
) -> Diagnosis:
    """Check a run, with `run` also by scoring two rows; print the findings and return them.

    All else is as for polygraph_eval. ValueError for an unknown config or override.
    """
    config = compose_run(config_name, config_dir, overrides)
    diagnosis = Diagnosis(config_name)
    with console.status("checking the run") as status:
        plan = read_plan(config)
        for name, findings in findings_of(plan).items():
            diagnosis.add(name, findings)
        if "config" not in plan.faults:
            diagnosis.protocol.update(protocol(plan))
        if run and diagnosis.works:
            status.update("scoring two rows with every method")
            folder = ["--config-dir", config_dir] if config_dir else []
            try:
                trial = try_rows(config, ["--config-name", config_name, *folder, *overrides])
                diagnosis.add("two rows", _check_scores(trial))
                diagnosis.cost.update(costs(trial, len(plan.asked), len(config.get("seed") or [1])))
            except (RuntimeError, ValueError) as error:
                diagnosis.add("two rows", [Finding(str(error))])
    job = ", one job of its sweep" if config.hydra.mode == RunMode.MULTIRUN else ""
    described = Table(title="What will run", show_header=False)
    for name, text in diagnosis.protocol.items():
        described.add_row(name, Text(text))
    report = Table("check", "state", "what to do", title=f"{config_name}{job}")
    for name, state, text in diagnosis.checks:
        report.add_row(name, Text(state, STYLES[state]), Text(text))
    for table, content in ((described, diagnosis.protocol), (report, True)):
        if content:
            console.print(table)
    if diagnosis.cost:
        console.print(estimate(diagnosis.cost))
    return diagnosis


def protocol(plan: Plan) -> dict[str, str]:
    """Part -> what a run will do, as far as it can be read."""
    of_asmi = [estimator for estimator in plan.estimators if hasattr(estimator, "described")]
    baselines = [estimator for estimator in plan.estimators if estimator not in of_asmi]
    model = container(plan.config.get("model") or DictConfig({}))
    about, rows = model_of(model), plan.asked
    parts = {
        name: f"{len(some)}: {', '.join(map(str, some))}" if some else "none"
        for name, some in (("ASMI", of_asmi), ("baselines", baselines))
    }
    parts["masks"] = _masks(plan, model)
    parts["model"] = f"{about['path']}, revision {about['revision']}"
    if rows:
        clusters = len({row.cluster for row in rows})
        parts["rows"] = f"{len(rows)} in {clusters} clusters, {len(plan.rows.dropped)} left out"
        parts["first prompt"] = str(rows[0].input)
    return {name: text for name, text in parts.items() if text}


def _masks(plan: Plan, model: Mapping[str, Any]) -> str:
    """Layer, S and p of each depth that is scored."""
    try:
        sizes = read_sizes(model)
    except (OSError, ValueError, HFValidationError):  # not here
        sizes = None
    lines = []
    for config in (e.config for e in plan.estimators if hasattr(e, "described")):
        layer, rate, masks = "", config.mask_rate, config.num_masks
        if sizes is not None:
            layer = f" (layer {target_layer(config.depth, sizes.layers)} of {sizes.layers})"
            rate, masks = operating_point(sizes.heads, masks, rate)
        by_heads = "from the number of heads"
        lines.append(
            f"depth {config.depth:.1%}{layer}: S = {masks or by_heads}, p = {rate or by_heads}, "
            f"{config.mask_sampler} masks, scope {config.scope}, seed {config.seed}"
        )
    return "\n".join(dict.fromkeys(lines))


class Trial(NamedTuple):
    """Scores and cost of two rows of a run.

    Attributes:
        scores: a row per example, a column per method.
        times: seconds from the start to the first row and to the end of each batch.
        phases: seconds per row of each phase in the manifest; empty without a manifest.
        peaks: peak bytes of each device, from the manifest.
    """

    scores: pd.DataFrame
    times: list[float]
    phases: dict[str, float]
    peaks: dict[str, int]


def try_rows(config: DictConfig, arguments: Sequence[str]) -> Trial:
    """Run polygraph_eval with two of its rows in a temporary folder; RuntimeError if it fails.

    The config is composed from its arguments.
    """
    with tempfile.TemporaryDirectory(prefix="polygraph_asmi_") as folder:
        changed = [
            "hydra.mode=RUN",
            f"hydra.run.dir='{folder}'",
            f"++save_path='{folder}'",
            f"++seed=[{(config.get('seed') or [1])[0]}]",
            f"++subsample_eval_dataset={ROWS}",
            "++report_to_wandb=false",
        ]
        if OmegaConf.select(config, "asmi.result_cache") is not None:
            changed.append(f"asmi.result_cache='{folder}/result cache'")  # an empty one
        script = Path(sys.executable).with_name("polygraph_eval")
        started = time.time()
        process = subprocess.run(
            [sys.executable, str(script), *arguments, *changed],
            env=os.environ | {"HYDRA_FULL_ERROR": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if process.returncode:
            raise RuntimeError(_failure(process))
        run = load_run(folder)
        try:
            manifest = read_manifest(run.path)
        except FileNotFoundError:  # a config without this plugin's callback
            manifest = {}
        log = "".join(file.read_text() for file in Path(folder).glob("*.log"))
        return Trial(
            scores=run.scores,
            times=[ended - started for ended in batch_times(log)],
            phases={name: timing["median"] for name, timing in manifest.get("seconds", {}).items()},
            peaks=manifest.get("peak_memory_bytes", {}),
        )


def _failure(process: subprocess.CompletedProcess) -> str:
    if process.returncode < 0:
        return f"the system killed it with signal {-process.returncode}, as it does without memory"
    # After the last traceback, unindented lines belong to the exception.
    last = process.stderr.rpartition("Traceback (most recent call last):")[2]
    error = "\n".join(re.findall(r"^\S.*", last, re.MULTILINE)[-5:])
    places = re.findall(r'^  File "([^"]+)", line (\d+).*\n    (.*)', last, re.MULTILINE)
    if not places:
        return error
    file, line, source = places[-1]
    return f"{error}\n({Path(file).name}, line {line}: {source})"


def batch_times(log: str) -> list[float]:
    """Times at which the first batch began and each batch ended, from the log."""
    mark = r"^\[([\d-]+ [\d:]+,\d+)\].*(?:Done .* stat calculators|= NEW BATCH =)"
    times = re.findall(mark, log, re.MULTILINE)
    return [datetime.fromisoformat(at.replace(",", ".")).timestamp() for at in times]


def _check_scores(trial: Trial) -> list[Finding]:
    finite = np.isfinite(trial.scores).all()
    if finite.all():
        return []
    text = (
        f"expected finite scores, got others from {', '.join(finite.index[~finite])}; "
        "LM-Polygraph ranks NaN as most confident. Leave them out, or try another "
        "model.load_model_args.dtype"
    )
    return [Finding(text, fatal=False)]


def costs(trial: Trial, rows: int, seeds: int = 1) -> dict[str, Any]:
    """Estimated seconds and bytes per device of a whole run, from two of its rows."""
    cost: dict[str, Any] = {"rows": rows, "seeds": seeds, "phases": trial.phases}
    if trial.times:
        loading, row = trial.times[0], (trial.times[-1] - trial.times[0]) / ROWS
        cost |= {"seconds_a_row": row, "seconds_to_first_row": loading}
        cost |= {"seconds": seeds * (loading + rows * row)}
    return cost | {"peak_memory_bytes": trial.peaks}


def estimate(cost: Mapping[str, Any]) -> Table:
    """`costs` as a table."""
    rows, seeds = cost["rows"], cost["seeds"]
    table = Table(title="Rough estimate from two rows", show_header=False)
    for phase, seconds in cost["phases"].items():
        table.add_row(phase, f"{seconds:.2f} s per row")
    if "seconds" in cost:
        rest = cost["seconds_a_row"] - sum(cost["phases"].values())
        if cost["phases"] and rest > 0:
            table.add_row("everything else", f"{rest:.2f} s per row")
        table.add_row("one row, in total", f"{cost['seconds_a_row']:.2f} s")
        table.add_row("until the first row", _duration(cost["seconds_to_first_row"]))
        size = f"{rows:,} rows" + (f", {seeds} seeds" if seeds > 1 else "")
        table.add_row(f"the whole run, {size}", f"about {_duration(cost['seconds'])}", style="bold")
    for device, peak in cost["peak_memory_bytes"].items():
        table.add_row(f"peak memory, {device}", decimal(peak))
    return table


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} seconds"
