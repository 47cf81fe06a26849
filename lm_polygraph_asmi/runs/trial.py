"""Two rows of a run, scored in a process of their own, and what they say of the whole run."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
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
HINTS = {
    r"Found array with 0 sample": "LM-Polygraph's calibration metric (IsotonicPCC) was left with a "
    "single row: the quality metric gave NaN for the other, as ROUGE does for a reference without "
    "words. With more than two rows that need not happen",
    r"Cant find stat calculator for: asmi_": "add `- stat_calculators: asmi` to the defaults list, "
    "and what the estimators read to asmi.depths, sources and without_context",
    r"Cant find stat calculator": "stat_calculators needs `auto`, or an entry that lists it",
    r"len\(expected_tokens\) == 1": "PTrue needs 'True' to be one token, and the model's tokenizer "
    "splits it; leave out PTrue and PTrueSampling",
    r"greedy_probs\.py[\s\S]*IndexError": "the model made no attention maps; load it with "
    "attn_implementation=eager, or set output_attentions=false and leave out RAUQ",
    r"CUDA out of memory|OutOfMemoryError|can't allocate memory|signal 9": "memory too small; set "
    "asmi.num_samples or asmi.memory_budget lower, leave out RAUQ and set "
    "output_attentions=false, or take a smaller model.load_model_args.dtype",
    r"No space left on device|disk is full": "free disk space, or set cache_path to another disk",
    r"couldn't connect to|LocalEntryNotFound|OfflineMode": "the hub cannot be reached; fetch what "
    "is missing once with a connection, or name a local folder",
}
"""What a failed run printed -> what to do. The first that is found counts."""


class Trial(NamedTuple):
    """What two rows of a run gave and took.

    Attributes:
        scores: a row per example, a column per method.
        times: seconds from the start to the first row and to the end of each batch.
        phases: seconds a row of what the manifest tells apart; empty without a manifest.
        prefix_cache: peak bytes of each device, from the manifest too.
    """

    scores: pd.DataFrame
    times: list[float]
    phases: dict[str, float]
    prefix_cache: dict[str, int]


def with_hint(text: str, printed: str = "") -> str:
    """An error, and what to do about it where that is known from it or from what was printed."""
    for pattern, hint in HINTS.items():
        if re.search(pattern, f"{printed}\n{text}"):
            return f"{text}\n{hint}"
    return text


def try_rows(config: DictConfig, arguments: Sequence[str]) -> Trial:
    """Run polygraph_eval with two of its rows in a temporary folder.

    Args:
        config: what the arguments compose to.
        arguments: of polygraph_eval.

    Raises:
        RuntimeError: the run failed.
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
            changed.append(
                f"asmi.result_cache='{folder}/result cache'"
            )  # empty, so nothing is read from it
        script = Path(sys.executable).with_name("polygraph_eval")
        started = time.time()
        done = subprocess.run(
            [sys.executable, str(script), *arguments, *changed],
            env=os.environ | {"HYDRA_FULL_ERROR": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(_failure(done))
        run = load_run(folder)
        try:
            manifest = read_manifest(run.path)
        except FileNotFoundError:  # a config without this plugin's callback
            manifest = {}
        log = "".join(file.read_text() for file in Path(folder).glob("*.log"))
        return Trial(
            scores=run.scores,
            times=[ended - started for ended in batch_times(log)],
            phases={name: taken["median"] for name, taken in manifest.get("seconds", {}).items()},
            prefix_cache=manifest.get("peak_memory_bytes", {}),
        )


def _failure(done: subprocess.CompletedProcess) -> str:
    if done.returncode < 0:
        return with_hint(f"the system ended it with signal {-done.returncode}")
    # Behind the last traceback, the lines that are not indented are the exception's.
    last = done.stderr.rpartition("Traceback (most recent call last):")[2]
    error = "\n".join(re.findall(r"^\S.*", last, re.MULTILINE)[-5:])
    return with_hint(error, done.stderr[-10_000:])


def batch_times(log: str) -> list[float]:
    """When the first batch of a run began and each one ended, by its log."""
    mark = r"^\[([\d-]+ [\d:]+,\d+)\].*(?:Done .* stat calculators|= NEW BATCH =)"
    found = re.findall(mark, log, re.MULTILINE)
    return [datetime.fromisoformat(at.replace(",", ".")).timestamp() for at in found]


def costs(trial: Trial, rows: int, seeds: int = 1) -> dict[str, Any]:
    """What a whole run will take, by two of its rows: seconds, and bytes of memory by device."""
    found: dict[str, Any] = {"rows": rows, "seeds": seeds, "phases": trial.phases}
    if trial.times:
        loading, row = trial.times[0], (trial.times[-1] - trial.times[0]) / ROWS
        total = seeds * (loading + rows * row)
        found |= {"seconds_a_row": row, "seconds_to_first_row": loading, "seconds": total}
    return found | {"peak_memory_bytes": trial.prefix_cache}


def estimate(trial: Trial, rows: int, seeds: int = 1) -> Table:
    """`costs` as a table."""
    found = costs(trial, rows, seeds)
    table = Table(title="Estimate from two rows: a rough guide", show_header=False)
    for phase, seconds in found["phases"].items():
        table.add_row(phase, f"{seconds:.2f} s a row")
    if "seconds" in found:
        table.add_row("a row, everything counted", f"{found['seconds_a_row']:.2f} s")
        table.add_row("until the first row", _duration(found["seconds_to_first_row"]))
        asked = f"{rows:,} rows" + (f", {seeds} seeds" if seeds > 1 else "")
        table.add_row(
            f"the whole run, {asked}", f"about {_duration(found['seconds'])}", style="bold"
        )
    for device, peak in found["peak_memory_bytes"].items():
        table.add_row(f"peak of memory, {device}", decimal(peak))
    return table


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} seconds"
