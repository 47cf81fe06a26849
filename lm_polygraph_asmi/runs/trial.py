"""Scores two rows of a run in a separate process, and estimates the cost of the whole run."""

import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from omegaconf import DictConfig, OmegaConf
from rich.filesize import decimal
from rich.table import Table

from lm_polygraph_asmi.results.manifest import read_manifest
from lm_polygraph_asmi.results.runs import load_run

ROWS = 2


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


USED = 0.8
"""Share of a job's time limit that a shard may take by this estimate, which is rough."""


def costs(
    trial: Trial, rows: int, seeds: int = 1, limit: float | None = None, num_shards: int = 1
) -> dict[str, Any]:
    """Estimated seconds and bytes per device of a whole run, from two of its rows.

    With a `limit`, the seconds after which the launcher ends a job, also `shards`: the number into
    which the run, of which `rows` are one of `num_shards`, must be split for no job to outlast it;
    None if not even a row fits.
    """
    cost: dict[str, Any] = {"rows": rows, "seeds": seeds, "phases": trial.phases}
    if trial.times:
        loading, row = trial.times[0], (trial.times[-1] - trial.times[0]) / ROWS
        total = seeds * (loading + rows * row)
        cost |= {"seconds_a_row": row, "seconds_to_first_row": loading, "seconds": total}
        if limit is not None:
            rows_per_job = math.floor((USED * limit / seeds - loading) / row) if row else rows
            shards = math.ceil(rows * num_shards / rows_per_job) if rows_per_job > 0 else None
            cost |= {"limit": limit, "shards": shards}
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
    if "limit" in cost:
        number = cost["shards"]
        advice = f"data.num_shards={number} 'data.shard=range({number})' or more keeps each job"
        advice = f"{advice} below it" if number else "not even one row fits"
        table.add_row(f"a job ends after {_duration(cost['limit'])}", advice)
    for device, peak in cost["peak_memory_bytes"].items():
        table.add_row(f"peak memory, {device}", decimal(peak))
    return table


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} seconds"
