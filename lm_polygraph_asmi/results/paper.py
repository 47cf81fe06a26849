"""The paper's published numbers, and the protocol a run must follow to be comparable."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from omegaconf import OmegaConf

from lm_polygraph_asmi.config import METHODS, ASMIConfig
from lm_polygraph_asmi.results.run_groups import RunGroup, once, same_depth

PAPER = Path(__file__).parents[1] / "data" / "paper.csv"
"""Numbers that `scripts/paper_numbers.py` of commit 0ad19aa read from the paper's LaTeX. The places
where the report has them were added later."""


def read_published() -> pd.DataFrame:
    """The paper's numbers in its order, with models, datasets and quantities as printed.

    `label` is the LaTeX label of the table, figure or section. `method` is the report's name of the
    method. `n` is the number of rows the number is about, or of tokens for a coverage. `where` is
    model and dataset. `table`, `column` and `row` say where the report has the number; `row` names
    other columns and how their values begin.
    """
    numbers = pd.read_csv(PAPER, keep_default_na=False, na_values={"depth": "", "n": ""})
    named = zip(numbers["model"], numbers["dataset"], strict=True)
    return numbers.assign(where=[", ".join(filter(None, n)) or "all settings" for n in named])


MODELS = {
    "Qwen3-4B": "Qwen3-4B-Base", "Qwen3-8B": "Qwen3-8B-Base", "Llama-2-7B": "Llama-2-7b-hf",
    "Mistral-7B": "Mistral-7B-v0.1",
}  # fmt: skip
"""Model name as printed -> last part of its path, on the hub or in a folder."""


class Benchmark(NamedTuple):
    """A dataset of the paper: its number of rows, and what a manifest records about it."""

    rows: int
    recorded: Mapping[str, Any]
    max_new_tokens: int = 20


SQUAD = {"source": "rajpurkar/squad", "split": "validation", "prompt_style": "paper"}
BENCHMARKS = {
    "CoQA": Benchmark(8000, {"source": ["LM-Polygraph/coqa", "continuation"], "split": "test"}),
    "SQuAD": Benchmark(5000, {**SQUAD, "closed_book": False}),
    "BabiQA": Benchmark(1000, {"source": "LM-Polygraph/babi_qa", "split": "test"}, 3),
    "TriviaQA": Benchmark(
        5000, {"source": ["LM-Polygraph/triviaqa", "continuation"], "split": "test"}
    ),
    "SQuAD without passage": Benchmark(5000, {**SQUAD, "closed_book": True}),
}
GENERATION = {
    "do_sample": False, "num_beams": 1, "temperature": 0.5, "stop_strings": ["\n"],
}  # fmt: skip
"""Entries of `generation_params` in the paper. The temperature is that of the ten samples."""
PROTOCOL = {
    **{f"generation_params.{name}": value for name, value in GENERATION.items()},
    "instruct": False, "n_shot": 0, "asmi.num_samples": 10,
    "model.load_model_args.quantization_config": None,
}  # fmt: skip
"""Entry of a run's config -> its value in the paper's protocol."""
MASKS, MASK_RATE = 40, 0.15
LEFT_OPEN = ("closing_token", "gate_token", "seeded_by")
"""Settings of a score that the paper does not report. Any value of them is comparable."""


@once
def paper_setting(group: RunGroup) -> tuple[str, str]:
    """The paper's names of a setting's model and dataset; empty if the paper does not use it."""
    folder = Path(group.run.recorded("model").get("path") or "").name.lower()
    models = {last.lower(): name for name, last in MODELS.items()}
    data = group.run.recorded("dataset")
    alike = (
        name for name, benchmark in BENCHMARKS.items()
        if data.get("source") == benchmark.recorded["source"]
        and bool(data.get("closed_book")) == bool(benchmark.recorded.get("closed_book"))
    )  # fmt: skip
    return models.get(folder, ""), next(alike, "")


@once
def departures(group: RunGroup) -> tuple[str, ...]:
    """Names of what differs from the paper's protocol, except for the rows and ASMI's settings.

    Empty if the setting is comparable. What the manifest does not record counts as a difference.
    The paper reports neither revisions nor seeds of masks, samples and rows, so these are not
    compared.
    """
    setting = paper_setting(group)
    if not all(setting):
        return tuple(n for n, known in zip(("model", "data"), setting, strict=True) if not known)
    benchmark = BENCHMARKS[setting[1]]
    data = {f"data.{name}": value for name, value in benchmark.recorded.items()}
    expected = PROTOCOL | data | {"max_new_tokens": benchmark.max_new_tokens}
    config = OmegaConf.create(group.run.recorded("config"))
    config.data = group.run.recorded("dataset")
    reasons = [name for name, paper in expected.items() if OmegaConf.select(config, name) != paper]
    return (*reasons, *(["quality"] if group.metric != "AlignScore" else []))


@once
def paper_method(group: RunGroup, symbol: str, depth: float) -> str | None:
    """Name of a variant's score that has the paper's settings; None if there is none.

    If several scores differ only in `LEFT_OPEN`, the one nearest to the defaults is taken.
    """
    method = next(name for name, known in METHODS.items() if known == symbol)
    default = ASMIConfig(method=method, depth=depth)
    free = ("num_masks", "mask_rate", "seed", *LEFT_OPEN)
    for name, config in sorted(
        group.methods.items(), key=lambda method: len(method[1].describe(*LEFT_OPEN))
    ):
        used = [
            (in_use["num_masks"], in_use["mask_rate"])
            for run in group.runs if name in run.scores
            for in_use in run.settings() if same_depth(in_use["depth"], depth)
        ]  # fmt: skip
        if config.same_but(default, *free) and set(used) == {(MASKS, MASK_RATE)}:
            return name
    return None
