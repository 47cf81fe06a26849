"""The Hydra callback of every shipped config: checks before a run, and the manifest."""

import gc
import inspect
import logging
import resource
import shlex
import shutil
import sys
import time
import traceback
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.files import locked
from lm_polygraph_asmi.host.configs import container
from lm_polygraph_asmi.host.mends import mended
from lm_polygraph_asmi.results.manifest import (
    FORMAT,
    model_of,
    packages,
    seconds_per_phase,
    without_secrets,
    write_manifest,
)
from lm_polygraph_asmi.runs.checks import Plan, prepare, read_plan
from lm_polygraph_asmi.runs.rows import results_folder

log = logging.getLogger("lm_polygraph")

STOPPED = "polygraph_eval stopped before loading the model"


class RunRecord(Callback):
    """Checks a run before its model is loaded, and writes the manifest.

    Hydra turns errors of a callback into warnings, so SystemExit stops a single run. Jobs of a
    multirun continue and fail later on their own, without stopping the others. Two runs cannot
    write to one folder at the same time.
    """

    def __init__(self) -> None:
        self._manifests: dict[Path, dict[str, Any]] = {}
        self._until_end = ExitStack()

    def on_job_start(self, config: DictConfig, *, task_function: TaskFunction, **_: Any) -> None:
        try:
            self._start(config, task_function)
        except Exception as error:  # Hydra would only warn, and the run would have no record
            raise SystemExit(
                f"{STOPPED}: its record failed with {type(error).__name__}: {error}"
            ) from error

    def _start(self, config: DictConfig, task_function: TaskFunction) -> None:
        self._started = time.time()
        self._manifests = {}
        reset_peak_memory()
        plan = read_plan(config)
        findings = prepare(plan)
        for finding in findings:
            log.log(logging.ERROR if finding.fatal else logging.WARNING, finding.text)
        if any(finding.fatal for finding in findings):
            if config.hydra.mode == RunMode.MULTIRUN:
                return
            raise SystemExit(f"{STOPPED}: see the errors above")
        self._until_end.enter_context(mended(inspect.unwrap(task_function).__globals__))
        folder = results_folder(config)
        folder.mkdir(parents=True, exist_ok=True)
        managers = {seed: folder / f"ue_manager_seed{seed}" for seed in config.seed}
        for manager in managers.values():
            self._until_end.enter_context(locked(manager))
        self._until_end.callback(shutil.rmtree, folder / "rows", ignore_errors=True)
        shared = _started_manifest(plan)
        self._manifests = {
            manager: shared | _of_seed(plan, seed, shared["methods"])
            for seed, manager in managers.items()
        }
        for manager, manifest in self._manifests.items():
            # The manifest of an earlier run in this folder is valid until this one has results.
            if not manager.exists():
                write_manifest(manifest, manager)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        error = None
        try:
            _ = job_return.return_value  # raises what the job raised
        except Exception as raised:
            error = raised
        for manager, manifest in self._manifests.items():
            manifest |= {
                "seconds_wall": time.time() - self._started,
                "peak_memory_bytes": peak_memory(),
                "status": "failed" if error else "completed",
            }
            if error:
                manifest["error"] = f"{type(error).__name__}: {error}"
            if manager.is_file() and manager.stat().st_mtime >= self._started:
                _add_results(manifest, manager)
            elif manager.is_file():
                continue  # belongs to an earlier run
            write_manifest(manifest, manager)
        self._until_end.close()
        if self._manifests and not error:
            folder = shlex.quote(str(next(iter(self._manifests)).parent))
            print(f"Table of the results: polygraph_asmi results {folder}", file=sys.stderr)
        if error:
            # Hydra keeps the error, and by its frames the model, until the sweep ends.
            traceback.clear_frames(error.__traceback__)
            gc.collect()


def _started_manifest(plan: Plan) -> dict[str, Any]:
    """What the manifests of all seeds have at the start of a run."""
    config, hydra = plan.config, plan.config.hydra
    # Resolving it saves the rows, in a folder that is gone when the run ends.
    left_out = {"hydra", "dataset"} if plan.rows.chosen else {"hydra"}
    job = container(OmegaConf.masked_copy(config, [str(k) for k in config if k not in left_out]))
    choices, data = container(hydra.runtime.choices), job.get("data", {})
    return {
        "format": FORMAT,
        "status": "running",
        "config_name": hydra.job.config_name,
        "model": {"name": choices.get("model"), **model_of(job["model"])},
        "dataset": {"name": choices.get("benchmark"), **data, "revision": plan.rows.revision},
        "methods": _methods(plan, job),
        "packages": packages(),
        "device": device_name(),
        "config": without_secrets(job),
    }


def _of_seed(plan: Plan, seed: int, methods: dict[str, Any]) -> dict[str, Any]:
    """What the manifest of one seed has besides."""
    rows = plan.rows.asked(plan.config, seed) if plan.rows.named else []
    return {
        "seeds": {
            "run": seed,
            "masks": next((of["seed"] for of in methods.values()), None),
            "samples": OmegaConf.select(plan.config, "asmi.sampling_seed"),
            "subsample": OmegaConf.select(plan.config, "data.subsample_seed"),
        },
        "rows": {"ids": [r.id for r in rows], "clusters": [r.cluster for r in rows]},
    }


def _methods(plan: Plan, job: dict[str, Any]) -> dict[str, Any]:
    """Settings of the run's scores, by name."""
    stops = (job.get("generation_params") or {}).get("stop_strings") or []
    generated = {"stop": [stops] if isinstance(stops, str) else stops}
    generated |= {"max_new_tokens": job.get("max_new_tokens", ASMIConfig.max_new_tokens)}
    return {str(e): e.described | generated for e in plan.estimators if hasattr(e, "described")}


def _add_results(manifest: dict[str, Any], manager: Path) -> None:
    """Add what only a finished manager file has."""
    content = torch.load(manager, weights_only=False)
    stats, config = content["stats"], manifest["config"]
    if content["state"] != "failed":  # another seed may have failed
        manifest["status"] = "completed"
        manifest.pop("error", None)
    # In its first run a hub model enters the cache only after the start.
    manifest["model"] |= model_of(config["model"])
    manifest["seconds"] = seconds_per_phase(stats)
    manifest["asmi_reused"] = sum(map(bool, stats.get("asmi_reused_depths", [])))


def reset_peak_memory() -> None:
    """Reset `peak_memory`: the jobs of a sweep may share a process."""
    if torch.cuda.is_initialized():  # else an error: "Invalid device argument"
        for device in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):  # Linux; elsewhere the peak is of the whole process
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> dict[str, int]:
    """Largest use of main memory, and of each GPU, by this process since the reset, in bytes."""
    # Kilobytes on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = {"main": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    for device in range(torch.cuda.device_count()):
        peak[f"cuda:{device}"] = torch.cuda.max_memory_allocated(device)
    return peak


def device_name() -> str:
    """The accelerator, or the processor."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"cpu, {torch.get_num_threads()} threads"
