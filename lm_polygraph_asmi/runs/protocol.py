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
from lm_polygraph_asmi.host.window import SHIPPED, Sizes, read_sizes, read_window
from lm_polygraph_asmi.maths import operating_point
from lm_polygraph_asmi.results.manifest import model_of
from lm_polygraph_asmi.results.paper import BENCHMARKS, SQUAD, paper_dataset, read_published
from lm_polygraph_asmi.runs.preflight import dropped_rows, rows_of
from lm_polygraph_asmi.runs.rows import DataRow, window_settings
from lm_polygraph_asmi.runs.squad import Question, prompt_of

BYTES = {"float16": 2, "bfloat16": 2}
"""Bytes of a number by dtype; of others, 4."""
LISTED = {
    "CoQA": "The following are stories and questions about them. Each story is followed by a "
    "question and answer to a given question.\nStory: <story>\nQuestion: <question>\nAnswer:",
    "BabiQA": "Imagine that you are only able to say a single word. Answer the question given a "
    "context. You must only output the full name of the location the same way it is mentioned in "
    "the text.\nExample:\nContext: <context>\nQuestion: <question>\nAnswer: <answer>\n"
    "Context: <context>\nQuestion: <question>\nAnswer:",
    "TriviaQA": "Question: <question>\nAnswer:<answer>\n" * 5 + "Question: <question>\nAnswer:",
}
"""Prompts of the data sets that hold complete ones, as the paper's appendix prints them."""
SELECTING = ("first", "sample")
"""Entries of the node `data` that take fewer rows than the paper."""


def protocol(config: DictConfig) -> dict[str, str]:
    """Part -> what a run will do; rows that cannot be read yet are described by the reason."""
    node = container(config.get("model") or DictConfig({}))
    sizes, by_table = _sizes(node)
    built = [FactoryEstimator()(e.name, e.get("cfg", {})) for e in config.estimators]
    of_asmi = [estimator for estimator in built if hasattr(estimator, "described")]
    parts = {
        "ASMI": _named(of_asmi),
        "baselines": _named([e for e in built if e not in of_asmi]),
        "masks": masks_text([e.config for e in of_asmi], sizes),
        "model": model_text(node, sizes, by_table),
        "generation": generation_text(config),
        "quality": quality_text(config.get("generation_metrics") or ()),
    }
    try:
        rows = rows_of(config)
        parts["rows"] = rows_text(config, rows)
        parts["attention maps"] = maps_text(config, sizes, rows)
        parts["first prompt"] = str(rows[0].input) if rows else "none"
    except Exception as error:  # named by `check_data`, whatever a library raised
        parts["rows"] = known_rows_text(config, str(error))
        parts["attention maps"] = maps_text(config, None, [])
        parts["first prompt"] = known_prompt_text(config)
    return {name: text for name, text in parts.items() if text}


def _sizes(node: Mapping[str, Any]) -> tuple[Sizes | None, bool]:
    """Sizes of the model, and whether they are of the table of shipped models."""
    try:
        return read_sizes(node), False
    except (OSError, ValueError, HFValidationError):  # not here
        sizes = SHIPPED.get(str(node.get("path")))
        return sizes, sizes is not None


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


def model_text(node: Mapping[str, Any], sizes: Sizes | None, by_table: bool = False) -> str:
    """Name and revision of the model in a config's node `model`, and its sizes.

    `by_table`: not the model's own, but those of `host.window.SHIPPED`.
    """
    about, arguments = model_of(node), node.get("load_model_args") or {}
    chosen = arguments.get("revision")
    revision = about["revision"]
    if revision == "unknown":
        revision = f"{chosen or 'newest'}, not downloaded yet"
    text = f"{about['path']}, revision {revision}"
    if arguments.get("dtype"):
        text += f", {arguments['dtype']}"
    if sizes is not None:
        text += f"; {sizes.layers} layers, {sizes.heads} heads"
        about_table = " (by the table of shipped models, not read from the model)"
        text += about_table if by_table else f", context window {sizes.window}"
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


def known_rows_text(config: DictConfig, reason: str) -> str:
    """What the paper says of rows that cannot be read: their number and clusters."""
    data = container(config.get("data") or DictConfig({}))
    text, dataset = f"not read ({reason})", paper_dataset(data)
    if not dataset or data.get("split") != BENCHMARKS[dataset].recorded["split"]:
        return text
    benchmark_rows = BENCHMARKS[dataset].rows
    source = data["source"] if isinstance(data["source"], str) else " ".join(data["source"])
    chosen = [f"data.{n}={data[n]}" for n in SELECTING if data.get(n) is not None]
    if data.get("size") not in (None, benchmark_rows):
        chosen.insert(0, f"data.size={data['size']}")
    rows = f"about {benchmark_rows}"
    if chosen:  # the paper does not tell their clusters
        rows = f"{', '.join(chosen)} of {rows}"
    else:
        questions = dataset.removesuffix(" without passage")
        (clusters,) = (
            int(number.value) for number in read_published()
            if (number.dataset, number.quantity) == (questions, "clusters")
        )  # fmt: skip
        rows += f" in {clusters} clusters"
    text += f". By the paper: {rows} of {source}, split {data.get('split')}"
    return text + _shard_text(data)


def known_prompt_text(config: DictConfig) -> str:
    """The prompt of rows that cannot be read, with placeholders where its form is known."""
    data = container(config.get("data") or DictConfig({}))
    source = data.get("source")
    if source == SQUAD["source"]:
        example = Question("", "<passage>", "<question>", None)
        return prompt_of(data.get("prompt_style", "paper"), bool(data.get("closed_book")))(example)
    if listed := LISTED.get(paper_dataset(data)):
        return f"(not read from the data; as the paper lists it)\n{listed}"
    name = source if isinstance(source, str) else " ".join(source or ())
    return f"not read: complete in {name or 'the data'}"


def rows_text(config: DictConfig, rows: Sequence[DataRow]) -> str:
    """Source and number of rows and clusters, and how many are left out."""
    data = container(config.get("data") or DictConfig({}))
    source = data.get("source") or config.dataset
    source = source if isinstance(source, str) else " ".join(source)
    text = f"{len(rows)} of {source}, split {data.get('split') or config.get('eval_split')}, in "
    text += f"{len({row.cluster for row in rows})} clusters"
    if dropped := dropped_rows(config):
        text += f"; {len(dropped)} left out"
    return text + _shard_text(data)


def _shard_text(data: Mapping[str, Any]) -> str:
    if data.get("num_shards", 1) <= 1:
        return ""
    return f"; shard {data['shard']} of {data['num_shards']}, from 0"


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
