"""Find out whether a run will work, and what it costs, by checks and by scoring two rows."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from lm_polygraph_asmi.results.runs import load_run
from lm_polygraph_asmi.runs.checks import Finding, Plan, findings_of, read_plan

STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
ROWS = 2


def diagnose(
    console: Console, config: DictConfig, arguments: Sequence[str], run: bool = True
) -> dict[str, Any]:
    """Check a run and, with `run`, score two of its rows; print the findings and return them.

    `config` is what `compose_run` returns for these arguments of polygraph_eval. The result is fit
    for JSON. Its `cost` is that of the whole run, and empty if no rows were scored.
    """
    plan = read_plan(config)
    cost: dict[str, Any] = {}
    with console.status("checking the run") as status:
        findings = findings_of(plan)
        if run and not any(finding.fatal for each in findings.values() for finding in each):
            status.update("scoring two rows with every method")
            try:
                scores, cost = try_rows(config, arguments, len(plan.asked))
                findings["two rows"] = _check_scores(scores)
            except (RuntimeError, ValueError) as error:
                findings["two rows"] = [Finding(str(error))]
    checks = [
        {"check": name, "state": state, "text": text}
        for name, each in findings.items()
        for state, text in [("problem" if f.fatal else "warning", f.text) for f in each]
        or [("ok", _about(name, plan))]
    ]
    name, job = config.hydra.job.config_name, config.hydra.mode == RunMode.MULTIRUN
    table = Table("check", "state", "what to do", title=name + ", one job of its sweep" * job)
    for check in checks:
        state = Text(check["state"], STYLES[check["state"]])
        table.add_row(check["check"], state, Text(check["text"]))
    console.print(table)
    if cost:
        console.print(estimate(cost))
    return {
        "config": name,
        "works": all(check["state"] != "problem" for check in checks),
        "checks": checks,
        "cost": cost,
    }


def _about(check: str, plan: Plan) -> str:
    """What to show for a check that found no problem: for the rows, their number and the first."""
    rows = plan.asked if check == "rows" else []
    clusters = len({row.cluster for row in rows})
    return f"{len(rows)} in {clusters} clusters; the first: {rows[0].input}" if rows else ""


def try_rows(
    config: DictConfig, arguments: Sequence[str], rows: int
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Run polygraph_eval on two of its rows in a temporary folder. Raises RuntimeError if it fails.

    The config is composed from the arguments. Returns the scores (a row per example, a column per
    method), and the estimated cost of a run over `rows` rows (see `costs`).
    """
    seeds = config.get("seed") or [1]
    with tempfile.TemporaryDirectory(prefix="polygraph_asmi_") as folder:
        changed = [
            "hydra.mode=RUN",
            f"hydra.run.dir='{folder}'",
            f"++save_path='{folder}'",
            f"++seed=[{seeds[0]}]",
            f"++subsample_eval_dataset={ROWS}",
            "++report_to_wandb=false",
        ]
        if OmegaConf.select(config, "asmi.result_cache") is not None:
            changed.append(f"asmi.result_cache='{folder}/result cache'")  # it is empty
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
        log = "".join(file.read_text() for file in Path(folder).glob("*.log"))
        times = [ended - started for ended in batch_times(log)]
        return run.scores, costs(times, run.manifest or {}, rows, len(seeds))


def _failure(process: subprocess.CompletedProcess) -> str:
    if process.returncode < 0:
        return f"the system killed it with signal {-process.returncode}, perhaps for lack of memory"
    return "\n".join(process.stderr.strip().splitlines()[-5:])  # the error, and where it was raised


def batch_times(log: str) -> list[float]:
    """The times in a log at which the first batch began, and at which each batch ended."""
    mark = r"^\[([\d-]+ [\d:]+,\d+)\].*(?:Done .* stat calculators|= NEW BATCH =)"
    times = re.findall(mark, log, re.MULTILINE)
    return [datetime.fromisoformat(time.replace(",", ".")).timestamp() for time in times]


def _check_scores(scores: pd.DataFrame) -> list[Finding]:
    finite = np.isfinite(scores).all()
    text = (
        f"expected finite scores, got others from {', '.join(finite.index[~finite])}: leave these "
        "methods out, or try another model.load_model_args.dtype"
    )
    return [] if finite.all() else [Finding(text, fatal=False)]


def costs(
    times: Sequence[float], manifest: Mapping[str, Any], rows: int, seeds: int
) -> dict[str, Any]:
    """Estimate seconds and bytes per device of a whole run from two of its rows.

    `times`: seconds from the start to the first row, and to the end of each batch. `manifest` has
    the phases of a row; it is empty if the config lacks this plugin's callback.
    """
    phases = {name: seconds["median"] for name, seconds in manifest.get("seconds", {}).items()}
    if not times:
        return {}
    loading, row = times[0], (times[-1] - times[0]) / ROWS
    return {
        "seconds_to_first_row": loading,
        "seconds_a_row": row,
        "seconds_a_row_by_phase": phases | {"other": row - sum(phases.values())},
        "seconds": seeds * (loading + rows * row),
        "peak_memory_bytes": manifest.get("peak_memory_bytes", {}),
    }


def estimate(cost: Mapping[str, Any]) -> Table:
    """The result of `costs` as a table."""
    table = Table(title="Rough estimate from two rows", show_header=False)
    table.add_row("until the first row", f"{cost['seconds_to_first_row']:.0f} s")
    for phase, seconds in cost["seconds_a_row_by_phase"].items():
        table.add_row(f"a row, {phase}", f"{seconds:.2f} s")
    table.add_row("a row, in total", f"{cost['seconds_a_row']:.2f} s")
    whole = timedelta(seconds=round(cost["seconds"]))
    table.add_row("the whole run", f"about {whole}", style="bold")
    for device, peak in cost["peak_memory_bytes"].items():
        table.add_row(f"peak memory, {device}", decimal(peak))
    return table
