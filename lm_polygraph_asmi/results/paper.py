"""The paper's published numbers, and the protocol that a run must have to be compared with them."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lm_polygraph_asmi.config import METHODS, ASMIConfig
from lm_polygraph_asmi.results.run_groups import RunGroup, Unavailable, same_depth, short_path

PAPER = Path(__file__).parents[1] / "data" / "paper.csv"
"""Read from the paper's LaTeX by `scripts/paper_numbers.py` of commit 0ad19aa; then its places."""


@dataclass(frozen=True)
class Published:
    """A number of the paper.

    Attributes:
        item: of the report.
        label: LaTeX label of the table, figure or section.
        model, dataset: as printed; empty if the paper names none.
        method: as the report names it, without depth; empty if the number is of no method.
        depth: of ASMI's variants, else None.
        n: as printed: rows it is about, tokens for a coverage; None if the paper does not tell.
        quantity, value, unit: what it is, as printed, such as "PRR" or "seconds".
        table, column, row: where the report has it; `row` names other columns and the beginning of
            what they hold, such as "signal=u_sem, mean; controls=MSP, H". Empty if it has not.
    """

    item: str
    label: str
    model: str
    dataset: str
    method: str
    depth: float | None
    n: int | None
    quantity: str
    value: float
    unit: str
    table: str
    column: str
    row: str

    @property
    def where(self) -> str:
        return ", ".join(filter(None, (self.model, self.dataset))) or "all settings"


def read_published() -> list[Published]:
    """The numbers of the paper, in its order."""
    numbers = ("depth", "n", "value", "error", "low", "high")
    with PAPER.open(encoding="utf-8", newline="") as opened:
        return [
            Published(
                **{name: text for name, text in row.items() if name not in numbers},
                depth=float(row["depth"]) if row["depth"] else None,
                n=int(row["n"]) if row["n"] else None,
                value=float(row["value"]),
            )
            for row in csv.DictReader(opened)
        ]


MODELS = {
    "Qwen3-4B": "Qwen3-4B-Base", "Qwen3-8B": "Qwen3-8B-Base", "Llama-2-7B": "Llama-2-7b-hf",
    "Mistral-7B": "Mistral-7B-v0.1",
}  # fmt: skip
"""Backbone as printed -> last part of its path, on the hub or in a folder."""


class Benchmark(NamedTuple):
    """A data set of the paper: its number of rows, and what a manifest records of it."""

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
"""Of `generation_params`; the temperature is that of the ten samples."""
SAMPLES, MASKS, MASK_RATE = 10, 40, 0.15
LEFT_OPEN = ("closing_token", "gate_token", "seeded_by")
"""Settings of a score that the paper does not give, so that any value is comparable."""


class Setting(NamedTuple):
    """What the paper calls a run's model and data; empty where it has none of them."""

    model: str
    dataset: str


def paper_dataset(data: Mapping[str, Any]) -> str:
    """The paper's name of a run's data, by a config's node `data`; empty for others."""
    alike = (
        name for name, benchmark in BENCHMARKS.items()
        if data.get("source") == benchmark.recorded["source"]
        and bool(data.get("closed_book")) == bool(benchmark.recorded.get("closed_book"))
    )  # fmt: skip
    return next(alike, "")


def paper_setting(group: RunGroup) -> Setting:
    """The paper's names of a setting's model and data."""
    folder = Path(group.run.recorded("model").get("path") or "").name.lower()
    models = {last.lower(): name for name, last in MODELS.items()}
    return Setting(models.get(folder, ""), paper_dataset(group.run.recorded("dataset")))


def departures(group: RunGroup) -> list[str]:
    """In what a setting departs from the paper's protocol, apart from its rows and ASMI's settings.

    Empty if it can be compared. What the manifest lacks counts as a departure. The paper gives
    neither revisions nor seeds of masks, samples and rows, so these are not compared.
    """
    setting = paper_setting(group)
    model, data = group.run.recorded("model"), group.run.recorded("dataset")
    config = group.run.recorded("config")
    reasons = []
    if not group.run.manifest:
        return ["no manifest records what was run"]
    if not setting.model:
        reasons.append(f"model {short_path(model.get('path')) or 'not recorded'}")
    if not setting.dataset:
        source = data.get("source")
        shown = short_path(source) if isinstance(source, str) else source
        return [*reasons, f"data {shown or 'not recorded'}"]
    benchmark = BENCHMARKS[setting.dataset]
    generated = config.get("generation_params") or {}
    expected = {
        **{f"data.{name}": (data.get(name), value) for name, value in benchmark.recorded.items()},
        **{name: (generated.get(name), value) for name, value in GENERATION.items()},
        "max_new_tokens": (config.get("max_new_tokens"), benchmark.max_new_tokens),
        "instruct": (config.get("instruct"), False),
        "n_shot": (config.get("n_shot"), 0),
        "asmi.num_samples": ((config.get("asmi") or {}).get("num_samples"), SAMPLES),
    }
    reasons += [
        f"{name} {'not recorded' if value is None else repr(value)}, not {paper!r}"
        for name, (value, paper) in expected.items()
        if value != paper
    ]
    if "quantization_config" in (config.get("model") or {}).get("load_model_args", {}):
        reasons.append("a quantised model")
    if group.metric != "AlignScore":
        reasons.append(f"quality {group.metric}, not AlignScore")
    return reasons


def about(rows: int, published: int) -> bool:
    """Whether a run has the paper's rows, up to rounding ("8K" on CoQA) and rows left out."""
    return abs(rows - published) <= 0.02 * published


def paper_method(
    group: RunGroup, symbol: str, depth: float, top_k: int = ASMIConfig.top_k
) -> str | None:
    """Name of a variant's score with the paper's settings; None if the setting has none.

    Of several that differ in what the paper leaves open, the one nearest to the defaults.
    Unavailable if there are scores of that variant and depth, but with other settings.
    """
    method = next(name for name, known in METHODS.items() if known == symbol)
    default = ASMIConfig(method=method, depth=depth, top_k=top_k)
    free = ("num_masks", "mask_rate", "seed", *LEFT_OPEN)
    other: list[str] = []
    methods = sorted(group.methods.items(), key=lambda method: len(method[1].describe(*LEFT_OPEN)))
    for name, config in methods:
        if config.symbol != symbol or config.top_k != top_k or not same_depth(config.depth, depth):
            continue
        masks = {
            (used["num_masks"], used["mask_rate"])
            for run in group.runs if name in run.scores
            for used in run.settings() if same_depth(used["depth"], depth)
        }  # fmt: skip
        if config.same_but(default, *free) and masks == {(MASKS, MASK_RATE)}:
            return name
        other.append(f"{name} with (S, p) = {', '.join(map(str, sorted(masks))) or 'not recorded'}")
    if other:
        raise Unavailable(f"other settings than the paper's: {'; '.join(other)}")
    return None
