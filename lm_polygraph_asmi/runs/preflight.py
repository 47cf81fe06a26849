"""Checks of a run that need no model: what would stop it, or bias its comparison, hours later."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

from lm_polygraph.estimators import Estimator
from lm_polygraph.utils.factory_estimator import FactoryEstimator
from omegaconf import DictConfig, OmegaConf

from lm_polygraph_asmi.resolvers import container
from lm_polygraph_asmi.runs.rows import read_rows, rows_folder, subsample


class Finding(NamedTuple):
    """Something that is wrong with a run, and what to do about it.

    Attributes:
        text: in plain words.
        fatal: whether the run cannot give its results; otherwise it can, with a reservation.
    """

    text: str
    fatal: bool


def check_config(config: DictConfig) -> Iterator[Finding]:
    """Findings about the settings of a run."""
    estimators: list[Estimator] = []
    for entry in config.estimators:
        try:
            estimators.append(FactoryEstimator()(entry.name, entry.get("cfg", {})))
        except Exception as error:  # an estimator's constructor can raise anything
            yield Finding(f"the estimator {entry.name} cannot be built: {error}", fatal=True)
    for name, times in Counter(map(str, estimators)).items():
        if times > 1:
            yield Finding(
                f"{times} estimators are called {name!r}, and LM-Polygraph keeps scores by name: "
                "give each other settings, or leave all but one out",
                fatal=True,
            )
    yield from _check_attention(config, estimators)
    yield from _check_generation(config)
    if config.get("ignore_exceptions"):
        yield Finding(
            "ignore_exceptions is true: an estimator that fails on one batch loses all its scores",
            fatal=False,
        )


def _check_attention(config: DictConfig, estimators: list[Estimator]) -> Iterator[Finding]:
    wanted = [str(e) for e in estimators if "attention_all" in e.stats_dependencies]
    attention = OmegaConf.select(config, "model.load_model_args.attn_implementation")
    reads_maps = config.get("output_attentions", True)
    if wanted and not reads_maps:
        yield Finding(
            f"{', '.join(wanted)} read attention maps, but output_attentions is false: set it to "
            "true, or leave them out",
            fatal=True,
        )
    if wanted and OmegaConf.select(config, "asmi.answers") is not None:
        yield Finding(
            f"{', '.join(wanted)} read attention maps of generation, which the saved answers of "
            "asmi.answers do not have: leave them out",
            fatal=True,
        )
    if reads_maps and attention not in (None, "eager"):
        yield Finding(
            f"output_attentions is true, but the model is loaded with {attention} attention, which "
            "makes no attention maps: set model.load_model_args.attn_implementation=eager (ASMI's "
            "own passes follow asmi.calculator.attention), or output_attentions=false",
            fatal=True,
        )


def _check_generation(config: DictConfig) -> Iterator[Finding]:
    generation = config.get("generation_params") or {}
    if generation.get("do_sample"):
        yield Finding(
            "generation_params.do_sample is true: LM-Polygraph would sample the answers it calls "
            "greedy. Set it to false; sampled answers are drawn all the same",
            fatal=True,
        )
    elif generation.get("do_sample") is None:
        yield Finding(
            "generation_params.do_sample is not set: where a model ships do_sample: true, "
            "LM-Polygraph samples the answers it calls greedy. Set it to false",
            fatal=False,
        )
    if config.get("batch_size", 1) > 1 and generation.get("stop_strings"):
        yield Finding(
            "batch_size is above 1 with stop strings: LM-Polygraph takes the padding behind "
            "answers that end early for part of them, in the scores of its own methods and in the "
            "quality metric (ASMI cuts it off). Use batch_size: 1",
            fatal=False,
        )


def check_data(config: DictConfig) -> Iterator[Finding]:
    """Findings about the rows of a run; reads them, from the hub if need be."""
    # As written: resolving it would build the rows, outside the reach of the messages below.
    dataset = cast(dict[str, Any], OmegaConf.to_container(config))["dataset"]
    try:
        if isinstance(dataset, str) and "asmi_rows" in dataset:
            rows = read_rows(str(rows_folder(container(config.data))), "test", "input", "output")
        elif isinstance(dataset, str) and Path(dataset).is_file():
            yield Finding(
                f"{dataset} is read by pandas, which turns the answer 'None' into NaN and '007' "
                "into 7: save the rows as a `datasets` folder instead",
                fatal=False,
            )
            return
        else:
            rows = read_rows(
                dataset, config.eval_split, config.text_column, config.get("label_column")
            )
    except (OSError, ValueError) as error:
        yield Finding(str(error), fatal=True)
        return
    size = config.get("subsample_eval_dataset", -1)
    if size != -1:
        rows = subsample(rows, int(size * len(rows)) if size < 1 else size, seed=1)
    if len(rows) < 2:
        yield Finding(
            "the run has a single row: LM-Polygraph's calibration metric (IsotonicPCC) cannot be "
            "fitted to it and ends the run with an error. Take at least two (data.limit, "
            "data.num_shards, subsample_eval_dataset)",
            fatal=True,
        )
