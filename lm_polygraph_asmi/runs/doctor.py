"""Whether a run will work, and its cost: checks without its model, then two of its rows."""

import inspect
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import diskcache
import numpy as np
import psutil
import torch
from hydra.types import RunMode
from lm_polygraph import generation_metrics
from lm_polygraph.defaults.register_default_stat_calculators import (
    register_default_stat_calculators,
)
from lm_polygraph.utils.factory_estimator import FactoryEstimator
from lm_polygraph.utils.factory_stat_calculator import StatCalculatorContainer
from lm_polygraph.utils.manager import order_calculators
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from lm_polygraph_asmi.host import side_models
from lm_polygraph_asmi.host.configs import container
from lm_polygraph_asmi.host.quality import METRICS
from lm_polygraph_asmi.runs.compose import compose_run
from lm_polygraph_asmi.runs.preflight import (
    Finding,
    check_config,
    check_data,
    count_rows,
    has_own_script,
)
from lm_polygraph_asmi.runs.trial import Trial, costs, estimate, try_rows, with_hint

ENOUGH_DISK, LITTLE_DISK = 10**9, 10**8
STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def _problems(*texts: str | None) -> Iterator[Finding]:
    return (Finding(text, fatal=True) for text in texts if text)


def _needed_calculators(config: DictConfig) -> list[StatCalculatorContainer]:
    """The stat calculators of a run, selected as in LM-Polygraph."""
    available = [StatCalculatorContainer(**c) for c in config.stat_calculators if c != "auto"]
    if "auto" in config.stat_calculators:
        language, cache = config.get("language", "en"), config.get("hf_cache")
        defaults = register_default_stat_calculators("Whitebox", language, cache)
        available = [*defaults, *available]
    makers = {stat: calculator for calculator in available for stat in calculator.stats}
    dependencies = {stat: list(calculator.dependencies) for stat, calculator in makers.items()}
    estimators = [FactoryEstimator()(e.name, e.get("cfg", {})) for e in config.estimators]
    stats = [stat for estimator in estimators for stat in estimator.stats_dependencies]
    return [makers[stat] for stat in order_calculators(stats, makers, dependencies)[0]]


def _check_side_models(config: DictConfig) -> Iterator[Finding]:
    nli, cross_encoders = set(), set()
    try:
        needed = _needed_calculators(config)
    except Exception as error:  # LM-Polygraph raises no other type
        yield Finding(with_hint(str(error)), fatal=True)
        return
    for calculator in needed:
        settings = container(calculator.cfg)
        settings = settings.get("cfg", settings)  # of a timed calculator
        if "deberta_path" in settings:
            nli.add((settings["deberta_path"], settings.get("hf_cache")))
        if "cross_encoder_name" in settings:
            cross_encoders.add(settings["cross_encoder_name"])
    yield from _problems(
        *(side_models.missing_nli_model(*model) for model in nli),
        *map(side_models.missing_cross_encoder, cross_encoders),
    )


def _check_quality(config: DictConfig) -> Iterator[Finding]:
    # By default LM-Polygraph uses all its metrics.
    everything = OmegaConf.create([{"name": "AlignScore"}])
    for metric in config.get("generation_metrics") or everything:
        yield from _problems(_metric_problem(container(metric)))
        if metric["name"] == "AlignScore":
            checkpoint = (metric.get("kwargs") or {}).get("ckpt_path", side_models.ALIGN_SCORE)
            yield from _problems(*_missing_for_align_score(checkpoint))
    for estimator in config.get("estimators") or ():
        if str(estimator.get("name")).endswith("grounded_align_score"):
            checkpoint = (estimator.get("cfg") or {}).get("checkpoint") or side_models.ALIGN_SCORE
            yield from _problems(*_missing_for_align_score(checkpoint))


def _missing_for_align_score(checkpoint: str) -> list[str | None]:
    return [
        side_models.missing_align_score(checkpoint),
        side_models.missing_align_score_roberta(),
        side_models.missing_spacy_pipeline(),
        side_models.missing_punkt(),
    ]


def _metric_problem(metric: dict[str, Any]) -> str | None:
    """Why a quality metric cannot be built; LM-Polygraph reports it after loading the model."""
    name, arguments = metric["name"], metric.get("kwargs") or {}
    kind = METRICS.get(name) or getattr(generation_metrics, name, None)
    if kind is None:
        return (
            f"unknown quality metric {name!r}: use one of LM-Polygraph, such as AlignScore, or "
            f"{', '.join(METRICS)}"
        )
    ignored = sorted(set(metric) - {"name", "args", "kwargs"})
    try:
        inspect.signature(kind).bind(*(metric.get("args") or []), **arguments)
        problem = None
    except TypeError as error:
        problem = str(error)
    if ignored:
        given = ", ".join(f"{key}: {metric[key]}" for key in ignored)
        return (
            f"LM-Polygraph reads name, args and kwargs of a quality metric, not {given}: write "
            f"{{name: {name}, kwargs: {{{given}}}}}"
        )
    return problem and f"cannot build the quality metric {name}: {problem}"


def _check_model(config: DictConfig) -> Iterator[Finding]:
    model = container(config.model)
    if model.get("type") != "CausalLM":
        return  # may not be a hub model
    path, arguments = model["path"], model.get("load_model_args") or {}
    revision, gguf_file = arguments.get("revision"), arguments.get("gguf_file")
    if missing := side_models.missing_model(
        f"the model {path!r}",
        path,
        "set model.path to its local folder",
        revision=revision,
        gguf_file=gguf_file,
    ):
        if has_own_script(config):
            missing += ". The config's load script may still load it: the two rows test this"
        yield Finding(missing, fatal=not has_own_script(config))
        return
    needed = side_models.weights_bytes(path, revision)
    on_gpu = arguments.get("device_map") not in (None, "cpu") and torch.cuda.is_available()
    free = free_gpu_memory() if on_gpu else psutil.virtual_memory().available
    if needed and needed > free:
        yield Finding(
            f"memory too small for the model: the weights need {decimal(needed)}, and "
            f"{decimal(free)} of {'GPU' if on_gpu else 'main'} memory are free. Use a smaller "
            "model, or a machine with more memory",
            fatal=not on_gpu,  # device_map=auto computes the rest on the CPU, slowly
        )


def free_gpu_memory() -> int:
    """Free bytes on all GPUs together."""
    # In a separate process: this one would keep a GPU context during the two rows.
    total = "sum(cuda.mem_get_info(i)[0] for i in range(cuda.device_count()))"
    code = f"from torch import cuda; print({total})"
    return int(subprocess.check_output([sys.executable, "-c", code], text=True))


def _check_disk(config: DictConfig) -> Iterator[Finding]:
    results = config.get("save_path") or config.hydra.run.dir
    result_cache = OmegaConf.select(config, "asmi.result_cache")
    for setting, folder in {"cache_path": results, "asmi.result_cache": result_cache}.items():
        if folder is None:
            continue
        path = Path(folder).resolve()
        place = next(parent for parent in (path, *path.parents) if parent.exists())
        needed = setting == "cache_path"  # a run works without a result cache
        remedy = f"free disk space, or set {setting} to another folder"
        try:
            with tempfile.TemporaryDirectory(dir=place) as probe:
                if not needed:  # not every network file system takes SQLite
                    diskcache.Cache(probe).close()
        except (OSError, sqlite3.Error, diskcache.Timeout) as error:
            yield Finding(f"cannot write {path} ({error}): {remedy}", fatal=needed)
            continue
        if (free := shutil.disk_usage(place).free) < ENOUGH_DISK:
            text = f"the disk of {path} has only {decimal(free)} free: {remedy}"
            yield Finding(text, fatal=needed and free < LITTLE_DISK)


CHECKS: dict[str, Callable[[DictConfig], Iterator[Finding]]] = {
    "settings": check_config,
    "rows": check_data,
    "side models": _check_side_models,
    "quality metric": _check_quality,
    "model": _check_model,
    "disk": _check_disk,
}


def _check_scores(trial: Trial) -> Iterator[Finding]:
    finite = np.isfinite(trial.scores).all()
    if not finite.all():
        yield Finding(
            f"expected finite scores, got others from {', '.join(finite.index[~finite])}; "
            "LM-Polygraph ranks NaN as most confident. Leave them out, or try another "
            "model.load_model_args.dtype",
            fatal=False,
        )


def examine(findings: Iterator[Finding]) -> list[tuple[str, str]]:
    """(state, text) of each finding of a check, states of `STYLES`; an error is a problem too."""
    try:
        states = [("problem" if fatal else "warning", text) for text, fatal in findings]
    except Exception as error:  # an interpolation that fails can raise anything
        return [("problem", str(error) or type(error).__name__)]
    return states or [("ok", "")]


@dataclass(frozen=True)
class Diagnosis:
    """Findings about a run.

    Attributes:
        config: name of its config.
        checks: (check, state, what to do) of each finding, states of `STYLES`.
        cost: estimated cost of the whole run, from two rows; empty if none were scored.
    """

    config: str
    checks: list[tuple[str, str, str]]
    cost: dict[str, Any]

    @property
    def works(self) -> bool:
        """Whether no check found a problem."""
        return all(state != "problem" for _, state, _ in self.checks)

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
    """Check a run, print the findings and return them.

    Args:
        console: where to print.
        config_name, config_dir, overrides: as for polygraph_eval.
        run: also score two rows.

    Raises:
        ValueError: unknown config or override.
    """
    config = compose_run(config_name, config_dir, overrides)
    job = ", one job of its sweep" if config.hydra.mode == RunMode.MULTIRUN else ""
    report = Table("check", "state", "what to do", title=f"{config_name}{job}")
    diagnosis = Diagnosis(config_name, [], {})

    def add(name: str, findings: list[tuple[str, str]]) -> None:
        for state, text in findings:
            diagnosis.checks.append((name, state, text))
            report.add_row(name, Text(state, STYLES[state]), Text(text))

    cost = None
    with console.status("") as status:
        for name, check in CHECKS.items():
            status.update(f"checking: {name}")
            add(name, examine(check(config)))
            if name == "settings" and not diagnosis.works:
                break  # the other checks need them
        if run and diagnosis.works:
            status.update("scoring two rows with every method")
            folder = ["--config-dir", config_dir] if config_dir else []
            try:
                trial = try_rows(config, ["--config-name", config_name, *folder, *overrides])
                add("two rows", examine(_check_scores(trial)))
                rows, seeds = count_rows(config), len(config.get("seed") or [1])
                cost = estimate(trial, rows, seeds)
                diagnosis.cost.update(costs(trial, rows, seeds))
            except (RuntimeError, ValueError) as error:
                add("two rows", [("problem", str(error))])
    console.print(report)
    if cost:
        console.print(cost)
    return diagnosis
