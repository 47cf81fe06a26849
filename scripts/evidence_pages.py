"""Make the tables and figures of the pages of evidence anew, from the small files beside them.

    python scripts/evidence_pages.py          # writes them into docs/*.md and docs/evidence/*.md
    python scripts/evidence_pages.py --check  # changes nothing, says what would change

A table stands between `<!-- table NAME -->` and `<!-- end -->`; all else on a page is written by
hand. `<!-- verdict -->` is a place for that: a page whose verdict is empty is refused. The files,
docs/evidence/MODEL/CELL.RUN.parquet, are made by scripts/evidence.sh when a cell is complete;
single shards are never read. `--check --quick` computes nothing: it compares what the pages say
they were made from with the files.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from matplotlib import rc_context
from matplotlib.figure import Figure
from PIL import Image

from lm_polygraph_asmi.analysis import (
    Interval,
    adds_information,
    auroc,
    auroc_by_judge,
    confident_but_fragile,
    error_separation,
    holm,
    prr_draws,
    prr_intervals,
    rank_correlation,
    rank_signals,
    stacked_gain,
    strata,
)
from lm_polygraph_asmi.analysis.clusters import percentile_interval, two_sided
from lm_polygraph_asmi.analysis.judge import THRESHOLDS
from lm_polygraph_asmi.analysis.prr import normalised_prr
from lm_polygraph_asmi.report import figures
from lm_polygraph_asmi.saved.aggregation import aggregate
from lm_polygraph_asmi.validation import AGGREGATIONS

DOCS = Path(__file__).parents[1] / "docs"
RESAMPLES, REFITS = 2000, 500
DEPTHS = (60, 70, 80, 90)


class Model(NamedTuple):
    """Name in tables, and size in billions of parameters, for the axis of a figure."""

    name: str
    billions: float


MODELS = {
    "smollm2": Model("SmolLM2 0.13B", 0.135),
    "gemma": Model("Gemma-3 0.27B", 0.268),
    "qwen05": Model("Qwen2.5-Coder 0.5B", 0.494),
    "qwen15": Model("Qwen2.5-Coder 1.5B", 1.54),
    "qwen3_4b_base": Model("Qwen3-4B-Base", 4.02),
    "llama2_7b": Model("Llama-2-7B", 6.74),
    "mistral_7b": Model("Mistral-7B", 7.24),
    "qwen3_8b_base": Model("Qwen3-8B-Base", 8.19),
}
CELLS = {
    "open": "XQuAD, bare prompt",
    "open-worked": "XQuAD, worked questions",
    "open-chat": "XQuAD, chat prompt",
    "closed": "closed book, bare prompt",
    "closed-worked": "closed book, worked questions",
    "closed-chat": "closed book, chat prompt",
    "babi": "BabiQA",
    "babi-chat": "BabiQA, chat prompt",
    "coqa": "CoQA",
    "squad": "SQuAD",
    "babiqa": "BabiQA, the paper's",
    "triviaqa": "TriviaQA",
}
OWN_ANSWERS = ("sources", "benchmark")
"""Runs that a cell is judged by: of scripts/evidence.sh, and of its --paper."""
SETTINGS = {
    "sources": "response, derived p and S",
    "benchmark": "all, derived p and S",
    "whole": "all, derived p and S",
    "paper": "response, p = .15, S = 40",
    "balanced": "response, balanced masks",
    "depths": "response, derived p and S",
}
RUNS = (*SETTINGS, "baselines", "sampled", "copied")
JUDGES = {
    "stands": ("ReferenceInAnswer", "the reference stands in the answer"),
    "rouge": ("quality Rouge_rougeL", "ROUGE-L"),
    "align": ("quality AlignScore", "AlignScore"),
}
FIRST = "first"
WAYS = (*AGGREGATIONS, FIRST)
NOTHING = "Not measured yet on a complete cell."


@dataclass(frozen=True, eq=False)
class Evidence:
    """One model on one data set: a row per answer, with statistics of its tokens.

    Attributes:
        model, cell, run: as its file is named.
        answers: its rows.
        asked: rows that were to be answered; None where that is not known.
    """

    model: str
    cell: str
    run: str
    answers: pd.DataFrame
    asked: int | None = None

    @property
    def label(self) -> str:
        return f"{MODELS[self.model].name}, {CELLS[self.cell]}"

    @property
    def size(self) -> str:
        """Answers and clusters; where hours did not allow all rows, of how many."""
        n = len(self.answers)
        reached = f"{n}" if self.asked in (None, n) else f"{n} of {self.asked}"
        return f"{reached} / {len(set(self.clusters))}"

    @property
    def clusters(self) -> list[str]:
        return list(self.answers["cluster"])

    def has(self, judge: str) -> bool:
        return JUDGES[judge][0] in self.answers

    def quality(self, judge: str) -> np.ndarray:
        return self.answers[JUDGES[judge][0]].to_numpy(dtype=float)

    def wrong(self, judge: str) -> np.ndarray:
        return self.quality(judge) < 0.5

    def among(self, chosen: np.ndarray) -> "Evidence":
        """The same for some of the rows."""
        kept = self.answers[chosen].reset_index(drop=True)
        return Evidence(self.model, self.cell, self.run, kept)

    @cached_property
    def length(self) -> np.ndarray:
        return self.answers["asmi_entropy"].map(len).to_numpy()

    @property
    def empty(self) -> np.ndarray:
        return self.answers["words"].to_numpy() == 0

    def column(self, name: str) -> list[np.ndarray]:
        return [np.asarray(own, dtype=float) for own in self.answers[name]]

    def baseline(self, name: str) -> np.ndarray:
        """The host's score, else the same of ASMI's own unmasked pass."""
        if f"score {name}" in self.answers:
            return self.answers[f"score {name}"].to_numpy(dtype=float)
        of_tokens, way = {
            "MaximumSequenceProbability": ("surprisal", "sum"),
            "Perplexity": ("surprisal", "mean"),
            "MeanTokenEntropy": ("entropy", "mean"),
        }[name]
        return self.score(of_tokens, aggregation=way)

    def tokens(self, method: str, source: str = "all", depth: int = 60) -> list[np.ndarray]:
        """Per-token scores in nats; higher = more uncertain.

        Of "ASMI", "Sem-ASMI", or, of the unmasked model, "surprisal" or "entropy".
        """
        if method == "surprisal":
            return [-own for own in self.column("asmi_log_likelihood")]
        if method == "entropy":
            return self.column("asmi_entropy")
        ending = f"_d{depth}" if source == "all" else f"_d{depth}_{source}"
        scores = self.column(f"asmi_mi{ending}")
        if method == "Sem-ASMI":
            agreements = self.column(f"asmi_agreement{ending}")
            scores = [own * (1 - a) for own, a in zip(scores, agreements, strict=True)]
        return scores

    def score(
        self, method: str, source: str = "all", aggregation: str = "mean", depth: int = 60
    ) -> np.ndarray:
        tokens = self.tokens(method, source, depth)
        if aggregation == FIRST:
            return np.array([own[0] for own in tokens])
        return np.array([aggregate(own, aggregation) for own in tokens])

    @cached_property
    def signals(self) -> dict[str, np.ndarray]:
        """What is compared throughout."""
        return {
            "MSP": self.baseline("MaximumSequenceProbability"),
            "Perplexity": self.baseline("Perplexity"),
            "ASMI": self.score("ASMI"),
            "Sem-ASMI": self.score("Sem-ASMI"),
            "Sem-ASMI, sum": self.score("Sem-ASMI", aggregation="sum"),
        }

    @property
    def controls(self) -> np.ndarray:
        """MSP, mean token entropy and length: what is free."""
        free = [self.baseline("MaximumSequenceProbability"), self.baseline("MeanTokenEntropy")]
        return np.column_stack([*free, self.length])


def files_of(folder: Path) -> list[tuple[str, str, str, Path]]:
    """(model, cell, run, file) of what is complete, in the order of these."""
    named = [
        (m, c, r, folder / m / f"{c}.{r}.parquet") for m in MODELS for c in CELLS for r in RUNS
    ]
    return [one for one in named if one[-1].exists()]


def load(folder: Path) -> list[Evidence]:
    """All complete runs of cells.

    Raises:
        ValueError: a file of the same form with a name that no table would show.
    """
    found = files_of(folder)
    unknown = sorted(set(folder.glob("*/*.parquet")) - {file for *_, file in found})
    if unknown:
        raise ValueError(
            f"{unknown[0]} is named as no model, cell and run that this script knows: see MODELS, "
            "CELLS and RUNS"
        )
    cells = []
    for model, cell, run, file in found:
        table = pq.read_table(file)
        about = json.loads((table.schema.metadata or {}).get(b"run", b"{}"))
        asked = about.get("data", {}).get("limit")
        answers = table.to_pandas()
        beside = file.with_name(f"{cell}.copied.parquet")
        if run == "sources" and "copied" not in answers and beside.exists():
            answers["copied"] = copied_from(beside, answers)
        cells.append(Evidence(model, cell, run, answers, asked))
    return cells


def copied_from(file: Path, answers: pd.DataFrame) -> list[np.ndarray]:
    """Which tokens of these answers stand in the passage, from a run that made them again.

    Raises:
        ValueError: it made others, or of other questions.
    """
    again = pq.read_table(file).to_pandas()
    same = again["id"].equals(answers["id"]) and all(
        len(new) == len(old) and np.allclose(new, old, atol=1e-3)
        for new, old in zip(
            again["asmi_log_likelihood"], answers["asmi_log_likelihood"], strict=True
        )
    )
    if not same:
        raise ValueError(f"{file} holds other answers than the run beside it")
    return list(again["copied"])


def digest(folder: Path) -> str:
    """What tells the files from others."""
    sums = [hashlib.sha256(file.read_bytes()).hexdigest() for *_, file in files_of(folder)]
    return hashlib.sha256("".join(sums).encode()).hexdigest()[:16]


def judged(cells: Iterable[Evidence], judge: str) -> list[Evidence]:
    return [e for e in cells if e.run in OWN_ANSWERS and e.has(judge)]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    body = [f"| {' | '.join(row)} |" for row in rows]
    if not body:
        return NOTHING
    return "\n".join(
        [f"| {' | '.join(columns)} |", f"| {' | '.join(['---'] * len(columns))} |", *body]
    )


def minus(text: str) -> str:
    """With the sign that is set as wide as a plus."""
    return text.replace("-", "−")


def signed(interval: Interval) -> str:
    if np.isnan(interval.low):
        return "undefined" if np.isnan(interval.value) else minus(f"{interval.value:+.2f}")
    return minus(f"{interval.value:+.2f} [{interval.low:+.2f}, {interval.high:+.2f}]")


def plain(interval: Interval, digits: int = 2) -> str:
    if np.isnan(interval.low):
        return "undefined" if np.isnan(interval.value) else f"{interval.value:.{digits}f}"
    return f"{interval.value:.{digits}f} [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"


def p_text(value: float) -> str:
    return "" if np.isnan(value) else "< .001" if value < 0.001 else f"{value:.3f}".lstrip("0")


def share(values: np.ndarray) -> str:
    return f"{np.mean(values):.0%}"


def correlation(one: np.ndarray, other: np.ndarray) -> str:
    return minus(f"{rank_correlation(one, other):+.2f}") if np.ptp(one) and np.ptp(other) else "–"


@dataclass(frozen=True)
class SourceTests:
    """The three tests of docs/evidence/source-plan.md on one cell under one judge."""

    evidence: Evidence
    passage: Interval
    whole: Interval
    difference: Interval
    p_passage: float
    p_difference: float
    statistic: float
    p_added: float

    @classmethod
    def of(cls, evidence: Evidence, judge: str, method: str = "Sem-ASMI") -> "SourceTests":
        quality = evidence.quality(judge)
        scores = {source: evidence.score(method, source) for source in ("context", "all")}
        draws = prr_draws(list(scores.values()), quality, evidence.clusters, RESAMPLES)
        drawn = {name: draws[:, i] for i, name in enumerate(scores)}
        values = {name: normalised_prr(own, quality) for name, own in scores.items()}
        gap = drawn["context"] - drawn["all"]
        try:
            added = adds_information(
                scores["context"], evidence.controls, evidence.wrong(judge), evidence.clusters
            )
            statistic, p_added = added.statistic, added.p_value
        except ValueError:  # too few errors for the folds
            statistic = p_added = float("nan")
        return cls(
            evidence,
            percentile_interval(values["context"], drawn["context"]),
            percentile_interval(values["all"], drawn["all"]),
            percentile_interval(values["context"] - values["all"], gap),
            two_sided(drawn["context"]),
            two_sided(gap),
            statistic,
            p_added,
        )


PLANNED = {
    ("smollm2", "open-worked"), ("gemma", "open"), ("qwen05", "open"), ("qwen15", "open"),
    *((model, "babi") for model in ("smollm2", "gemma", "qwen05", "qwen15")),
}  # fmt: skip


def source_table(cells: list[Evidence], judge: str, method: str = "Sem-ASMI") -> str:
    planned = [c for c in judged(cells, judge) if (c.model, c.cell) in PLANNED]
    tests = [SourceTests.of(cell, judge, method) for cell in planned]
    primary = method == "Sem-ASMI"  # the plan adjusts nothing else
    ps = [[getattr(test, p) for test in tests] for p in ("p_passage", "p_difference", "p_added")]
    adjusted = [holm(own) if primary else own for own in ps] if tests else []
    how = "Holm" if primary else "unadjusted"
    columns = [
        "cell", "answers / clusters", "wrong", f"PRR of {method}, all", "passage", f"p (1), {how}",
        "passage − all", f"p (2), {how}", "beyond what is free, z", f"p (3), {how}",
    ]  # fmt: skip
    return table(
        columns,
        [
            [
                test.evidence.label,
                test.evidence.size,
                str(int(test.evidence.wrong(judge).sum())),
                signed(test.whole),
                signed(test.passage),
                p_text(adjusted[0][i]),
                signed(test.difference),
                p_text(adjusted[1][i]),
                minus(f"{test.statistic:+.1f}"),
                p_text(adjusted[2][i]),
            ]
            for i, test in enumerate(tests)
        ],
    )


def elsewhere_table(cells: list[Evidence], judge: str) -> str:
    """PRR where masked heads lose all, what comes from the passage, or all else; not planned."""
    rows = []
    for e in judged(cells, judge):
        if "asmi_mi_d60_elsewhere" not in e.answers:
            continue
        sources = ("all", "context", "elsewhere")
        scores = {source: e.score("Sem-ASMI", source) for source in sources}
        free = {"MSP": e.signals["MSP"], "Perplexity": e.signals["Perplexity"]}
        pairs = [("elsewhere", name) for name in free]
        alone, gaps = prr_intervals(scores | free, e.quality(judge), e.clusters, pairs, RESAMPLES)
        shown = [signed(alone[name]) for name in (*sources, *free)]
        rows.append([e.label, *shown, *(signed(gaps[pair]) for pair in pairs)])
    columns = [
        "cell", "PRR of Sem-ASMI: all", "passage", "elsewhere", "MSP", "Perplexity",
        "elsewhere − MSP", "elsewhere − Perplexity",
    ]  # fmt: skip
    return table(columns, rows)


def added_text(evidence: Evidence, name: str, judge: str) -> str:
    """z and p of the generalised covariance of a signal and errors, beyond what is free."""
    try:
        added = adds_information(
            evidence.signals[name], evidence.controls, evidence.wrong(judge), evidence.clusters
        )
    except ValueError:
        return "too few errors"
    return minus(f"{added.statistic:+.1f} ({p_text(added.p_value)})")


def worth_table(cells: list[Evidence], judge: str) -> str:
    """PRR of each signal, what ours have over what is free, and whether they add to it."""
    ours = ("Sem-ASMI", "Sem-ASMI, sum")
    pairs = [(own, free) for own in ours for free in ("MSP", "Perplexity")]
    rows = []
    for e in judged(cells, judge):
        alone, gaps = prr_intervals(e.signals, e.quality(judge), e.clusters, pairs, RESAMPLES)
        rows.append(
            [
                e.label,
                e.size,
                share(~e.wrong(judge)),
                *(signed(alone[name]) for name in e.signals),
                *(signed(gaps[pair]) for pair in pairs),
                *(added_text(e, name, judge) for name in ("ASMI", *ours)),
            ]
        )
    columns = [
        "cell", "answers / clusters", "right", "PRR: MSP", "Perplexity", "ASMI", *ours,
        *(f"{own} − {free}" for own, free in pairs),
        *(f"beyond what is free, {name}: z (p)" for name in ("ASMI", *ours)),
    ]  # fmt: skip
    return table(columns, rows)


def measures_table(cells: list[Evidence], judge: str) -> str:
    rows = []
    for e in judged(cells, judge):
        wrong = e.wrong(judge)
        if wrong.all() or not wrong.any():
            continue
        found = rank_signals(e.signals, wrong, e.clusters, resamples=RESAMPLES)
        for name, signal in found.items():
            stacked = ["", "", ""]
            if name.startswith(("ASMI", "Sem")):
                try:
                    gain = stacked_gain(e.signals[name], e.controls, wrong, e.clusters,
                                        e.quality(judge), REFITS)  # fmt: skip
                    stacked = [signed(one) for one in (gain.log_loss, gain.auroc, gain.prr)]
                except ValueError:
                    stacked = ["too few errors"] * 3
            rows.append([e.label, name, plain(signal.auroc), plain(signal.augrc, 3), *stacked])
    columns = [
        "cell", "score", "AUROC", "AUGRC, lower is better", "gain of a stack: log-loss", "AUROC",
        "PRR",
    ]  # fmt: skip
    return table(columns, rows)


def aggregation_table(cells: list[Evidence], judge: str) -> str:
    rows = []
    for e in judged(cells, judge):
        for method in ("ASMI", "Sem-ASMI", "surprisal", "entropy"):
            scores = {way: e.score(method, aggregation=way) for way in WAYS}
            alone, _ = prr_intervals(scores, e.quality(judge), e.clusters, (), RESAMPLES)
            along = " / ".join(correlation(own, e.length) for own in scores.values())
            rows.append([e.label, method, *(signed(alone[way]) for way in WAYS), along])
    columns = ["cell", "per token", *(f"PRR, {way}" for way in WAYS), "ρ with length, the same"]
    return table(columns, rows)


def quadrants_table(cells: list[Evidence], judge: str) -> str:
    rows = []
    for e in judged(cells, judge):
        for name in ("Sem-ASMI", "Sem-ASMI, sum"):
            found = confident_but_fragile(
                e.signals["MSP"], e.signals[name], e.wrong(judge), e.clusters, RESAMPLES
            )
            halves = zip(found.error_rate.ravel(), found.count.ravel(), strict=True)
            shown = [f"{rate:.0%} of {count}" if count else "none" for rate, count in halves]
            rows.append([e.label, name, *shown, signed(found.gap)])
    columns = [
        "cell", "score", "wrong: confident, robust", "confident, fragile", "unsure, robust",
        "unsure, fragile", "confident: fragile − robust",
    ]  # fmt: skip
    return table(columns, rows)


def strata_table(cells: list[Evidence], judge: str) -> str:
    """Within thirds by length, and without empty answers."""
    rows = []
    for e in judged(cells, judge):
        part = strata(e.length)
        chosen = {}
        for number in range(part.max() + 1):
            own = e.length[part == number]
            chosen[f"{own.min()} to {own.max()} tokens"] = part == number
        if e.empty.any():
            chosen["not empty"] = ~e.empty
            chosen["empty"] = e.empty
        for name, inside in chosen.items():
            one = e.among(inside)
            scores = {**one.signals, "length": one.length}
            alone, gaps = prr_intervals(
                scores, one.quality(judge), one.clusters, [("Sem-ASMI", "MSP")], RESAMPLES
            )
            rows.append(
                [e.label, name, str(int(inside.sum())), share(one.wrong(judge)),
                 *(signed(alone[score]) for score in scores),
                 signed(gaps["Sem-ASMI", "MSP"])]
            )  # fmt: skip
    columns = [
        "cell", "answers", "number", "wrong", "PRR: MSP", "Perplexity", "ASMI", "Sem-ASMI",
        "Sem-ASMI, sum", "length", "Sem-ASMI − MSP",
    ]  # fmt: skip
    return table(columns, rows)


def judges_table(cells: list[Evidence]) -> str:
    """AUROC under every judge at every threshold; a judge of yes and no has one row."""
    rows = []
    for e in [e for e in cells if e.run in OWN_ANSWERS]:
        qualities = {judge: e.quality(judge) for judge in JUDGES if e.has(judge)}
        before: tuple[Any, ...] = ()
        for (judge, threshold), found in auroc_by_judge(e.signals, qualities).items():
            wrong = qualities[judge] < threshold
            seen = (judge, *wrong)
            if seen == before:
                continue
            before = seen
            values = [f"{value:.2f}" for value in found.values()]
            rows.append([e.label, JUDGES[judge][1], f"{threshold:g}", share(wrong), *values])
    columns = [
        "cell", "judge", f"right from (of {', '.join(f'{t:g}' for t in THRESHOLDS)})", "wrong",
        "AUROC: MSP", "Perplexity", "ASMI", "Sem-ASMI", "Sem-ASMI, sum",
    ]  # fmt: skip
    return table(columns, rows)


class Coupling(NamedTuple):
    """How MI goes with errors in a cell: AUROC above .5 is the paper's direction."""

    evidence: Evidence
    mean: Interval
    total: Interval
    tokens: float
    right: float
    wrong: float


def couplings(cells: list[Evidence], judge: str) -> list[Coupling]:
    found = []
    for e in judged(cells, judge):
        scores = {way: e.score("ASMI", aggregation=way) for way in ("mean", "sum")}
        apart = error_separation(e.tokens("ASMI"), scores, e.wrong(judge), e.clusters, RESAMPLES)
        mean, total = apart.auroc["mean"], apart.auroc["sum"]
        found.append(Coupling(e, mean, total, apart.mean, apart.right, apart.wrong))
    return found


def coupling_table(cells: list[Evidence], judge: str) -> str:
    columns = [
        "cell", "billion parameters", "MI of a token, nats", "in right answers", "in wrong ones",
        "AUROC of MI, mean", "sum",
    ]  # fmt: skip
    return table(
        columns,
        [
            [
                one.evidence.label,
                f"{MODELS[one.evidence.model].billions:g}",
                *(f"{value:.4f}" for value in (one.tokens, one.right, one.wrong)),
                plain(one.mean),
                plain(one.total),
            ]
            for one in couplings(cells, judge)
        ],
    )


PLACES: dict[str, Callable[[np.ndarray], float]] = {
    "first": lambda tokens: tokens[0],
    "between": lambda tokens: tokens[1:-1].mean(),
    "closing": lambda tokens: tokens[-1],
}
"""Places in an answer that ended by itself, and what stands for their tokens."""


def places_table(cells: list[Evidence], judge: str) -> str:
    """Which tokens know of errors, and which way: of MI, of its passage's part, of entropy."""
    rows = []
    for e in judged(cells, judge):
        for place, mean_of in PLACES.items():
            # An answer of two tokens has none between; one that was cut has no closing token.
            has = e.answers["closing"].to_numpy() & (e.length >= (3 if place == "between" else 2))
            one = e.among(has)
            wrong = one.wrong(judge)
            if wrong.all() or not wrong.any():
                continue
            per_token = {"MI": one.tokens("ASMI"), "entropy": one.tokens("entropy")}
            if "asmi_mi_d60_context" in one.answers:
                per_token["MI of the passage"] = one.tokens("ASMI", "context")
            scores = {
                name: np.array([mean_of(own) for own in tokens])
                for name, tokens in per_token.items()
            }
            found = rank_signals(scores, wrong, one.clusters, resamples=RESAMPLES)
            halves = [
                f"{np.median(own[~wrong]):.1e} / {np.median(own[wrong]):.1e}"
                for name, own in scores.items()
                if name != "entropy"
            ]
            areas = [plain(found[name].auroc) for name in scores]
            if "MI of the passage" not in scores:
                halves, areas = [*halves, ""], [*areas, ""]
            rows.append([e.label, place, f"{len(wrong)} / {int(wrong.sum())}", *areas, *halves])
    columns = [
        "cell", "token", "answers / wrong", "AUROC of MI", "of entropy", "of the passage's MI",
        "median MI, right / wrong", "the passage's",
    ]  # fmt: skip
    return table(columns, rows)


def flat(values: Iterable[Any]) -> np.ndarray:
    """Of all answers, what belongs to their tokens between the first and the closing one."""
    return np.concatenate([own[1:-1] for own in values])


def copying_table(cells: list[Evidence], judge: str) -> str:
    """Tokens between the first and the closing one, by whether they go on as the passage does."""
    rows = []
    for cell in judged(cells, judge):
        if "copied" not in cell.answers:
            continue
        e = cell.among(cell.answers["closing"].to_numpy())
        as_there = flat(e.answers["copied"]).astype(bool)
        wrong = flat(np.full(n, w) for n, w in zip(e.length, e.wrong(judge), strict=True))
        clusters = flat(np.full(n, c) for n, c in zip(e.length, e.clusters, strict=True))
        signals = {
            "MI": flat(e.tokens("ASMI")),
            "the passage's": flat(e.tokens("ASMI", "context")),
            "entropy": flat(e.tokens("entropy")),
        }
        for place, chosen in (("as in the passage", as_there), ("otherwise", ~as_there)):
            errors = wrong[chosen]
            if errors.all() or not errors.any():
                continue
            own = {name: values[chosen] for name, values in signals.items()}
            found = rank_signals(own, errors, list(clusters[chosen]), resamples=RESAMPLES)
            rows.append(
                [e.label, place, str(len(errors)), share(errors),
                 *(f"{np.median(values):.1e}" for values in own.values()),
                 *(plain(signal.auroc) for signal in found.values())]
            )  # fmt: skip
    columns = [
        "cell", "tokens that go on", "number", "in wrong answers", "median MI", "the passage's",
        "entropy", "AUROC of MI", "of the passage's", "of entropy",
    ]  # fmt: skip
    return table(columns, rows)


TICKS = (0.1, 0.3, 1, 3, 10)
MARKS = dict(zip(CELLS, "os^DvP<>XhH*", strict=True))


def draw_coupling(found: list[Coupling], said_by: str) -> Figure:
    """AUROC of MI for errors against the size of the model, a mark a cell."""
    colours = [figures.BLUE, figures.ORANGE, figures.GREEN, figures.PURPLE, figures.AMBER,
               figures.SKY]  # fmt: skip
    with rc_context(figures.STYLE):
        figure = Figure(figsize=(7.2, 3.4), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        kinds = [cell for cell in CELLS if any(one.evidence.cell == cell for one in found)]
        for ax, way in zip(axes, ("mean", "total"), strict=True):
            ax.axhline(0.5, color=figures.GREY, linewidth=0.8)
            for number, cell in enumerate(kinds):
                own = [one for one in found if one.evidence.cell == cell]
                # Cells of one model side by side.
                apart = 1.06 ** (number - (len(kinds) - 1) / 2)
                sizes = [MODELS[one.evidence.model].billions * apart for one in own]
                values = np.array([getattr(one, way) for one in own], dtype=float)
                reach = np.abs(values[:, 1:] - values[:, :1]).T
                ax.errorbar(sizes, values[:, 0], np.nan_to_num(reach), fmt=MARKS[cell],
                            markersize=4, linewidth=0.8, color=colours[number % len(colours)],
                            label=CELLS[cell])  # fmt: skip
            ax.set_xscale("log")
            ax.set_xlim(0.09, 12)
            ax.set_xticks(TICKS, [f"{size:g}" for size in TICKS])
            ax.minorticks_off()
            ax.set_xlabel("billion parameters")
            ax.set_title({"mean": "mean of MI over tokens", "total": "sum of MI over tokens"}[way])
        low, high = axes[0].get_ylim()
        axes[0].set_ylim(min(low, 0.35), max(high, 0.65))  # chance is always seen
        axes[0].set_ylabel("AUROC of MI for errors")
        figure.suptitle(f"right: {said_by}", fontsize=9)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=7)
    return figure


def settings_table(cells: list[Evidence], judge: str) -> str:
    """Other masks, positions and depths, each on the rows it was run on, beside MSP there."""
    rows = []
    for e in cells:
        if e.run not in SETTINGS or not e.has(judge):
            continue
        depths = [d for d in DEPTHS if f"asmi_mi_d{d}" in e.answers]
        for depth in depths:
            scores = {m: e.score(m, depth=depth) for m in ("ASMI", "Sem-ASMI")}
            scores["MSP"] = e.baseline("MaximumSequenceProbability")
            alone, gaps = prr_intervals(
                scores, e.quality(judge), e.clusters, [("Sem-ASMI", "MSP")], RESAMPLES
            )
            rows.append(
                [e.label, SETTINGS[e.run], f"{depth} %", e.size,
                 *(signed(alone[name]) for name in scores), signed(gaps["Sem-ASMI", "MSP"])]
            )  # fmt: skip
    columns = ["cell", "masks", "depth", "answers / clusters", "PRR: ASMI", "Sem-ASMI", "MSP",
               "Sem-ASMI − MSP"]  # fmt: skip
    return table(columns, rows)


def baselines_table(cells: list[Evidence], judge: str) -> str:
    """All methods of the runs that have more than ours, each run's on its own rows."""
    rows = []
    for e in cells:
        wrong = e.wrong(judge) if e.has(judge) else np.array([False])
        if e.run not in ("baselines", "sampled", "benchmark") or wrong.all() or not wrong.any():
            continue
        names = [name.removeprefix("score ") for name in e.answers if name.startswith("score ")]
        scores = {name: e.baseline(name) for name in names}
        scores.setdefault("MaximumSequenceProbability", e.baseline("MaximumSequenceProbability"))
        usable = {name: own for name, own in scores.items() if np.isfinite(own).all()}
        pairs = [(name, "MaximumSequenceProbability") for name in usable]
        alone, gaps = prr_intervals(usable, e.quality(judge), e.clusters, pairs, RESAMPLES)
        for name in sorted(usable, key=lambda name: -alone[name].value):
            over = "" if name == pairs[0][1] else signed(gaps[name, pairs[0][1]])
            area = f"{auroc(usable[name], wrong):.2f}"
            rows.append([e.label, e.size, name, signed(alone[name]), over, area])
    columns = ["cell", "answers / clusters", "method", "PRR", "− MSP", "AUROC"]
    return table(columns, rows)


TABLES: dict[str, Callable[[list[Evidence]], str]] = {"judges": judges_table}
FIGURES: dict[str, str] = {}
"""Name of a file beside the evidence -> judge."""
for _judge in JUDGES:
    TABLES[f"source {_judge}"] = partial(source_table, judge=_judge)
    TABLES[f"source raw {_judge}"] = partial(source_table, judge=_judge, method="ASMI")
    TABLES[f"source elsewhere {_judge}"] = partial(elsewhere_table, judge=_judge)
    FIGURES[f"coupling-{_judge}.png"] = _judge
    for _name, _make in {
        "worth": worth_table, "measures": measures_table, "aggregation": aggregation_table,
        "places": places_table, "copying": copying_table, "quadrants": quadrants_table,
        "strata": strata_table, "coupling": coupling_table, "settings": settings_table,
        "baselines": baselines_table,
    }.items():  # fmt: skip
        TABLES[f"{_name} {_judge}"] = partial(_make, judge=_judge)

_PLACE = re.compile(r"(<!-- table ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_VERDICT = re.compile(r"<!-- verdict -->\n(.*?)<!-- end -->", re.DOTALL)
_MADE_FROM = re.compile(r"<!-- made from \w* -->")


def filled(page: str, cells: list[Evidence], made_from: str) -> str:
    """A page with its tables made anew.

    Raises:
        ValueError: a table that there is not.
    """

    def made(place: re.Match[str]) -> str:
        if place[2] not in TABLES:
            raise ValueError(f"there is no table {place[2]!r}: {', '.join(TABLES)}")
        return f"{place[1]}{TABLES[place[2]](cells)}\n{place[3]}"

    return _MADE_FROM.sub(f"<!-- made from {made_from} -->", _PLACE.sub(made, page))


def unwritten(page: str) -> bool:
    """Whether a verdict should stand on a page, and none does."""
    return any(not place.strip() for place in _VERDICT.findall(page))


def update_figures(folder: Path, pages: str, cells: list[Evidence], check: bool) -> list[str]:
    """Draw the figures that pages show; what a figure was drawn from stands in its description.

    Returns:
        Names of those that were, or with `check` would be, drawn anew.
    """
    stale = []
    for name, judge in FIGURES.items():
        file = folder / name
        if name not in pages:
            continue
        found = couplings(cells, judge)
        described = coupling_table(cells, judge)
        if file.exists() and Image.open(file).info.get("Description") == described:
            continue
        stale.append(name)
        if found and not check:
            figures.save(draw_coupling(found, JUDGES[judge][1]), file, described)
    return stale


@click.command(help=__doc__)
@click.option("--check", is_flag=True, help="Change nothing; exit with 1 where something differs.")
@click.option("--quick", is_flag=True, help="With --check: compute nothing.")
def main(check: bool, quick: bool) -> None:
    evidence = DOCS / "evidence"
    made_from = digest(evidence)
    pages = {p: p.read_text(encoding="utf-8") for p in sorted(DOCS.glob("*.md"))}
    pages |= {p: p.read_text(encoding="utf-8") for p in sorted(evidence.glob("*.md"))}
    pages = {page: text for page, text in pages.items() if _PLACE.search(text)}
    try:
        if check and quick:
            known = f"<!-- made from {made_from} -->"
            stale = [page.name for page, text in pages.items() if known not in text]
        else:
            cells = load(evidence)
            stale = update_figures(evidence, "".join(pages.values()), cells, check)
            for page, text in pages.items():
                made = filled(text, cells, made_from)
                if made != text:
                    stale.append(page.name)
                    if not check:
                        page.write_text(made, encoding="utf-8")
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{'to be made anew' if check else 'made anew'}: {', '.join(stale) or 'nothing'}")
    empty = [page.name for page, text in pages.items() if unwritten(text)]
    if empty:
        click.echo(f"without a verdict, so not to be published: {', '.join(empty)}")
    raise SystemExit(bool(check and (stale or empty)))


if __name__ == "__main__":
    main()
