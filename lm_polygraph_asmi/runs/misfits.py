"""Find config values that would end a run after its model is loaded, and describe each."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lm_polygraph.estimators
import lm_polygraph.generation_metrics
import torch
from lm_polygraph.estimators import Estimator
from lm_polygraph.generation_metrics.generation_metric import GenerationMetric
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lm_polygraph_asmi.host.configs import container, has_shipped_script
from lm_polygraph_asmi.host.mends import MENDS
from lm_polygraph_asmi.host.model import (
    attention_readers,
    class_without_attention,
    unmaskable_class,
)
from lm_polygraph_asmi.host.quality import METRICS
from lm_polygraph_asmi.results.runs import load_run
from lm_polygraph_asmi.validation import did_you_mean, listed

if TYPE_CHECKING:
    from lm_polygraph_asmi.runs.checks import Plan

OURS = [f"lm_polygraph_asmi.estimators.{name}" for name in ("asmi", "sem_asmi", "adapt_asmi")]
TRIED = ("RougeMetric", "BLEUMetric", "AccuracyMetric", *METRICS)
"""Metrics that cost little, so that they are built and tried before the run."""
NOT_SAVED = ("attention_all", "greedy_tokens_alternatives")
"""Statistics of generation that a run does not save."""


def _exported(module: Any, kind: type) -> dict[str, Any]:
    """Subclasses of `kind` that a module of LM-Polygraph exports, by name."""
    return {n: v for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, kind)}


def sentence(error: Exception) -> str:
    """The message of an error, without the lines that OmegaConf adds to it."""
    if isinstance(error, OmegaConfBaseException):
        return str(error).split("\n")[0].split(" raised while resolving interpolation: ")[-1]
    return str(error)


def unbuilt(name: str, error: Exception) -> str:
    """Why an estimator cannot be built. For an unknown name, the nearest known one is suggested."""
    if not isinstance(error, ModuleNotFoundError) or not f"{name}.".startswith(f"{error.name}."):
        return sentence(error)
    known = [*_exported(lm_polygraph.estimators, Estimator), *OURS]
    return f"there is no estimator of this name{did_you_mean(name, known)}"


def answers_misfits(plan: "Plan") -> Iterator[str]:
    """Find prompts without a saved answer, and methods that need more than an answer's tokens."""
    if (run := OmegaConf.select(plan.config, "asmi.answers")) is None:
        return
    for statistic in NOT_SAVED:
        if readers := listed(attention_readers(plan.estimators, statistic)):
            yield f"asmi.answers: saved answers have no {statistic}: leave out {readers}"
    try:
        known = {*load_run(run).stats["input_texts"]}
    except (OSError, ValueError, KeyError) as error:
        yield f"asmi.answers: {error}"
        return
    if lacking := [row.id for row in plan.asked if row.input not in known]:
        yield (
            f"asmi.answers: {run} has no answers to {len(lacking)} of {len(plan.asked)} prompts "
            f"({listed(lacking)}): name a run with the same rows (data.size, data.sample, "
            "data.shard) and the same prompt"
        )


def metric_misfits(plan: "Plan") -> Iterator[str]:
    """Find quality metrics that LM-Polygraph does not know, or whose arguments are wrong."""
    known = _exported(lm_polygraph.generation_metrics, GenerationMetric) | METRICS
    known |= {name: ours for name, (_, ours) in MENDS.items() if name in known}
    for metric in map(container, plan.config.get("generation_metrics") or ()):
        name, place = metric["name"], f"generation_metrics: {metric['name']}"
        if name not in known:
            yield f"{place} is no metric{did_you_mean(name, known)}: there are {', '.join(known)}"
        elif name in TRIED:
            try:
                built = known[name](*(metric.get("args") or ()), **(metric.get("kwargs") or {}))
                built({"greedy_texts": ["one two three four"]}, ["one two three four"])
            except Exception as error:  # metrics and their libraries can raise anything
                yield f"{place} cannot be used with its args or kwargs: {error}"


def model_misfits(plan: "Plan") -> Iterator[str]:
    """Find methods that the model's class does not support, and devices that do not exist."""
    yield from _absent_devices((plan.model.get("load_model_args") or {}).get("device_map"))
    if not (script := _load_script(plan)).exists():
        yield (
            f"model.path_to_load_script: there is no {script}. A relative path begins at the "
            "config's folder; `${asmi_path:model/asmi_causal.py}` is the script of this package"
        )
    if plan.without_model or not has_shipped_script(plan.model):
        return  # a user's own load script may load another class
    try:
        config = plan.configuration
    except (OSError, ValueError, ImportError):  # the check of the window reports it
        return
    if config is None:
        return
    advice = "or use another model"
    masking = [str(e) for e in plan.estimators if "asmi" in e.stats_dependencies]
    structure = OmegaConf.select(plan.config, "asmi.structure")
    if masking and (reason := unmaskable_class(config, structure)):
        yield f"{reason}: leave out {', '.join(masking)}, {advice}"
    mapped = list(map(str, attention_readers(plan.estimators)))
    if mapped and (name := class_without_attention(config)):
        yield f"{name} has no attention maps: leave out {', '.join(mapped)}, {advice}"


def _load_script(plan: "Plan") -> Path:
    """The model's load script, found as polygraph_eval does; a folder if none is set."""
    sources = OmegaConf.select(plan.config, "hydra.runtime.config_sources") or ()
    folders = {source.provider: source.path for source in reversed(sources)}
    named, main = os.environ.get("HYDRA_CONFIG"), folders.get("main", "")  # main: of `doctor`
    folder = Path(named).parent if named else Path(folders.get("command-line", main))
    return folder / str(plan.model.get("path_to_load_script") or "")


def _absent_devices(device_map: Any) -> Iterator[str]:
    """Find CUDA devices in a device map that PyTorch does not see."""
    for device in {*device_map.values()} if isinstance(device_map, dict) else {device_map}:
        place = f"cuda:{device}" if isinstance(device, int) else str(device)
        index = place.removeprefix("cuda").removeprefix(":") or "0"
        if place.startswith("cuda") and int(index) >= torch.cuda.device_count():
            yield (
                f"model.load_model_args.device_map names {place}, but PyTorch sees "
                f"{torch.cuda.device_count()} CUDA devices here: use auto or cpu"
            )
