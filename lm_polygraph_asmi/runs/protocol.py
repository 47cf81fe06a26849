"""What a run will do, in words: methods, masks, model, prompts, rows and labels.

Each part is a function of what it describes, so that parts can be used without a run's config.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub.errors import HFValidationError
from lm_polygraph.estimators import Estimator
from lm_polygraph.utils.factory_estimator import FactoryEstimator
from omegaconf import DictConfig, OmegaConf
from rich.filesize import decimal

from lm_polygraph_asmi.config import ASMIConfig, target_layer
from lm_polygraph_asmi.host.configs import container
from lm_polygraph_asmi.host.window import Sizes, read_sizes, read_window
from lm_polygraph_asmi.maths import operating_point
from lm_polygraph_asmi.results.manifest import model_of
from lm_polygraph_asmi.runs.preflight import dropped_rows, rows_of
from lm_polygraph_asmi.runs.rows import DataRow, window_settings

BYTES = {"float16": 2, "bfloat16": 2}
"""Bytes of a number by dtype; of others, 4."""


def protocol(config: DictConfig) -> dict[str, str]:
    """Part -> what a run will do; rows that cannot be read yet are described by the reason."""
    node = container(config.get("model") or DictConfig({}))
    sizes = _sizes(node)
    built = [FactoryEstimator()(e.name, e.get("cfg", {})) for e in config.estimators]
    of_asmi = [estimator for estimator in built if hasattr(estimator, "described")]
    parts = {
        "ASMI": _named(of_asmi),
        "baselines": _named([e for e in built if e not in of_asmi]),
        "masks": masks_text([e.config for e in of_asmi], sizes),
        "model": model_text(node, sizes),
        "generation": generation_text(config),
        "quality": quality_text(config.get("generation_metrics") or ()),
    }
    try:
        rows = rows_of(config)
        parts["rows"] = rows_text(config, rows)
        parts["attention maps"] = maps_text(config, sizes, rows)
        parts["first prompt"] = str(rows[0].input) if rows else "none"
    except (OSError, ValueError) as error:
        parts["rows"] = f"unknown: {error}"
    return {name: text for name, text in parts.items() if text}


def _sizes(node: Mapping[str, Any]) -> Sizes | None:
    try:
        return read_sizes(node)
    except (OSError, ValueError, HFValidationError):  # not here: the depth is what is known
        return None


def _named(estimators: Sequence[Estimator]) -> str:
    return f"{len(estimators)}: {', '.join(map(str, estimators))}" if estimators else "none"


def masks_text(configs: Sequence[ASMIConfig], sizes: Sizes | None) -> str:
    """S, p, layer, sampler and scope of ASMI's scores, a line for each different set."""
    lines = []
    for config in configs:
        layer, rate, masks = "", config.mask_rate, config.num_masks
        if sizes is not None:
            layer = f" (layer {target_layer(config.depth, sizes.layers)} of {sizes.layers})"
            rate, masks = operating_point(sizes.heads, masks, rate)
        by_heads = "from the number of heads"
        lines.append(
            f"depth {config.depth:.1%}{layer}: S = {masks or by_heads}, p = {rate or by_heads}, "
            f"{config.mask_sampler} masks, scope {config.scope}, seed {config.seed}"
        )
    return "\n".join(dict.fromkeys(lines))


def model_text(node: Mapping[str, Any], sizes: Sizes | None) -> str:
    """Name and revision of the model in a config's node `model`, and its sizes."""
    about, arguments = model_of(node), node.get("load_model_args") or {}
    chosen = arguments.get("revision")
    revision = about["revision"]
    if revision == "unknown":
        revision = f"{chosen or 'newest'}, not downloaded yet"
    text = f"{about['path']}, revision {revision}"
    if arguments.get("dtype"):
        text += f", {arguments['dtype']}"
    if sizes is not None:
        text += f"; {sizes.layers} layers, {sizes.heads} heads, context window {sizes.window}"
    return text


def generation_text(config: DictConfig) -> str:
    """How answers are generated."""
    generation = config.get("generation_params") or {}
    chosen = {name: OmegaConf.select(config, f"asmi.{name}") for name in ("answers", "num_samples")}
    if chosen["answers"]:
        return f"none: the answers of {chosen['answers']}"
    stops = list(generation.get("stop_strings") or [])
    samples = chosen["num_samples"] or ASMIConfig.num_samples
    return (
        f"greedy, at most {config.get('max_new_tokens')} tokens, stop strings {stops}, batches of "
        f"{config.get('batch_size', 1)}; samples, where a method needs them: {samples}, "
        f"temperature {generation.get('temperature')}, top-k {generation.get('top_k')}, top-p "
        f"{generation.get('top_p')}; chat template: {'yes' if config.get('instruct') else 'no'}"
    )


def quality_text(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Quality metrics with their arguments; empty: LM-Polygraph's default list."""
    if not metrics:
        return "LM-Polygraph's default metrics"
    texts = []
    for metric in metrics:
        arguments = [*map(str, metric.get("args") or ())]
        arguments += [f"{name}={value}" for name, value in (metric.get("kwargs") or {}).items()]
        texts.append(f"{metric['name']}({', '.join(arguments)})")
    return ", ".join(texts)


def rows_text(config: DictConfig, rows: Sequence[DataRow]) -> str:
    """Source and number of rows and clusters, and how many are left out."""
    data = container(config.get("data") or DictConfig({}))
    source = data.get("source") or container(config)["dataset"]
    source = " ".join(source) if isinstance(source, list) else source
    text = f"{len(rows)} of {source}, split {data.get('split') or config.get('eval_split')}, in "
    text += f"{len({row.cluster for row in rows})} clusters"
    if dropped := dropped_rows(config):
        text += f"; {len(dropped)} left out"
    if data.get("num_shards", 1) > 1:
        text += f"; shard {data['shard']} of {data['num_shards']}, from 0"
    return text


def maps_text(config: DictConfig, sizes: Sizes | None, rows: Sequence[DataRow]) -> str:
    """Memory of the attention maps that greedy decoding keeps for the longest prompt."""
    if not config.get("output_attentions", True):
        return "none kept"
    if sizes is None:
        return "kept for RAUQ; their memory needs the model's sizes"
    settings = window_settings(config)
    window = read_window(settings["model"], settings["instruct"])
    tokens = window.count(max((str(row.input) for row in rows), key=len))
    new = settings["max_new_tokens"]
    pairs = tokens**2 + sum(tokens + step for step in range(1, new))
    dtype = str((settings["model"].get("load_model_args") or {}).get("dtype"))
    size = decimal(sizes.layers * sizes.heads * pairs * BYTES.get(dtype, 4))
    return f"about {size} on the model's device for the longest prompt, {tokens} tokens"
