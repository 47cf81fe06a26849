"""Settings (model x dataset x prompt) read from docs/evidence, and formats of their numbers.

docs/evidence/MODEL/SETTING.RUN.parquet has a row for each answer of a setting
(scripts/evidence/keep.py). scripts/evidence/pages.py makes the tables from them.
"""

import csv
import hashlib
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from lm_polygraph_asmi.analysis import (
    AddedInformation,
    Interval,
    Labelled,
    adds_information,
    rank_correlation,
)
from lm_polygraph_asmi.config import AGGREGATIONS, METHODS
from lm_polygraph_asmi.maths.scores import aggregate, token_scores


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
SETTINGS = {
    "xquad": "XQuAD, zero-shot",
    "xquad-few-shot": "XQuAD, few-shot (4-shot)",
    "xquad-chat": "XQuAD, chat template",
    "closed-book": "closed book, zero-shot",
    "closed-book-few-shot": "closed book, few-shot (4-shot)",
    "closed-book-chat": "closed book, chat template",
    "babi": "BabiQA",
    "babi-chat": "BabiQA, chat template",
    "coqa": "CoQA",
    "squad": "SQuAD",
    "babiqa": "BabiQA, the paper's",
    "triviaqa": "TriviaQA",
}
CLOSED = {
    "closed-book": "xquad",
    "closed-book-few-shot": "xquad-few-shot",
    "closed-book-chat": "xquad-chat",
}
"""Setting without passages -> the same questions with passages."""
MAIN_RUNS = ("sources", "benchmark")
"""Runs that give a setting's results: in scope `response`, and of the paper's configs."""
PARAMETERS = {
    "sources": "response, derived p and S",
    "benchmark": "all, derived p and S",
    "scope_all": "all, derived p and S",
    "paper": "response, p = .15, S = 40",
    "balanced": "response, balanced masks",
    "depths": "response, derived p and S",
}
CONDITIONS = ("pseudo_heads", "foreign", "isotropic", "mlp", "mlp_noise")
"""Control conditions: parts perturbed instead of heads, from most to least similar to heads."""
REPEATED, DEEPER = "again", "deeper"
"""Runs: the depths again, on answers not scored before; 70 and 90 % on other settings."""
RUNS = (*PARAMETERS, REPEATED, DEEPER, "baselines", "sampled", *CONDITIONS)
OF_RECORDS = ("changed-few-shot", "exchanged-few-shot", "copied", "heads")
"""Settings and runs of tables whose script has left (docs/results/records.csv); not read."""
CORRECTNESS_LABELS = {
    "contains": ("ReferenceInAnswer", "the answer contains the gold answer"),
    "rouge": ("quality Rouge_rougeL", "ROUGE-L"),
    "align": ("quality AlignScore", "AlignScore"),
}
MIN_ANSWERS = 10
"""Smallest number of answers in a group that is compared."""
FIRST = "first"
ALL_AGGREGATIONS = (*AGGREGATIONS, FIRST)
TABLES, MADE_FROM = "tables", "made-from.json"
"""Folder in docs/evidence, and its file with digests of the files that tables are made from."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """A run of a model on a data set: a row per answer, with statistics of its tokens.

    Attributes:
        model, setting, run: as in its file name.
        answers: its rows.
        planned: number of answers planned; None if unknown.
    """

    model: str
    setting: str
    run: str
    answers: pd.DataFrame
    planned: int | None = None

    @property
    def label(self) -> str:
        return f"{MODELS[self.model].name}, {SETTINGS[self.setting]}"

    @property
    def data_set(self) -> str:
        """Name of the data set, without the prompt."""
        return SETTINGS[self.setting].split(",")[0]

    @property
    def size(self) -> str:
        """Answers / clusters; "n of m" answers if the run ended before all m planned."""
        n = len(self.answers)
        answers = f"{n}" if self.planned in (None, n) else f"{n} of {self.planned}"
        return f"{answers} / {len(set(self.clusters))}"

    @property
    def clusters(self) -> list[str]:
        return list(self.answers["cluster"])

    def has(self, correctness: str) -> bool:
        return CORRECTNESS_LABELS[correctness][0] in self.answers

    def quality(self, correctness: str) -> np.ndarray:
        return self.answers[CORRECTNESS_LABELS[correctness][0]].to_numpy(dtype=float)

    def wrong(self, correctness: str) -> np.ndarray:
        return self.quality(correctness) < 0.5

    def labels(self, correctness: str, resamples: int | None = None) -> Labelled:
        """Its answers with one label."""
        return Labelled(
            self.wrong(correctness), self.clusters, self.quality(correctness), resamples
        )

    def ranked(self, correctness: str) -> bool:
        """Whether enough answers are correct, and enough wrong, to rank them."""
        if not self.has(correctness):
            return False
        errors = int(self.wrong(correctness).sum())
        return min(errors, len(self.answers) - errors) >= MIN_ANSWERS

    def select(self, rows: np.ndarray) -> "Evidence":
        """The selected rows."""
        answers = self.answers[rows].reset_index(drop=True)
        planned = self.planned if all(rows) else None
        return Evidence(self.model, self.setting, self.run, answers, planned)

    def shared_with(self, other: "Evidence") -> "Evidence":
        """The answers that another run of the setting also has, in the order of that run.

        Raises:
            ValueError: the other run has different answers or questions.
        """
        rows = self.answers.set_index("id")
        if set(other.answers["id"]) <= set(rows.index):
            shared = rows.loc[other.answers["id"]].reset_index()
            pairs = zip(
                shared["asmi_log_likelihood"], other.answers["asmi_log_likelihood"], strict=True
            )
            if all(len(a) == len(b) and np.allclose(a, b, atol=1e-3) for a, b in pairs):
                return Evidence(self.model, self.setting, self.run, shared)
        raise ValueError(
            f"{self.model}/{self.setting}.{other.run}.parquet holds other answers than "
            f"{self.setting}.{self.run}.parquet"
        )

    def joined_with(self, other: "Evidence") -> "Evidence":
        """The answers that another run of the setting also has, with the columns of both runs.

        Raises:
            ValueError: the other run has different answers or questions.
        """
        shared = self.shared_with(other).answers
        extra = other.answers[other.answers.columns.difference(shared.columns, sort=False)]
        return Evidence(self.model, self.setting, other.run, shared.join(extra), other.planned)

    @cached_property
    def length(self) -> np.ndarray:
        return self.answers["asmi_entropy"].map(len).to_numpy()

    @property
    def empty(self) -> np.ndarray:
        return self.answers["words"].to_numpy() == 0

    def has_depth(self, depth: int) -> bool:
        """Whether heads were masked at this depth, in percent of the layers."""
        return f"asmi_mi_d{depth}" in self.answers

    def column(self, name: str) -> list[np.ndarray]:
        return [np.asarray(values, dtype=float) for values in self.answers[name]]

    def baseline(self, name: str) -> np.ndarray:
        """LM-Polygraph's score; if there is none, the same score of ASMI's unmasked pass."""
        if f"score {name}" in self.answers:
            return self.answers[f"score {name}"].to_numpy(dtype=float)
        method, aggregation = {
            "MaximumSequenceProbability": ("surprisal", "sum"),
            "Perplexity": ("surprisal", "mean"),
            "MeanTokenEntropy": ("entropy", "mean"),
        }[name]
        return self.score(method, aggregation=aggregation)

    def tokens(self, method: str, depth: int = 60) -> list[np.ndarray]:
        """Per-token scores in nats; higher = more uncertain.

        Of "ASMI", "Sem-ASMI", or, of the unmasked model, "surprisal" or "entropy".
        """
        if method == "surprisal":
            return [-values for values in self.column("asmi_log_likelihood")]
        if method == "entropy":
            return self.column("asmi_entropy")
        scores = self.column(f"asmi_mi_d{depth}")
        if method == "Sem-ASMI":
            scores = list(map(token_scores, scores, self.column(f"asmi_agreement_d{depth}")))
        return scores

    def score(self, method: str, aggregation: str = "mean", depth: int = 60) -> np.ndarray:
        tokens = self.tokens(method, depth)
        if aggregation == FIRST:
            return np.array([values[0] for values in tokens])
        return np.array([aggregate(values, aggregation) for values in tokens])

    @cached_property
    def signals(self) -> dict[str, np.ndarray]:
        """Scores that the tables compare."""
        return {
            "MSP": self.baseline("MaximumSequenceProbability"),
            "Perplexity": self.baseline("Perplexity"),
            "ASMI": self.score("ASMI"),
            "Sem-ASMI": self.score("Sem-ASMI"),
            "Sem-ASMI, sum": self.score("Sem-ASMI", aggregation="sum"),
        }

    @property
    def free_baselines(self) -> np.ndarray:
        """MSP, mean token entropy and length: the free baselines."""
        free = [self.baseline("MaximumSequenceProbability"), self.baseline("MeanTokenEntropy")]
        return np.column_stack([*free, self.length])

    def added(self, scores: np.ndarray, correctness: str) -> AddedInformation | None:
        """Test whether scores add to the free baselines; None with too few errors for the folds."""
        try:
            return adds_information(scores, self.free_baselines, self.labels(correctness))
        except ValueError:
            return None

    def beyond_free(self, scores: np.ndarray, correctness: str) -> str:
        """`added` as text: z (p)."""
        added = self.added(scores, correctness)
        return added_text(added) if added else "too few errors"


def files_of(folder: Path) -> list[tuple[str, str, str, Path]]:
    """(model, setting, run, file) of every complete run, in the order of MODELS, SETTINGS, RUNS."""
    candidates = [
        (m, c, r, folder / m / f"{c}.{r}.parquet") for m in MODELS for c in SETTINGS for r in RUNS
    ]
    return [candidate for candidate in candidates if candidate[-1].exists()]


def load(folder: Path) -> list[Evidence]:
    """All complete runs of settings.

    Raises:
        ValueError: a file is named after an unknown model, setting or run.
    """
    files = files_of(folder)
    read = {file for *_, file in files}
    unknown = sorted(
        file
        for file in set(folder.glob("*/*.parquet")) - read
        if not set(file.name.split(".")) & set(OF_RECORDS)
    )
    if unknown:
        raise ValueError(
            f"{unknown[0]}: unknown model, setting or run; known are MODELS, SETTINGS and RUNS "
            f"in {Path(__file__).name}"
        )
    evidence = []
    for model, setting, run, file in files:
        table = pq.read_table(file)
        metadata = json.loads((table.schema.metadata or {}).get(b"run", b"{}"))
        planned = metadata.get("data", {}).get("limit")
        # Methods that draw no masks are named by their symbols.
        symbols = {n: of["symbol"] for n, of in metadata.get("methods", {}).items()}
        short = {
            f"score {n}": f"score {s}" for n, s in symbols.items() if s not in METHODS.values()
        }
        answers = table.to_pandas().rename(columns=short)
        evidence.append(Evidence(model, setting, run, answers, planned))
    return evidence


def runs_like(like: Evidence, evidence: Iterable[Evidence], runs: Sequence[str]) -> list[Evidence]:
    """Runs with one of these names, of the same model and setting."""
    return [
        e for e in evidence if (e.model, e.setting) == (like.model, like.setting) and e.run in runs
    ]


def digest(folder: Path) -> str:
    """Hash of all files that the tables are made from."""
    return digest_of(file for *_, file in files_of(folder))


def digest_of(files: Iterable[Path]) -> str:
    sums = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    return hashlib.sha256("".join(sums).encode()).hexdigest()[:16]


def labelled(evidence: Iterable[Evidence], correctness: str) -> list[Evidence]:
    """Main runs with enough correct and enough wrong answers."""
    return [e for e in evidence if e.run in MAIN_RUNS and e.ranked(correctness)]


class Table(NamedTuple):
    """Numbers as texts, such as "+0.50 [+0.39, +0.60]" or "500 / 237"."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def csv(self) -> str:
        """The table with one number per column: an interval becomes three columns, a pair two."""
        parts = [_split(name, [row[i] for row in self.rows]) for i, name in enumerate(self.columns)]
        columns = [column for part in parts for column in part]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([name for name, _ in columns])
        writer.writerows(zip(*(values for _, values in columns), strict=True))
        return text.getvalue()


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    return Table(columns, list(rows))


_NUMBER = r"[+-]?\d*\.?\d+(?:e[+-]?\d+)?"
_SHAPES = (
    (re.compile(rf"({_NUMBER}) \[({_NUMBER}), ({_NUMBER})\]"), ("", ", low", ", high")),
    (re.compile(rf"({_NUMBER}) \((.+)\)"), (", z", ", p")),
    (re.compile(rf"({_NUMBER}) to ({_NUMBER})"), (", lowest", ", highest")),
    (re.compile(r"(\d+)% of (\d+)"), (" (%)", ", answers")),
)


def _split(name: str, texts: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Split a column of intervals or pairs into columns of numbers."""
    texts = [text.replace("−", "-") for text in texts]
    if " / " in name:
        before, comma, last = name.rpartition(", ")
        names = last.split(" / ")
        pairs = [text.split(" / ") if text else [""] * len(names) for text in texts]
        columns = zip(names, zip(*pairs, strict=True), strict=True)
        return [part for end, values in columns for part in _split(before + comma + end, values)]
    if name == "answers" and any(" of " in text for text in texts):
        pairs = [text.partition(" of ")[::2] for text in texts]
        return [("answers", [n for n, _ in pairs]), ("planned answers", [n for _, n in pairs])]
    for shape, endings in _SHAPES:
        matches = [shape.fullmatch(text) for text in texts]
        if any(matches):
            columns = []
            for i, ending in enumerate(endings):
                values = [
                    m[i + 1] if m else "" if i else c for m, c in zip(matches, texts, strict=True)
                ]
                columns.append((name.removesuffix(": z (p)") + ending, [*map(_number, values)]))
            return columns
    if all(re.fullmatch(r"\d+ ?%|", text) for text in texts):
        return [(f"{name} (%)", [text.rstrip(" %") for text in texts])]
    return [(name, [*map(_number, texts)])]


def _number(text: str) -> str:
    """Without a plus or commas, and with a zero before the point."""
    if re.fullmatch(r"\d{1,3}(,\d{3})+", text):
        return text.replace(",", "")
    if text == "< .001":
        return "<0.001"
    if not re.fullmatch(_NUMBER, text):
        return text
    return re.sub(r"^(-?)\.", r"\g<1>0.", text.removeprefix("+"))


def write_tables(
    folder: Path, tables: Mapping[str, Table], old: set[str], check: bool
) -> list[str]:
    """Write tables as CSV files, and delete files of tables that no longer exist.

    Args:
        old: names of the existing CSV files.
        check: change nothing.

    Returns:
        Names of files that changed, or with `check` would change.
    """
    folder.mkdir(exist_ok=True)
    texts = {f"{name.replace(' ', '-')}.csv": t.csv() for name, t in tables.items() if t.rows}
    stale = []
    for name, text in texts.items():
        file = folder / name
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not check:
                file.write_text(text, encoding="utf-8")
    for name in sorted(old - set(texts)):
        stale.append(name)
        if not check:
            (folder / name).unlink()
    return stale


def made_from(folder: Path) -> dict[str, str]:
    """Script -> hash of the files that it last made its tables from."""
    file = folder / MADE_FROM
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def record(folder: Path, script: str, digest: str, check: bool) -> list[str]:
    """Save the hash of the files that a script made its tables from.

    Returns:
        The name of the record, if it changed.
    """
    recorded = made_from(folder)
    if recorded.get(script) == digest:
        return []
    if not check:
        text = json.dumps(dict(sorted((recorded | {script: digest}).items())), indent=2)
        (folder / MADE_FROM).write_text(f"{text}\n", encoding="utf-8")
    return [MADE_FROM]


def minus(text: str) -> str:
    """With the minus sign that is as wide as a plus."""
    return text.replace("-", "−")


def signed(interval: Interval) -> str:
    if np.isnan(interval.low):
        return "undefined" if np.isnan(interval.value) else minus(f"{interval.value:+.2f}")
    return minus(f"{interval.value:+.2f} [{interval.low:+.2f}, {interval.high:+.2f}]")


def unsigned(interval: Interval, digits: int = 2) -> str:
    if np.isnan(interval.low):
        return "undefined" if np.isnan(interval.value) else f"{interval.value:.{digits}f}"
    return f"{interval.value:.{digits}f} [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"


def p_text(value: float) -> str:
    return "" if np.isnan(value) else "< .001" if value < 0.001 else f"{value:.3f}".lstrip("0")


def z_text(value: float) -> str:
    return "" if np.isnan(value) else minus(f"{value:+.1f}")


def added_text(added: AddedInformation) -> str:
    return f"{z_text(added.statistic)} ({p_text(added.p_value)})"


def share(values: np.ndarray) -> str:
    return f"{np.mean(values):.0%}"


def correlation(first: np.ndarray, second: np.ndarray) -> str:
    return (
        minus(f"{rank_correlation(first, second):+.2f}")
        if np.ptp(first) and np.ptp(second)
        else "–"
    )
