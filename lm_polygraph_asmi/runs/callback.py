"""The Hydra callback of every shipped config: it checks a run, and writes the run's manifest."""

import gc
import inspect
import logging
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from hydra.errors import CompactHydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.files import interrupted_by_sigterm, locked
from lm_polygraph_asmi.host.configs import container
from lm_polygraph_asmi.host.hub import Repository
from lm_polygraph_asmi.host.mends import mended
from lm_polygraph_asmi.results.manifest import (
    FORMAT,
    data_of,
    model_of,
    packages,
    seconds_per_phase,
    without_secrets,
    write_manifest,
)
from lm_polygraph_asmi.results.runs import read_manager
from lm_polygraph_asmi.runs.checks import Finding, Plan, findings_of, read_plan
from lm_polygraph_asmi.runs.needs import LANGUAGE_MODEL, download
from lm_polygraph_asmi.runs.rows import results_folder
from lm_polygraph_asmi.runs.screen import screen

log = logging.getLogger("lm_polygraph")

STOPPED = "polygraph_eval stopped before loading the model"
FULL_DISK = 2**20
"""If fewer bytes are left on the disk, any error of a run is reported as a full disk."""
Main = Callable[[Any], Any]
"""The main function of LM-Polygraph's script. Its argument is the config of the run."""


class JobFailed(CompactHydraException):
    """A job of a sweep failed or was stopped before it began. The message names all such jobs.

    Hydra's launcher runs the remaining jobs first. Then Hydra raises the error of the first failed
    job, prints its message without a traceback, and exits with status 1. An error from another
    process is unpickled in the process of the sweep, which calls this constructor there.
    """

    reasons: ClassVar[dict[str, str]] = {}  # job -> reason, in the process of the sweep

    def __init__(self, job: str, reason: str) -> None:
        self.reasons[job] = reason

    def __str__(self) -> str:
        listed = "".join(f"\njob {job}: {reason}" for job, reason in self.reasons.items())
        return f"{len(self.reasons)} of the sweep's jobs failed:{listed}"


class RunRecord(Callback):
    """Checks a run before its model is loaded, and writes its manifest (see `_recorded`).

    All of this happens inside the job, so that an error ends only this job. If the callback itself
    raised, Hydra would turn most errors into warnings, and SystemExit would end the whole sweep.
    """

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        JobFailed.reasons.clear()

    def on_job_start(self, config: DictConfig, *, task_function: TaskFunction, **_: Any) -> None:
        main = inspect.unwrap(task_function)
        if not inspect.isfunction(main):
            raise SystemExit(f"{STOPPED}: expected a function as its main, got {main!r}")
        run = _job_of_sweep if config.hydra.mode == RunMode.MULTIRUN else _recorded
        _let_run_call(partial(run, config), main)


def _let_run_call(run: Callable[[Main, Any], Any], main: Any) -> None:
    """Replace the next call of `main` by a call of `run`, with `main` and its argument.

    Hydra holds the function object and offers no callback around its call. So the code of the
    function is replaced until the call begins.
    """
    code, defaults = main.__code__, main.__defaults__

    def once(argument: Any) -> Any:
        main.__code__, main.__defaults__ = code, defaults
        return run(main, argument)

    replacement = (lambda argument, once: once(argument)).__code__
    main.__code__ = replacement.replace(co_freevars=code.co_freevars)
    main.__defaults__ = (once,)


def _job_of_sweep(config: DictConfig, main: Main, argument: Any) -> Any:
    """Call `_recorded`, and turn its errors into JobFailed."""
    try:
        return _recorded(config, main, argument)
    except (Exception, SystemExit) as error:
        job = f"{config.hydra.job.num} ({' '.join(config.hydra.overrides.task)})"
        stopped = isinstance(error, SystemExit)
        reason = str(error) if stopped else f"{type(error).__name__}: {error}"
        log.error("job %s failed: %s", job, reason, exc_info=not stopped)
    # Hydra keeps a job's error until the sweep ends. Raise one whose frames do not hold the model.
    gc.collect()
    raise JobFailed(job, reason)


def _again(config: DictConfig) -> str:
    cache = OmegaConf.select(config, "asmi.result_cache")
    return "start the same command again" + (
        f", and it resumes from the answers in {cache}" if cache else ""
    )


def _recorded(config: DictConfig, main: Main, argument: Any) -> Any:
    """Check a run, then do it. Its locks are released and its replacements undone in any case.

    Raises SystemExit: the run cannot start, was interrupted, or the disk is full. Raises
    ValueError: the manager file that LM-Polygraph saved cannot be read.
    """
    try:
        with ExitStack() as until_end:
            until_end.enter_context(screen(main.__globals__))
            # If the log cannot be written, as on a full disk, no traceback is printed.
            until_end.enter_context(patch.object(logging, "raiseExceptions", False))
            until_end.enter_context(interrupted_by_sigterm())
            try:
                folder = _start(config, main, until_end)
            except Exception as error:
                raise SystemExit(
                    f"{STOPPED}: the callback RunRecord failed with {type(error).__name__}: {error}"
                ) from error
            returned = main(argument)
    except Exception as error:
        folder = results_folder(config)
        if not folder.is_dir() or shutil.disk_usage(folder).free >= FULL_DISK:
            raise
        raise SystemExit(
            f"no room is left in {folder} ({error}): free some space, then {_again(config)}"
        ) from error
    except KeyboardInterrupt as signal_number:
        if config.hydra.mode == RunMode.MULTIRUN:  # ends the sweep as well
            raise
        print(f"interrupted: {_again(config)}", file=sys.stderr)
        raise SystemExit(128 + int(*signal_number.args or (signal.SIGINT,))) from None
    print(
        f"Table of the results: polygraph_asmi results {shlex.quote(str(folder))}", file=sys.stderr
    )
    return returned


def _start(config: DictConfig, main: Main, until_end: ExitStack) -> Path:
    """Check a run, set up what lasts until its end, and return its results folder."""
    started = time.time()
    reset_peak_memory()
    plan = read_plan(config)
    findings = [finding for each in findings_of(plan).values() for finding in each]
    if not any(finding.fatal for finding in findings):
        findings += map(Finding, download(need for need in plan.needs if not need.problem))
    for finding in findings:
        log.log(logging.ERROR if finding.fatal else logging.WARNING, finding.text)
    if fatal := [finding.text for finding in findings if finding.fatal]:
        single = config.hydra.mode == RunMode.RUN
        raise SystemExit(f"{STOPPED}: {'see the errors above' if single else '; '.join(fatal)}")
    until_end.enter_context(mended(main.__globals__))
    folder = results_folder(config)
    folder.mkdir(parents=True, exist_ok=True)
    managers = {seed: folder / f"ue_manager_seed{seed}" for seed in config.seed}
    for manager in managers.values():
        until_end.enter_context(locked(manager))
    until_end.callback(shutil.rmtree, folder / "rows", ignore_errors=True)
    shared = _started_manifest(plan)
    for seed, manager in managers.items():
        manifest = shared | _manifest_of_seed(plan, seed, shared["methods"])
        # The folder may hold an earlier run. Its manifest stays until this run has results.
        if not manager.exists():
            write_manifest(manifest, manager)
        until_end.push(partial(_finish_manifest, manifest, manager, started))
    return folder


def _finish_manifest(
    manifest: dict[str, Any], manager: Path, started: float, _: Any, error: Any, *__: Any
) -> None:
    """Write the manifest of a run that has ended, perhaps with an error.

    Raises ValueError: the run ended without an error, but its manager file cannot be read.
    """
    if manager.is_file() and manager.stat().st_mtime < started:
        return  # the files are those of an earlier run
    raised = {"error": f"{type(error).__name__}: {error}"} if error else {}
    manifest |= raised | {
        "status": "failed" if error else "completed",
        "seconds_wall": time.time() - started,
        "peak_memory_bytes": peak_memory(),
    }
    try:
        _add_results(manifest, manager)
    except Exception as unread:  # a damaged pickle can raise anything
        why = f"{manager} cannot be read: {unread!r}"
        manifest |= {"status": "failed", "error": why} | raised
        if not error:
            raise ValueError(why) from unread
    finally:
        write_manifest(manifest, manager)


def _started_manifest(plan: Plan) -> dict[str, Any]:
    """The entries that the manifests of all seeds share at the start of a run."""
    config, hydra = plan.config, plan.config.hydra
    # Resolving the dataset would save the rows, and name a folder that the end of the run removes.
    left_out = {"hydra", "dataset"} if plan.rows.chosen else {"hydra"}
    job = container(OmegaConf.masked_copy(config, [str(k) for k in config if k not in left_out]))
    choices, data = container(hydra.runtime.choices), job.get("data", {})
    if not plan.rows.chosen:  # LM-Polygraph reads `dataset`, whatever data a group's node names
        choices |= {"benchmark": None} if data else {}
        data = {"source": job["dataset"], "split": job["eval_split"]}
    data = {"name": choices.get("benchmark"), **data, "revision": plan.rows.revision}
    return {
        "format": FORMAT,
        "status": "running",
        "config_name": hydra.job.config_name,
        "model": {"name": choices.get("model"), **model_of(job["model"])},
        "dataset": data_of({"dataset": data}),
        "side_models": {
            source.name: source.folder.name
            for source in (need.source for need in plan.needs if need.by != LANGUAGE_MODEL)
            if isinstance(source, Repository) and source.folder
        },
        "methods": _methods(plan, job),
        "packages": packages(),
        "device": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"cpu, {torch.get_num_threads()} threads",
        "config": without_secrets(job),
    }


def _manifest_of_seed(plan: Plan, seed: int, methods: dict[str, Any]) -> dict[str, Any]:
    """The manifest entries that differ between the seeds of a run."""
    rows = plan.rows.asked(plan.config, seed) if plan.rows.named else []
    return {
        "seeds": {
            "run": seed,
            "masks": next((settings["seed"] for settings in methods.values()), None),
            "samples": OmegaConf.select(plan.config, "asmi.sampling_seed"),
            "subsample": OmegaConf.select(plan.config, "data.subsample_seed")
            if plan.config.get("subsample_eval_dataset", -1) == -1
            else seed,
        },
        "rows": {"ids": [r.id for r in rows], "clusters": [r.cluster for r in rows]},
    }


def _methods(plan: Plan, job: dict[str, Any]) -> dict[str, Any]:
    """Settings of the run's ASMI scores, by name."""
    stops = (job.get("generation_params") or {}).get("stop_strings") or []
    generated = {
        "stop": [stops] if isinstance(stops, str) else stops,
        "max_new_tokens": job.get("max_new_tokens", ASMIConfig.max_new_tokens),
    }
    return {str(e): e.described | generated for e in plan.estimators if hasattr(e, "described")}


def _add_results(manifest: dict[str, Any], manager: Path) -> None:
    """Add the manifest entries that are known only after the manager file is finished."""
    content = read_manager(manager)
    stats, config = content["stats"], manifest["config"]
    # Another seed may have failed after this one. An interrupted run is not marked as
    # failed, but has no metrics.
    if content["state"] != "failed" and content["metrics"]:
        manifest["status"] = "completed"
        manifest.pop("error", None)
    # In the first run of a hub model, the model enters the cache only after the start.
    manifest["model"] |= model_of(config["model"])
    manifest["seconds"] = seconds_per_phase(stats)
    manifest["asmi_reused"] = sum(map(bool, stats.get("asmi_reused_depths", [])))


def reset_peak_memory() -> None:
    """Reset what `peak_memory` reads, since the jobs of a sweep may share a process."""
    if torch.cuda.is_initialized():  # otherwise torch raises "Invalid device argument"
        for device in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):  # works on Linux; elsewhere the peak is that of the whole process
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> dict[str, int]:
    """Peak use in bytes since the reset by this process: of each GPU, and of main memory.

    Main memory is left out if the system does not report it.
    """
    cuda = torch.cuda
    peak = {f"cuda:{i}": cuda.max_memory_allocated(i) for i in range(cuda.device_count())}
    with suppress(ImportError):  # Windows has no module `resource`
        import resource

        # The unit is kilobytes on Linux, and bytes on macOS.
        unit = 1 if sys.platform == "darwin" else 1024
        peak = {"main": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit} | peak
    return peak
