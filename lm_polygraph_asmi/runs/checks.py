"""Read from its config what a run will do, and check this before the model is loaded."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

from huggingface_hub import constants
from hydra.core.hydra_config import HydraConfig
from lm_polygraph.estimators import Estimator
from lm_polygraph.utils.common import load_external_module
from lm_polygraph.utils.factory_estimator import FactoryEstimator
from lm_polygraph.utils.generation_parameters import GenerationParameters
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.filesize import decimal
from transformers import PretrainedConfig

from lm_polygraph_asmi.config import ASMIConfig, check_stop
from lm_polygraph_asmi.host.configs import container
from lm_polygraph_asmi.host.generation import read_shipped
from lm_polygraph_asmi.host.model import attention_readers
from lm_polygraph_asmi.host.quality import ENGLISH, LEFT_OUT, unread_rows, why_unread
from lm_polygraph_asmi.host.window import read_config, read_window
from lm_polygraph_asmi.options import check_shell_stop
from lm_polygraph_asmi.runs.misfits import (
    answers_misfits,
    metric_misfits,
    model_misfits,
    sentence,
    unbuilt,
)
from lm_polygraph_asmi.runs.needs import (
    LANGUAGE_MODEL,
    ROWS,
    Need,
    metrics_of,
    needs_of,
)
from lm_polygraph_asmi.runs.rows import (
    DataRow,
    RunRows,
    check_usable,
    results_folder,
    run_rows,
    unusable_rows,
)
from lm_polygraph_asmi.validation import check_writable


class Finding(NamedTuple):
    """A problem of a run, and what to do about it. If it is not fatal, it is only a warning."""

    text: str
    fatal: bool = True


@dataclass(frozen=True)
class Plan:
    """A run's config, read once for the checks, the description and the manifest of the run.

    `estimators` are built as LM-Polygraph will build them. `faults` maps a check to the reasons why
    its part of the config could not be read.
    """

    config: DictConfig
    estimators: list[Estimator] = field(default_factory=list)
    rows: RunRows = field(default_factory=lambda: RunRows([]))
    faults: dict[str, list[str]] = field(default_factory=dict)

    @cached_property
    def asked(self) -> list[DataRow]:
        """The rows that the run will ask the model with its first seed."""
        return self.rows.asked(self.config, int((self.config.get("seed") or [1])[0]))

    @cached_property
    def model(self) -> dict[str, Any]:
        """The config's node `model`; empty if there is none."""
        return container(self.config.get("model") or DictConfig({}))

    @cached_property
    def configuration(self) -> PretrainedConfig | None:
        """The model's config.json; None for a model without local weights."""
        return read_config(self.model)

    @cached_property
    def needs(self) -> list[Need]:
        """What the run loads from elsewhere, besides the rows that were already read."""
        return needs_of(self)

    @cached_property
    def without_model(self) -> list[Finding]:
        """Reasons why the language model cannot be loaded; empty if it can."""
        return [
            Finding(need.problem, need.fatal)
            for need in self.needs
            if need.by == LANGUAGE_MODEL and need.problem
        ]


def read_plan(config: DictConfig, rows: bool = True) -> Plan:
    """Read a run's config and, with `rows`, its rows. Errors go into the plan's `faults`."""
    try:
        return _read_plan(config, rows)
    except OmegaConfBaseException as error:
        return Plan(config, faults={"config": [sentence(error)]})


def _read_plan(config: DictConfig, rows: bool) -> Plan:
    # `OmegaConf.missing_keys` would resolve interpolations, and so read the rows.
    unresolved = cast(dict[str, Any], OmegaConf.to_container(config))
    missing = _missing({name: node for name, node in unresolved.items() if name != "hydra"})
    if reasons := [f"{name} is missing: add {name}=... to the command" for name in missing]:
        return Plan(config, faults={"config": reasons})
    try:
        stops = OmegaConf.select(config, "generation_params.stop_strings") or ()
        stops = (stops,) if isinstance(stops, str) else stops
        check_stop("generation_params.stop_strings", stops)
        typed = HydraConfig.get().overrides.task if HydraConfig.initialized() else ()
        if any("stop_strings" in override for override in typed):
            for text in stops:
                check_shell_stop("generation_params.stop_strings", text)
    except ValueError as error:
        return Plan(config, faults={"config": [str(error)]})
    estimators: list[Estimator] = []
    faulty: dict[str, list[str]] = {}
    for entry in config.estimators:
        try:
            estimators.append(FactoryEstimator()(entry.name, entry.get("cfg", {})))
        except Exception as error:  # an estimator's constructor can raise anything
            faulty.setdefault(unbuilt(entry.name, error), []).append(entry.name)
    if faulty:  # ASMI's estimators share settings, so several may fail for one reason
        reasons = [f"cannot build {', '.join(names)}: {why}" for why, names in faulty.items()]
        return Plan(config, faults={"config": reasons})
    try:
        plan = Plan(config, estimators, run_rows(config) if rows else RunRows([]))
        check_usable(replace(plan.rows, rows=plan.asked), bool(config.get("multiref")))
    except (OSError, ValueError) as error:
        return Plan(config, estimators, faults={"rows": [str(error)]})
    return plan


def _missing(node: Any, name: str = "") -> Iterator[str]:
    """Names of mandatory settings that have no value."""
    if node == "???":
        yield name
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from _missing(value, f"{name}.{key}".strip("."))


def check_rows(plan: Plan) -> Iterator[Finding]:
    """Find rows that would end the run in the middle, or that get no label or a wrong one."""
    yield from map(Finding, plan.faults.get("rows", ()))
    if plan.faults:
        return
    config, rows = plan.config, plan.asked
    if plan.rows.chosen and config.text_column != "input":
        yield Finding(
            "expected text_column=input, the column in which rows are saved, got "
            f"{config.text_column}: leave text_column unset, and name the source's columns with "
            "data.text_column and data.label_column"
        )
    if len(rows) < 2:
        yield Finding(
            f"expected two rows or more, got {len(rows)}: with fewer, LM-Polygraph's metric "
            "IsotonicPCC ends the run with an error. Use more rows or fewer shards"
        )
    if plan.rows.labelled:
        yield from _check_gold(config, rows)


def _check_gold(config: DictConfig, rows: list[DataRow]) -> Iterator[Finding]:
    """Find gold answers that a metric cannot read.

    ROUGE gives such rows no label. If there are only a few, this is a warning.
    """
    functions = [n for n in ("process_output_fn", "process_target_fn") if config.get(n)]
    if len(functions) == 1:
        yield Finding(
            f"only {functions[0]} is set, but LM-Polygraph needs process_output_fn and "
            "process_target_fn together: set both, or neither"
        )
    golds, ids = [row.output for row in rows], [row.id for row in rows]
    if golds and golds == [row.input for row in rows]:
        text = "the gold answers are the prompts: if this is not meant, set another label_column"
        yield Finding(text, fatal=False)
    process = str
    path, name = (OmegaConf.select(config, f"process_target_fn.{k}") for k in ("path", "fn_name"))
    if path is not None and Path(path).is_file():
        process = getattr(load_external_module(path), str(name))
    for metric in metrics_of(config):
        name = metric["name"]
        if "lang" in (metric.get("kwargs") or {}):
            continue  # the user chose the metric's model
        if unread := unread_rows(name, golds, ids, process):
            left_out = name.startswith("Rouge") and len(unread) <= LEFT_OUT * len(rows)
            fatal = not (left_out or name.startswith(ENGLISH))
            yield Finding(why_unread(name, unread, len(rows)), fatal)


def check_window(plan: Plan) -> Iterator[Finding]:
    """Find prompts that, with an answer of the greatest length, exceed the context window."""
    config = plan.config
    limit = config.get("max_new_tokens", 100)  # LM-Polygraph's default
    if plan.without_model:
        yield from plan.without_model
        return
    maps = config.get("output_attentions") and attention_readers(plan.estimators, "attention_all")
    try:
        instruct = bool(config.get("instruct"))
        window = read_window(plan.model, plan.configuration, instruct, bool(maps))
        too_long = unusable_rows(plan.asked, lambda row: window.too_long(row.input, limit))
    except (OSError, ValueError, ImportError) as error:
        problem = f"cannot read configuration or tokenizer of {plan.model.get('path')}: {error}"
        # A user's own load script may load a model that is not on this machine.
        yield Finding(problem, fatal=not isinstance(error, OSError))
        return
    if too_long:
        yield Finding(too_long)


def check_side_models(plan: Plan) -> Iterator[Finding]:
    """Find side models and data that are missing; LM-Polygraph loads them after the model."""
    for need in plan.needs:
        if need.problem and need.by not in (LANGUAGE_MODEL, ROWS):
            yield Finding(need.problem)


def check_generation(plan: Plan) -> Iterator[Finding]:
    """Find generation parameters that would sample or pad answers, or that the model itself sets.

    If the run does not set a parameter, LM-Polygraph uses the model's value.
    """
    config = plan.config
    given, known = config.get("generation_params") or {}, vars(GenerationParameters())
    if given.get("do_sample"):
        yield Finding(
            "generation_params.do_sample would sample the greedy answers: set it to false. "
            "Methods that need samples still get them"
        )
    if (given.get("num_beams") or 1) != 1:
        yield Finding(
            f"generation_params.num_beams is {given.get('num_beams')}, but ASMI scores greedy "
            "answers, and beam search would find others: set it to 1"
        )
    if config.get("batch_size", 1) > 1 and given.get("stop_strings"):
        yield Finding(
            "batch_size is above 1 with stop strings: an answer that ends early is padded, and "
            "LM-Polygraph's scores and quality metrics count the padding. Use batch_size: 1",
            fatal=False,
        )
    if unread := ", ".join(f"generation_params.{name}" for name in given if name not in known):
        yield Finding(f"LM-Polygraph does not read {unread}: leave it out, or set {list(known)}")
    try:
        shipped = {} if plan.without_model else read_shipped(plan.model)
    except (OSError, ValueError, TypeError):  # TypeError if there is no config.json
        return  # there is no such model, which another check reports
    for name in sorted(shipped.keys() & known):
        if given.get(name) is None:
            yield Finding(
                f"generation_params.{name} is not set, so LM-Polygraph would use the model's own "
                f"value {shipped[name]!r}. Set it; LM-Polygraph's default is {known[name]!r}"
            )
    if unused := ", ".join(sorted(shipped.keys() - known)):
        yield Finding(
            f"the run ignores the model's own generation settings {unused}, as in a score",
            fatal=False,
        )


def _folders(config: DictConfig) -> dict[str, str]:
    """The folders that a run writes to, by the setting that names them."""
    named = {
        "save_path": str(results_folder(config)),
        "asmi.result_cache": OmegaConf.select(config, "asmi.result_cache"),
    }
    return {name: folder for name, folder in named.items() if folder is not None}


def check_folder(plan: Plan) -> Iterator[Finding]:
    """Check that a run can write to its folders, which it does only after loading the model."""
    for name, folder in _folders(plan.config).items():
        try:
            check_writable(folder, folder=True)
        except ValueError as error:
            yield Finding(f"{name}: {error}")


def check_disk(plan: Plan) -> Iterator[Finding]:
    """Check for disk space, for downloads and for results (a rough estimate from the rows)."""
    config = plan.config
    depths = len(OmegaConf.select(config, "asmi.depths") or [1])
    tokens = config.get("max_new_tokens", ASMIConfig.max_new_tokens)
    seeds = len(config.get("seed") or [1])
    texts = sum(len(str(row.input).encode(errors="replace")) for row in plan.asked)
    # A manager file has about 2000 bytes for each token at each depth: 60 statistics of 8 bytes
    # and, with at most 300 masks, the most likely token under each mask.
    needed = seeds * (2 * texts + len(plan.asked) * depths * tokens * 2000)
    results, models = f"the results of {len(plan.asked)} rows take about", "what is missing takes"
    size = sum(need.to_download or 0 for need in plan.needs)
    taken = [(name, folder, needed, results) for name, folder in _folders(config).items()]
    taken.append(("HF_HOME", constants.HF_HUB_CACHE, size, models))
    for name, folder, size, what in taken:
        path = Path(folder).absolute()  # it may be created only when it is written to
        home = next(parent for parent in (path, *path.parents) if parent.exists())
        free = shutil.disk_usage(home).free
        if free < size:
            yield Finding(
                f"{name}: {folder} has {decimal(free)} left, and {what} {decimal(size)}: name "
                "another folder, or free some space"
            )


CHECKS: dict[str, Callable[[Plan], Iterator[Finding]]] = {
    "rows": check_rows,
    "window": check_window,
    "side models": check_side_models,
    "generation": check_generation,
    "output folder": check_folder,
    "disk": check_disk,
    "answers": lambda plan: map(Finding, answers_misfits(plan)),
    "metrics": lambda plan: map(Finding, metric_misfits(plan)),
    "model": lambda plan: map(Finding, model_misfits(plan)),
}
"""The checks of a run, by the name under which they are reported."""


def findings_of(plan: Plan) -> dict[str, list[Finding]]:
    """Findings of every check, by check; only those of the config if it cannot be read."""
    if faults := plan.faults.get("config"):
        return {"config": list(map(Finding, faults))}
    findings: dict[str, list[Finding]] = {"config": []}
    for name, check in CHECKS.items():
        try:
            findings[name] = list(check(plan))
        except Exception as error:  # an interpolation that fails can raise anything
            findings[name] = [Finding(f"{type(error).__name__}: {error}")]
    return findings
