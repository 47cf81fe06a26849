"""The Hydra callback of every shipped config: checks before a run, and the manifest."""

import gc
import inspect
import logging
import shlex
import sys
import time
import traceback
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.files import locked
from lm_polygraph_asmi.host.configs import container
from lm_polygraph_asmi.host.mends import mended
from lm_polygraph_asmi.results.manifest import (
    FORMAT,
    device_name,
    model_of,
    packages,
    peak_memory,
    reset_peak_memory,
    seconds_per_phase,
    without_secrets,
    write_manifest,
)
from lm_polygraph_asmi.runs.checks import Plan, findings_of, read_plan
from lm_polygraph_asmi.runs.rows import forget_rows

log = logging.getLogger("lm_polygraph")

STOPPED = "polygraph_eval stopped before loading the model"


class RunRecord(Callback):
    """Checks a run before its model is loaded, and writes the manifest.

    Hydra turns errors of a callback into warnings, so SystemExit stops a single run. Jobs of a
    multirun continue and fail later on their own, without stopping the others. Two runs cannot
    write to one folder at the same time.
    """

    def __init__(self) -> None:
        self._started = 0.0
        self._manifests: dict[Path, dict[str, Any]] = {}
        self._until_end = ExitStack()

    def on_job_start(self, config: DictConfig, *, task_function: TaskFunction, **_: Any) -> None:
        try:
            self._start(config, task_function)
        except Exception as error:  # Hydra would only warn, and the run would have no record
            failed = f"its record failed with {type(error).__name__}: {error}"
            raise SystemExit(f"{STOPPED}: {failed}") from error

    def _start(self, config: DictConfig, task_function: TaskFunction) -> None:
        self._started = time.time()
        self._manifests = {}
        reset_peak_memory()
        plan = read_plan(config)
        findings = [finding for found in findings_of(plan).values() for finding in found]
        for finding in findings:
            log.log(logging.ERROR if finding.fatal else logging.WARNING, finding.text)
        if any(finding.fatal for finding in findings):
            if config.hydra.mode == RunMode.MULTIRUN:
                return
            raise SystemExit(f"{STOPPED}: see the errors above")
        self._until_end.callback(forget_rows)
        self._until_end.enter_context(mended(inspect.unwrap(task_function).__globals__))
        self._manifests = _started_manifests(plan)
        for manager, manifest in self._manifests.items():
            manager.parent.mkdir(parents=True, exist_ok=True)
            self._until_end.enter_context(locked(manager))
            # The manifest of an earlier run in this folder is valid until this one has results.
            if not manager.exists():
                write_manifest(manifest, manager)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        failed = job_return.status != JobStatus.COMPLETED
        error = None
        try:
            _ = job_return.return_value  # raises what the job raised
        except Exception as raised:
            error = raised
        for manager, manifest in self._manifests.items():
            manifest |= {
                "finished": _now(),
                "seconds_wall": time.time() - self._started,
                "peak_memory_bytes": peak_memory(),
                "status": "failed" if failed else "completed",
            }
            if failed:
                manifest["error"] = f"{type(error).__name__}: {error}"
            if manager.is_file() and manager.stat().st_mtime >= self._started:
                _add_results(manifest, manager)
            elif manager.is_file():
                continue  # belongs to an earlier run
            write_manifest(manifest, manager)
        self._until_end.close()
        if self._manifests and not failed:
            folder = shlex.quote(str(next(iter(self._manifests)).parent))
            print(f"Table of the results: polygraph_asmi results {folder}", file=sys.stderr)
        if isinstance(error, BaseException):
            # Hydra keeps the error, and by its frames the model, until the sweep ends.
            traceback.clear_frames(error.__traceback__)
            gc.collect()


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _started_manifests(plan: Plan) -> dict[Path, dict[str, Any]]:
    """Manifests at the start of a run, by the manager files it will write."""
    config, hydra = plan.config, plan.config.hydra
    job = container(OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"]))
    folder = Path(job.get("save_path") or hydra.runtime.output_dir)
    choices = container(hydra.runtime.choices)
    model, data = job["model"], job.get("data", {})
    shared = {
        "format": FORMAT,
        "status": "running",
        "started": _now(),
        "config_name": hydra.job.config_name,
        "overrides": [
            override
            for override in hydra.overrides.task
            if without_secrets({override.partition("=")[0].rpartition(".")[2].lstrip("+"): 0})
        ],
        "model": {"name": choices.get("model"), **model_of(model)},
        "dataset": {
            "name": choices.get("benchmark"),
            "path": job["dataset"],
            **data,
            "revision": plan.rows.revision,
        },
        "methods": _methods(plan, job),
        "packages": packages(),
        "device": device_name(),
        "config": without_secrets(job),
    }
    manifests = {}
    for seed in job["seed"]:
        rows = plan.rows.asked(config, seed) if plan.rows.named else []
        manifests[folder / f"ue_manager_seed{seed}"] = shared | {
            "seeds": {
                "run": seed,
                "masks": next((of["seed"] for of in shared["methods"].values()), None),
                "samples": OmegaConf.select(config, "asmi.sampling_seed"),
                "subsample": data.get("subsample_seed"),
            },
            "rows": {"ids": [r.id for r in rows], "clusters": [r.cluster for r in rows]},
        }
    return manifests


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
    reused = [bool(depths) for depths in stats.get("asmi_reused_depths", [])]
    manifest["asmi_reused"] = sum(reused)
