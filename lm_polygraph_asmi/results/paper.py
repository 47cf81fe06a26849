"""The paper's published numbers, and the protocol that a run must have to be compared with them."""

import csv
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lm_polygraph_asmi.analysis.clusters import Interval
from lm_polygraph_asmi.analysis.reproduction import standard_error
from lm_polygraph_asmi.config import METHODS, ASMIConfig
from lm_polygraph_asmi.results.run_groups import RunGroup, same_depth, short_path

PAPER = Path(__file__).parents[1] / "data" / "paper.csv"
"""Read from the paper's LaTeX by `scripts/paper_numbers.py` of commit 0ad19aa."""
ITEMS = (
    "datasets", "benchmark", "head_to_head", "depth_selection", "error_separation",
    "distinct_signal", "ensemble_mean", "matched_flags", "confident_fragile", "payoff", "aurc",
    "boundary", "larger_k", "top_k_coverage", "stability", "mechanism", "head_coupling",
    "causal_probe", "cost",
)  # fmt: skip
"""Items of the report that the numbers belong to."""


class Margin(NamedTuple):
    """Largest difference that counts as agreement, fixed before any run was compared, and why.

    In the unit of the number, or if `relative` a share of the published value.
    """

    size: float
    why: str
    relative: bool = False


MARGINS = {
    "PRR": Margin(
        0.10, "half of .22, the median standard deviation between the methods of a column; the "
        "paper's own errors of .01 to .07 allow no finer margin everywhere",
    ),
    "PRR difference": Margin(
        0.05, "the kernel's lift on CoQA, the smallest effect the paper interprets, is .04 to .06"
    ),
    "AUROC": Margin(0.05, "half of the largest distance of a residual AUROC from chance"),
    "AUROC difference": Margin(0.01, "half of the largest increment"),
    "quality": Margin(0.05, "less than the .07 between the two closest data sets"),
    "rate": Margin(0.05, "half of what the filter by u_sem gains on BabiQA"),
    "rate difference": Margin(0.10, "half of the gap on BabiQA"),
    "percent": Margin(10, "less than the 13 points between the flips of high and of low MI"),
    "coverage": Margin(0.02, "a tenth of the distance between TriviaQA and the other data sets"),
    "correlation": Margin(0.05, "half of the smallest coupling, so that its sign is known"),
    "nats": Margin(0.005, "the screen's threshold, between Llama-2-7B and the others"),
    "heads": Margin(1.0, "noise alone has about ten effective heads, so agreement means little"),
    "clusters": Margin(0.02, "another random sample of 5,000 rows has 1 % more or less", True),
    "tokens": Margin(1.5, "the paper does not tell whether the closing token counts; .5 rounding"),
    "tokens of the prompt": Margin(0.05, "an instruction more or less has more tokens", True),
}  # fmt: skip
"""By unit. Numbers of other units are shown, never judged."""
SHOWN = ("seconds", "GB", "p")
"""Units that are not judged."""


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
        quantity: what it is.
        value: as printed.
        error: standard error, largest that rounds to the printed one; None if none is printed.
        rounding: half of the last printed digit of the value.
        unit: a key of `MARGINS`, or one of `SHOWN`.
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
    error: float | None
    rounding: float
    unit: str

    @property
    def where(self) -> str:
        return ", ".join(filter(None, (self.model, self.dataset))) or "all settings"

    @property
    def rows(self) -> int | None:
        """Rows it is about, None if the paper does not tell."""
        return None if self.unit == "coverage" else self.n

    @property
    def margin(self) -> float | None:
        """In the unit of the value; None if it is shown and not judged."""
        unit = "tokens of the prompt" if self.quantity.endswith("of the prompt") else self.unit
        margin = MARGINS.get(unit)
        return margin and margin.size * (abs(self.value) if margin.relative else 1)


COLUMNS = ("item", "label", "model", "dataset", "method", "depth", "n", "quantity", "value",
           "error", "low", "high", "unit")  # fmt: skip
KEY = ("label", "model", "dataset", "method", "depth", "quantity")


def read_published(path: str | Path = PAPER) -> list[Published]:
    """The numbers of a file, in its order; a ValueError names file and line."""
    with Path(path).open(encoding="utf-8", newline="") as opened:
        reader = csv.DictReader(opened)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(
                f"{path} has the columns {', '.join(reader.fieldnames or ['(none)'])}: expected "
                f"{', '.join(COLUMNS)}"
            )
        published, lines = [], dict[tuple[str, ...], int]()
        for line, row in enumerate(reader, start=2):
            key = tuple(row[name] for name in KEY)
            if key in lines:
                raise ValueError(
                    f"{path}, line {line}: the same number as in line {lines[key]} "
                    f"({', '.join(filter(None, key))})"
                )
            lines[key] = line
            try:
                published.append(_published(row))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {line}: {error}") from error
    return published


def _published(row: Mapping[str, str]) -> Published:
    known_units = (*MARGINS, *SHOWN)
    if row["item"] not in ITEMS:
        raise ValueError(f"unknown item {row['item']!r}: expected one of {', '.join(ITEMS)}")
    if row["unit"] not in known_units:
        raise ValueError(f"unknown unit {row['unit']!r}: expected one of {', '.join(known_units)}")
    numbers = {name: _number(name, row[name]) for name in ("value", "error", "low", "high", "n",
                                                           "depth")}  # fmt: skip
    value, error, low, high = (numbers[name] for name in ("value", "error", "low", "high"))
    if value is None:
        raise ValueError("value is empty: expected a number")
    ends = [end for end in (low, high) if end is not None]
    if len(ends) == 1 or (ends and error is not None):
        raise ValueError("expected a standard error, or both ends of an interval, or neither")
    if low is not None and high is not None:
        if not low <= value <= high:
            raise ValueError(f"value {value} is outside its interval [{low}, {high}]")
        widest = high - low + 2 * _rounding(row["low"])
        error = standard_error(Interval(value, 0.0, widest))
    elif error is not None:
        error += _rounding(row["error"])
    return Published(
        **{name: row[name] for name in ("item", "label", "model", "dataset", "method")},
        depth=numbers["depth"], n=None if numbers["n"] is None else int(numbers["n"]),
        quantity=row["quantity"], value=value, error=error, rounding=_rounding(row["value"]),
        unit=row["unit"],
    )  # fmt: skip


def _number(name: str, text: str) -> float | None:
    try:
        number = float(text) if text else None
    except ValueError:
        raise ValueError(f"{name} is {text!r}: expected a number") from None
    if number is not None and not math.isfinite(number):
        raise ValueError(f"{name} is {text}: expected a finite number")
    return number


def _rounding(text: str) -> float:
    """Half of the last digit of a printed number."""
    return 0.5 * 10.0 ** -len(text.partition(".")[2])


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
ABOUT_ALL = 0.02
"""Share of the paper's rows by which a run may have more or fewer ("about 8K" on CoQA)."""


class NotComparable(ValueError):
    """A run has other settings than the paper; the message names them."""


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
    """Whether a run has the paper's number of rows, up to rounding and rows left out."""
    return abs(rows - published) <= ABOUT_ALL * published


def paper_method(
    group: RunGroup, symbol: str, depth: float, top_k: int = ASMIConfig.top_k
) -> str | None:
    """Name of a variant's score with the paper's settings; None if the setting has none.

    Of several that differ in what the paper leaves open, the one nearest to the defaults.
    NotComparable if there are scores of that variant and depth, but with other settings.
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
        raise NotComparable(f"other settings than the paper's: {'; '.join(other)}")
    return None


def open_choices(group: RunGroup) -> str:
    """What a setting's comparable scores have where the paper leaves a choice; empty for none."""
    scores = dict.fromkeys((config.symbol, config.depth) for config in group.methods.values())
    choices: dict[str, None] = {}
    for symbol, depth in scores:
        with suppress(NotComparable):
            if method := paper_method(group, symbol, depth):
                config = group.methods[method]
                names = {f.name for f in config.used(config.method)}.intersection(LEFT_OPEN)
                choices |= {f"{name}={getattr(config, name)}": None for name in sorted(names)}
    return ", ".join(choices)
