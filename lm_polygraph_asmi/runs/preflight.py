"""Checks of a run without its model: what would stop it, or bias its comparison, hours later."""

import importlib.util
import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import pandas as pd
from datasets import load_from_disk
from huggingface_hub.errors import HFValidationError
from lm_polygraph import generation_metrics
from lm_polygraph.defaults.register_default_stat_calculators import (
    register_default_stat_calculators,
)
from lm_polygraph.estimators import Estimator
from lm_polygraph.stat_calculators.prompt import PromptCalculator, SamplingPromptCalculator
from lm_polygraph.utils.common import load_external_module
from lm_polygraph.utils.factory_estimator import FactoryEstimator
from lm_polygraph.utils.generation_parameters import GenerationParameters
from omegaconf import DictConfig, OmegaConf

from lm_polygraph_asmi.config import ASMIConfig, check_stop, depth_key
from lm_polygraph_asmi.host.align_score import checkpoint_problem
from lm_polygraph_asmi.host.configs import container
from lm_polygraph_asmi.host.generation import read_shipped
from lm_polygraph_asmi.host.quality import ENGLISH, METRICS, unread
from lm_polygraph_asmi.host.side_models import cross_encoder_problem, nli_problem
from lm_polygraph_asmi.results.manifest import dropped_text
from lm_polygraph_asmi.results.runs import manager_files
from lm_polygraph_asmi.runs.rows import (
    DROPPED,
    DataRow,
    cluster_key,
    fits,
    problem_of,
    read_data,
    rows_folder,
    subsample,
    unusable_rows,
    window_settings,
)
from lm_polygraph_asmi.validation import check_writable

ASMI_SCRIPT, HOST_SCRIPT = "asmi_causal.py", "default_causal.py"
"""Scripts that load a model by `load_model_args`; the first defaults to eager attention."""


SPACY_MODEL = "en_core_web_sm"


DEFAULT_METRICS = ({"name": "RougeMetric"}, {"name": "AlignScore"})
"""Those of LM-Polygraph's own that cannot read every script."""


class Finding(NamedTuple):
    """A problem of a run, and what to do about it; not fatal: a warning of a run that works."""

    text: str
    fatal: bool = True


def check_config(config: DictConfig) -> Iterator[Finding]:
    """Findings about the settings of a run."""
    for setting in (missing := _missing(config)):
        yield Finding(f"{setting} is missing: add {setting}=... to the command")
    if missing:
        return  # other settings may depend on them
    stops = OmegaConf.select(config, "generation_params.stop_strings") or ()
    try:
        check_stop("generation_params.stop_strings", (stops,) if isinstance(stops, str) else stops)
    except ValueError as error:
        yield Finding(str(error))
        return  # estimators of ASMI have them among their settings
    estimators: list[Estimator] = []
    faults: dict[str, list[str]] = {}
    for entry in config.estimators:
        try:
            estimators.append(FactoryEstimator()(entry.name, entry.get("cfg", {})))
        except Exception as error:  # an estimator's constructor can raise anything
            faults.setdefault(str(error), []).append(entry.name)
    for fault, names in faults.items():  # estimators of ASMI share their settings
        yield Finding(f"cannot build {', '.join(names)}: {fault}")
    for name, times in Counter(map(str, estimators)).items():
        if times > 1:
            yield Finding(
                f"{times} estimators have the name {name!r}, by which LM-Polygraph saves scores: "
                "change their settings, or leave all but one out"
            )
    yield from _check_depths(config, estimators)
    yield from _check_attention(config, estimators)
    yield from _check_generation(config)
    yield from _check_without_effect(config)
    yield from _check_quality(config)
    if len(config.get("seed") or [1]) > 1:
        yield Finding(
            "several seeds: answers, masks and samples do not depend on LM-Polygraph's seed, so "
            "the runs will be equal. Vary asmi.seed and asmi.sampling_seed instead",
            fatal=False,
        )
    if config.get("ignore_exceptions"):
        yield Finding(
            "ignore_exceptions is true: an estimator that fails on one batch loses all its scores",
            fatal=False,
        )


def _check_depths(config: DictConfig, estimators: Sequence[Estimator]) -> Iterator[Finding]:
    """Depths of estimators that the masked-heads calculator does not score."""
    read = {depth_key(e.described["depth"]) for e in estimators if hasattr(e, "described")}
    entries = [e for e in config.get("stat_calculators") or () if e != "auto"]
    for entry in [e for e in entries if read and "asmi" in e.get("stats", ())]:
        settings = container(entry.cfg)
        scored = ASMIConfig.from_dict(settings).at_depths(settings.get("depths"))
        depths = sorted(depth_key(one.depth) for one in scored)
        if missing := sorted(read.difference(depths)):
            yield Finding(f"estimators read depths {missing}, asmi.depths has {depths}: add them")


def _check_without_effect(config: DictConfig) -> Iterator[Finding]:
    """Settings of `asmi` that a benchmark reads elsewhere and that differ from there."""
    for name, config_key, default in (
        ("method", "estimators", ASMIConfig.method),
        ("stop", "generation_params.stop_strings", None),
        ("max_new_tokens", "max_new_tokens", None),
    ):
        value = OmegaConf.select(config, f"asmi.{name}")
        if value is not None and value != (default or OmegaConf.select(config, config_key)):
            yield Finding(f"asmi.{name}={value} has no effect in a benchmark: set {config_key}")


def _check_quality(config: DictConfig) -> Iterator[Finding]:
    """Quality metrics that cannot be built; LM-Polygraph reports them after loading the model."""
    for entry in config.get("generation_metrics") or ():
        metric = container(entry)
        name = metric["name"]
        kind = METRICS.get(name) or getattr(generation_metrics, name, None)
        if kind is None:
            yield Finding(
                f"unknown quality metric {name!r}: use one of LM-Polygraph, such as AlignScore, or "
                f"{', '.join(METRICS)}"
            )
        elif ignored := sorted(set(metric) - {"name", "args", "kwargs"}):
            ignored_entries = ", ".join(f"{key}: {metric[key]}" for key in ignored)
            yield Finding(
                "LM-Polygraph reads name, args and kwargs of a quality metric, not "
                f"{ignored_entries}: write {{name: {name}, kwargs: {{{ignored_entries}}}}}"
            )
        else:
            try:
                inspect.signature(kind).bind(*metric.get("args", ()), **metric.get("kwargs", {}))
            except TypeError as error:
                yield Finding(f"cannot build the quality metric {name}: {error}")


def _missing(config: DictConfig) -> list[str]:
    """Mandatory settings without a value."""

    # Not `OmegaConf.missing_keys`, which resolves interpolations and so reads the rows.
    def walk(node: Any, name: str) -> Iterator[str]:
        if node == "???":
            yield name
        elif isinstance(node, dict):
            for key, value in node.items():
                yield from walk(value, f"{name}.{key}" if name else str(key))

    unresolved = cast(dict[str, Any], OmegaConf.to_container(config))
    unresolved.pop("hydra", None)  # set by Hydra
    return list(walk(unresolved, ""))


def _check_attention(config: DictConfig, estimators: list[Estimator]) -> Iterator[Finding]:
    readers = [str(e) for e in estimators if "attention_all" in e.stats_dependencies]
    attention = OmegaConf.select(config, "model.load_model_args.attn_implementation")
    reads_maps = config.get("output_attentions", True)
    if readers and not reads_maps:
        yield Finding(
            f"{', '.join(readers)} read attention maps, but output_attentions is false: set it to "
            "true, or leave these estimators out"
        )
    if readers and OmegaConf.select(config, "asmi.answers") is not None:
        yield Finding(
            f"{', '.join(readers)} read attention maps of generation, which the saved answers of "
            "asmi.answers lack: leave these estimators out"
        )
    if reads_maps and attention is None and not loads_eager(config):
        yield Finding(
            "LM-Polygraph's calculators read attention maps (output_attentions defaults to true), "
            "which only eager attention returns, but transformers loads models with sdpa by "
            "default: set model.load_model_args.attn_implementation=eager, or "
            "output_attentions=false",
            fatal=not has_own_script(config),  # which may set it
        )
    if reads_maps and attention not in (None, "eager"):
        yield Finding(
            f"output_attentions is true, but the model is loaded with {attention} attention, which "
            "returns no attention maps: set model.load_model_args.attn_implementation=eager (ASMI "
            "itself follows asmi.attention), or output_attentions=false"
        )


def has_own_script(config: DictConfig) -> bool:
    """Whether a script of the user loads the model, in an unknown way."""
    script = OmegaConf.select(config, "model.path_to_load_script")
    return bool(script) and Path(str(script)).name not in (ASMI_SCRIPT, HOST_SCRIPT)


def loads_eager(config: DictConfig) -> bool:
    """Whether the model has eager attention although its config does not set it."""
    if "auto" not in (config.get("stat_calculators") or []):
        return True  # individually listed calculators have this setting themselves
    script = OmegaConf.select(config, "model.path_to_load_script")
    arguments = OmegaConf.select(config, "model.load_model_args") or {}
    return Path(str(script)).name == ASMI_SCRIPT and "attn_implementation" not in arguments


def _check_generation(config: DictConfig) -> Iterator[Finding]:
    generation = config.get("generation_params") or {}
    if generation.get("do_sample"):
        yield Finding(
            "generation_params.do_sample is true: LM-Polygraph would sample the greedy answers. "
            "Set it to false; methods that need samples still get them"
        )
    elif generation.get("do_sample") is None:
        yield Finding(
            "generation_params.do_sample is not set: if a model ships do_sample: true, "
            "LM-Polygraph samples the greedy answers. Set it to false",
            fatal=False,
        )
    if config.get("batch_size", 1) > 1 and generation.get("stop_strings"):
        yield Finding(
            "batch_size is above 1 with stop strings: LM-Polygraph counts the padding after "
            "answers that end early as part of them, in its own scores and in the quality metric "
            "(ASMI removes it). Use batch_size: 1",
            fatal=False,
        )


def check_generation(config: DictConfig) -> Iterator[Finding]:
    """What the model ships for generation: LM-Polygraph takes from it what a run does not set."""
    if _missing(config):
        return  # reported by `check_config`
    given, known = config.get("generation_params") or {}, vars(GenerationParameters())
    if unread := ", ".join(f"generation_params.{name}" for name in given if name not in known):
        yield Finding(f"LM-Polygraph does not read {unread}: leave it out, or set {list(known)}")
    try:
        shipped = read_shipped(container(config.get("model") or DictConfig({})))
    except (OSError, ValueError, TypeError, HFValidationError):  # TypeError without config.json
        return  # no such model: reported when it is loaded
    for name in sorted(shipped.keys() & known):
        if given.get(name) is None:
            yield Finding(
                f"generation_params.{name} is not set, and the model ships {shipped[name]!r}, "
                f"which LM-Polygraph would use. Set it: LM-Polygraph's default is {known[name]!r}"
            )
    if unused := ", ".join(sorted(shipped.keys() - known)):
        yield Finding(
            f"the model ships settings of generation that the run does not follow: {unused}. "
            "Answers and probabilities are those of the model without them, as in a score",
            fatal=False,
        )


def check_data(config: DictConfig) -> Iterator[Finding]:
    """Findings about the rows of a run; reads them, from the hub if necessary."""
    if _missing(config):
        return  # reported by `check_config`
    try:
        rows = rows_of(config)
    except (OSError, ValueError) as error:
        yield Finding(str(error))
        return
    yield from _check_usable(config, rows)
    yield from _check_gold(config, [row for row in rows if problem_of(row) is None])
    splits = Path(str(config.dataset)) / "dataset_dict.json"
    if not _is_built(config) and config.get("load_from_disk") and splits.is_file():
        yield Finding(
            f"{config.dataset} has several splits, but LM-Polygraph reads a folder of one: name "
            f"{splits.parent / str(config.get('eval_split', 'test'))}"
        )
    if not _is_built(config) and Path(str(config.dataset)).is_file():
        yield Finding(
            f"{config.dataset} is read by pandas, which turns the answer 'None' into NaN and "
            "'007' into 7: save the rows as a `datasets` folder instead",
            fatal=False,
        )
    sharded = OmegaConf.select(config, "data.num_shards", default=1) > 1
    if sharded and config.get("subsample_eval_dataset", -1) != -1:
        yield Finding(
            "subsample_eval_dataset would sample within each shard, so rows would differ from an "
            "unsplit run: use data.size or data.sample"
        )
    columns = (config.text_column, config.get("label_column"))
    if _is_built(config) and columns != ("input", "output"):
        yield Finding(
            f"expected text_column=input and label_column=output, in which rows are saved, got "
            f"{columns}: leave both unset, and name the columns of the source with "
            "data.text_column and data.label_column"
        )
    if len(rows) < 2:
        yield Finding(
            f"expected two rows or more, got {len(rows)}: with fewer, LM-Polygraph's calibration "
            "metric (IsotonicPCC) ends the run with an error. Use more (data.sample, "
            "data.num_shards, subsample_eval_dataset)"
        )


def _check_usable(config: DictConfig, rows: list[DataRow]) -> Iterator[Finding]:
    """Rows that would end the run when their turn comes, and rows that were left out."""
    problems = {row.id: reason for row in rows if (reason := problem_of(row))}
    settings = window_settings(config)
    long_questions: dict[str, str] = {}
    try:
        too_long = fits(settings)
        for row in rows:
            if row.id not in problems and (reason := too_long(row.input)):
                problems[row.id] = reason
        long_questions = _beyond_window(config, [row for row in rows if row.id not in problems])
    except (OSError, HFValidationError):
        pass  # no such model: reported when it is loaded
    except (ValueError, ImportError) as error:
        path = settings["model"].get("path")
        yield Finding(f"cannot read configuration or tokenizer of {path}: {error}")
    if problems:
        text = unusable_rows(problems, len(rows))
        if not _is_built(config):
            text = text.partition(", or leave")[0]
            text += f" in {config.dataset}, or name it in data.source, with data.unusable=drop"
        yield Finding(text)
    if long_questions:
        shown = "; ".join(f"{row}: {reason}" for row, reason in list(long_questions.items())[:3])
        yield Finding(
            f"P(True) asks about prompt and answers in one text. With answers of the greatest "
            f"length it is too long in {len(long_questions)} of {len(rows)} rows ({shown}): set "
            "asmi.num_samples or max_new_tokens lower, leave out PTrue and PTrueSampling, or leave "
            "out these rows",
            fatal=False,
        )
    if dropped := dropped_rows(config):
        yield Finding(f"left out, by data.unusable=drop: {dropped_text(dropped)}", fatal=False)


def _check_gold(config: DictConfig, rows: list[DataRow]) -> Iterator[Finding]:
    """Gold answers by which a metric cannot judge: its labels would be missing, or wrong."""
    golds, ids = [row.output for row in rows], [row.id for row in rows]
    if not any(golds):
        return  # a run without gold answers
    process = str
    path, function = (
        OmegaConf.select(config, f"process_target_fn.{k}") for k in ("path", "fn_name")
    )
    if path is not None and Path(path).is_file():
        process = getattr(load_external_module(path), str(function), str)
    for entry in config.get("generation_metrics") or DEFAULT_METRICS:
        if "lang" in (entry.get("kwargs") or {}):
            continue  # the user's own choice of a model
        if found := unread(entry["name"], golds, ids, process):
            yield Finding(found, fatal=not entry["name"].startswith(ENGLISH))


def _beyond_window(config: DictConfig, rows: Sequence[DataRow]) -> dict[str, str]:
    """id -> reason, of rows whose question by P(True) may be longer than the context window."""
    names = {entry.name for entry in config.estimators}
    settings = window_settings(config)
    longest, samples = settings["max_new_tokens"], 0
    if "PTrueSampling" in names:
        chosen = OmegaConf.select(config, "asmi.num_samples")
        samples = ASMIConfig.num_samples if chosen is None else chosen
        prompt = SamplingPromptCalculator().prompt
    elif "PTrue" in names:
        prompt = PromptCalculator().prompt
    else:
        return {}
    # Greedy answer and samples, each sample with a comma; one token is generated.
    new_tokens = longest + samples * (longest + 1) + 1
    too_long = fits(settings | {"max_new_tokens": new_tokens})
    reasons = ((row.id, too_long(prompt.format(q=row.input, s="", a=""))) for row in rows)
    return {row: reason for row, reason in reasons if reason}


def dropped_rows(config: DictConfig) -> dict[str, str]:
    """id -> reason, of rows that a run leaves out."""
    if not _is_built(config):
        return {}
    return cast(dict[str, str], json.loads((rows_folder(config) / DROPPED).read_text()))


def rows_of(config: DictConfig) -> list[DataRow]:
    """The rows of a run in order; reads them, from the hub if necessary."""
    if _is_built(config):
        table = load_from_disk(rows_folder(config))
        columns = (table[name] for name in DataRow._fields)
        rows = list(map(DataRow._make, zip(*columns, strict=True)))
    else:
        source = config.dataset if isinstance(config.dataset, str) else tuple(config.dataset)
        names = config.text_column, config.get("label_column")
        rows = _rows_in(Path.cwd(), source, config.eval_split, *names)
    size = config.get("subsample_eval_dataset", -1)
    if size == -1:
        return rows
    return subsample(rows, int(size * len(rows)) if size < 1 else size, _seed(config))


def _seed(config: DictConfig) -> int:
    return int((config.get("seed") or [1])[0])


def _is_built(config: DictConfig) -> bool:
    """Whether the rows come from the node `data`."""
    # Unresolved: resolving it would build the rows, without our error messages.
    dataset = cast(dict[str, Any], OmegaConf.to_container(config))["dataset"]
    return isinstance(dataset, str) and "asmi_rows" in dataset


@lru_cache(maxsize=1)  # the doctor calls it several times
def _rows_in(
    _: Path, source: str | tuple[str, ...], split: str, text: str, label: str | None
) -> list[DataRow]:
    if not (isinstance(source, str) and Path(source).is_file()):
        return read_data(source, split, text, label)
    try:
        table = pd.read_csv(source)
    except ValueError as error:
        raise ValueError(f"cannot read {source} as CSV: {error}") from error
    for column in (text, label):
        if column not in table.columns:
            raise ValueError(
                f"expected a column {column!r} in {source}, got {list(table.columns)}: set "
                "text_column and label_column"
            )
    pairs = zip(table[text].tolist(), table[label].tolist(), strict=True)
    return [DataRow(str(i), cluster_key(x), x, y) for i, (x, y) in enumerate(pairs)]


def check_places(config: DictConfig) -> Iterator[Finding]:
    """Files and folders that a run reads or writes only after its model is loaded."""
    if _missing(config):
        return  # reported by `check_config`
    folders = {"save_path": config.get("save_path") or config.hydra.runtime.output_dir}
    folders["asmi.result_cache"] = OmegaConf.select(config, "asmi.result_cache")
    for name, folder in folders.items():
        try:
            if folder is not None:
                check_writable(folder, folder=True)
        except ValueError as error:
            yield Finding(f"{name}: {error}")
    answers = OmegaConf.select(config, "asmi.answers")
    if answers is not None:
        try:
            manager_files(answers)
        except (OSError, ValueError) as error:
            yield Finding(f"asmi.answers: {error}")
    for name in ("process_output_fn", "process_target_fn"):
        path, function = (OmegaConf.select(config, f"{name}.{key}") for key in ("path", "fn_name"))
        if path is None or not Path(path).is_absolute():
            continue  # relative to the config, as LM-Polygraph's are
        if not Path(path).is_file():
            yield Finding(f"{name}.path: {path} does not exist")
        elif not hasattr(load_external_module(path), str(function)):
            yield Finding(f"{name}.fn_name: {path} has no function {function!r}")
    size = config.get("batch_size", 1)
    if not isinstance(size, int) or size < 1:
        yield Finding(f"expected batch_size of at least 1, got {size!r}")
    seeds = config.get("seed")
    if seeds is not None and not all(isinstance(seed, int) for seed in seeds):
        yield Finding(f"expected seed as a list of whole numbers, got {list(seeds)}")


def check_side_models(config: DictConfig) -> Iterator[Finding]:
    """Models beside the language model, which LM-Polygraph loads after it."""
    metrics = config.get("generation_metrics") or ()
    names = {entry["name"] for entry in metrics}
    present = importlib.util.find_spec(SPACY_MODEL) is not None or Path(SPACY_MODEL).is_dir()
    if not present and ("AlignScore" in names or not names):  # or by LM-Polygraph's default
        yield Finding(
            f"AlignScore splits texts with spaCy's {SPACY_MODEL}, which is missing: LM-Polygraph "
            f"would install it when it loads the metric. Install it before: python -m spacy "
            f"download {SPACY_MODEL}",
            fatal=False,
        )
    for entry in metrics:
        checkpoint = str((entry.get("kwargs") or {}).get("ckpt_path") or "https://default")
        local = not checkpoint.startswith(("http://", "https://"))
        if local and (problem := checkpoint_problem(checkpoint)):
            yield Finding(f"{entry['name']}: {problem}")
    problems = {"deberta_path": nli_problem, "cross_encoder_name": cross_encoder_problem}
    for settings in _calculators(config):
        for setting in problems.keys() & settings.keys():
            if problem := problems[setting](settings[setting], settings.get("hf_cache")):
                yield Finding(problem)


def _calculators(config: DictConfig) -> list[dict[str, Any]]:
    """Settings of the calculators that the estimators of a run need, directly or not."""
    listed = config.get("stat_calculators") or []
    entries: list[Any] = [entry for entry in listed if entry != "auto"]
    if "auto" in listed:
        language = config.get("language", "en")
        entries = [*register_default_stat_calculators("Whitebox", language), *entries]
    provider = {stat: entry for entry in entries for stat in entry.stats}  # the last one counts
    needed: dict[str, Any] = {}
    wanted: list[str] = []
    for entry in config.get("estimators") or ():
        with suppress(Exception):  # reported by `check_config`
            wanted.extend(FactoryEstimator()(entry.name, entry.get("cfg", {})).stats_dependencies)
    while wanted:
        entry = provider.get(wanted.pop())
        if entry is not None and entry.name not in needed:
            needed[entry.name] = container(entry.cfg)
            wanted.extend(entry.dependencies)
    return [settings.get("cfg") or settings for settings in needed.values()]  # timed ones hold one


CHECKS: dict[str, Callable[[DictConfig], Iterator[Finding]]] = {
    "settings": check_config,
    "generation": check_generation,
    "rows": check_data,
    "places": check_places,
    "side models": check_side_models,
}
"""The checks of a run, by what they read."""


def findings_of(
    check: Callable[[DictConfig], Iterator[Finding]], config: DictConfig
) -> list[Finding]:
    """All findings of a check; an error in it is one, too."""
    try:
        return list(check(config))
    except Exception as error:  # an interpolation that fails can raise anything
        return [Finding(f"{type(error).__name__}: {error}")]
