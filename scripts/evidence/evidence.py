"""Settings (model x dataset x prompt), read from docs/evidence, and how their numbers are written.

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
    adds_information,
    rank_correlation,
)
from lm_polygraph_asmi.config import AGGREGATIONS, METHODS
from lm_polygraph_asmi.results.aggregation import aggregate


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
    "changed": "another answer in the passage, zero-shot",
    "changed-few-shot": "another answer in the passage, few-shot (4-shot)",
    "exchanged": "another passage, zero-shot",
    "exchanged-few-shot": "another passage, few-shot (4-shot)",
}
CHANGED = {
    "changed": "xquad",
    "changed-few-shot": "xquad-few-shot",
    "exchanged": "xquad",
    "exchanged-few-shot": "xquad-few-shot",
}
"""Settings whose passages say something else -> the same questions as they were."""
CLOSED = {
    "closed-book": "xquad",
    "closed-book-few-shot": "xquad-few-shot",
    "closed-book-chat": "xquad-chat",
}
"""Settings without a passage -> the same questions with it."""
OWN_ANSWERS = ("sources", "benchmark")
"""Runs that a setting is judged by: of scripts/evidence/measure.sh, and of its --paper."""
PARAMETERS = {
    "sources": "response, derived p and S",
    "benchmark": "all, derived p and S",
    "scope_all": "all, derived p and S",
    "paper": "response, p = .15, S = 40",
    "balanced": "response, balanced masks",
    "depths": "response, derived p and S",
}
CONDITIONS = ("pseudo_heads", "foreign", "isotropic", "mlp", "mlp_noise")
"""What the perturbation controls perturbs in place of heads, from the likest to the least like."""
AGAIN, DEEPER = "again", "deeper"
"""The depths once more, on answers that nobody had looked at; 70 and 90 % of other settings."""
RUNS = (*PARAMETERS, AGAIN, DEEPER, "baselines", "sampled", "copied", "heads", *CONDITIONS)
CORRECTNESS_LABELS = {
    "contains": ("ReferenceInAnswer", "the answer contains the gold answer"),
    "rouge": ("quality Rouge_rougeL", "ROUGE-L"),
    "align": ("quality AlignScore", "AlignScore"),
}
FEWEST = 10
"""Answers of either kind, below which they are not compared."""
AFTER_ONE = ", first sentence"
"""End of the name of a column of correctness labels of first sentences."""
FIRST = "first"
WAYS = (*AGGREGATIONS, FIRST)
TABLES, MADE_FROM = "tables", "made-from.json"
"""Folder beside the evidence, and its file that says what the tables were made from."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """One model on one data set: a row per answer, with statistics of its tokens.

    Attributes:
        model, setting, run: as in its file name.
        answers: its rows.
        asked: rows that were to be answered; None where that is not known.
        which: of its answers, where these are a part that was chosen afterwards.
    """

    model: str
    setting: str
    run: str
    answers: pd.DataFrame
    asked: int | None = None
    which: str = ""

    @property
    def label(self) -> str:
        return ", ".join(
            filter(None, (MODELS[self.model].name, SETTINGS[self.setting], self.which))
        )

    @property
    def data_set(self) -> str:
        """However it was asked."""
        return SETTINGS[self.setting].split(",")[0]

    @property
    def size(self) -> str:
        """Answers and clusters; where hours did not allow all rows, of how many."""
        n = len(self.answers)
        reached = f"{n}" if self.asked in (None, n) else f"{n} of {self.asked}"
        return f"{reached} / {len(set(self.clusters))}"

    @property
    def clusters(self) -> list[str]:
        return list(self.answers["cluster"])

    def has(self, correctness: str) -> bool:
        return CORRECTNESS_LABELS[correctness][0] in self.answers

    def quality(self, correctness: str) -> np.ndarray:
        return self.answers[CORRECTNESS_LABELS[correctness][0]].to_numpy(dtype=float)

    def wrong(self, correctness: str) -> np.ndarray:
        return self.quality(correctness) < 0.5

    def ranked(self, correctness: str) -> bool:
        """Whether a correctness label calls enough answers right, and enough wrong, to rank
        them."""
        if not self.has(correctness):
            return False
        errors = int(self.wrong(correctness).sum())
        return min(errors, len(self.answers) - errors) >= FEWEST

    def among(self, chosen: np.ndarray, which: str = "") -> "Evidence":
        """The same for some of the rows."""
        kept = self.answers[chosen].reset_index(drop=True)
        asked = self.asked if all(chosen) else None
        return Evidence(self.model, self.setting, self.run, kept, asked, which)

    @cached_property
    def cut(self) -> np.ndarray:
        """(N,) whether an answer goes on after its first sentence; False if not kept."""
        own = self.answers.get("first_sentence", pd.Series(self.length))
        return own.to_numpy() < self.length

    def first_sentences(self) -> "Evidence":
        """The same answers as if each had ended with its first sentence."""
        kept = self.answers.drop(columns=self.answers.filter(like="score ").columns)
        for column in kept.columns[[isinstance(own, np.ndarray) for own in kept.iloc[0]]]:
            pairs = zip(kept[column], kept["first_sentence"], strict=True)
            kept[column] = [own[:tokens] for own, tokens in pairs]
        for column in kept.filter(like=AFTER_ONE).columns:
            kept[column.removesuffix(AFTER_ONE)] = kept[column]
        return Evidence(self.model, self.setting, self.run, kept, self.asked, "first sentences")

    def shared_with(self, other: "Evidence") -> "Evidence":
        """Those of the answers that another run of the setting has, in its order.

        Raises:
            ValueError: it has other answers, or answers to other questions.
        """
        rows = self.answers.set_index("id")
        if set(other.answers["id"]) <= set(rows.index):
            mine = rows.loc[other.answers["id"]].reset_index()
            pairs = zip(
                mine["asmi_log_likelihood"], other.answers["asmi_log_likelihood"], strict=True
            )
            if all(len(a) == len(b) and np.allclose(a, b, atol=1e-3) for a, b in pairs):
                return Evidence(self.model, self.setting, self.run, mine)
        raise ValueError(
            f"{self.model}/{self.setting}.{other.run}.parquet holds other answers than the run "
            "beside it"
        )

    def joined_with(self, other: "Evidence") -> "Evidence":
        """Those of the answers that another run of the setting has, and what it alone knows of
        them.

        Raises:
            ValueError: it has other answers, or answers to other questions.
        """
        mine = self.shared_with(other).answers
        more = other.answers[other.answers.columns.difference(mine.columns, sort=False)]
        return Evidence(self.model, self.setting, other.run, mine.join(more), other.asked)

    @cached_property
    def length(self) -> np.ndarray:
        return self.answers["asmi_entropy"].map(len).to_numpy()

    @property
    def empty(self) -> np.ndarray:
        return self.answers["words"].to_numpy() == 0

    def has_depth(self, depth: int) -> bool:
        """Whether masks were drawn at so many per cent of the layers."""
        return f"asmi_mi_d{depth}" in self.answers

    def has_source(self, source: str) -> bool:
        """Whether masks took this source's part from heads."""
        return f"asmi_mi_d60_{source}" in self.answers

    def column(self, name: str) -> list[np.ndarray]:
        return [np.asarray(own, dtype=float) for own in self.answers[name]]

    def baseline(self, name: str) -> np.ndarray:
        """The host's score, else the same of ASMI's own unmasked pass."""
        if f"score {name}" in self.answers:
            return self.answers[f"score {name}"].to_numpy(dtype=float)
        of_tokens, aggregation = {
            "MaximumSequenceProbability": ("surprisal", "sum"),
            "Perplexity": ("surprisal", "mean"),
            "MeanTokenEntropy": ("entropy", "mean"),
        }[name]
        return self.score(of_tokens, aggregation=aggregation)

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

    @property
    def token_signals(self) -> dict[str, list[np.ndarray]]:
        """Per token: MI, entropy, and the passage's part of MI where it was measured."""
        found = {"MI": self.tokens("ASMI"), "entropy": self.tokens("entropy")}
        if self.has_source("context"):
            found["the passage's"] = self.tokens("ASMI", "context")
        return found

    @cached_property
    def passage_share(self) -> np.ndarray:
        """MI where masks take from heads what comes from the passage, over that of all they do."""
        pairs = zip(self.tokens("ASMI", "context"), self.tokens("ASMI"), strict=True)
        return np.array(
            [part.sum() / whole.sum() if whole.sum() > 0 else 0.0 for part, whole in pairs]
        )

    @cached_property
    def owed(self) -> dict[str, np.ndarray]:
        """How much each answer owes to its passage, by several measures; higher = more."""
        found = {"share of MI": self.passage_share}
        of_tokens = {"Source-KL": "asmi_source_kl", "attention": "asmi_source_attention"}
        for name, column in of_tokens.items():
            if f"{column}_d60_context" in self.answers:
                found[name] = np.array([t.mean() for t in self.column(f"{column}_d60_context")])
        if "score Without-context" in self.answers:
            found["Without-context"] = self.answers["score Without-context"].to_numpy(dtype=float)
        return found

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
        """MSP, mean token entropy and length: the free baselines."""
        free = [self.baseline("MaximumSequenceProbability"), self.baseline("MeanTokenEntropy")]
        return np.column_stack([*free, self.length])

    def tested(self, scores: np.ndarray, correctness: str) -> AddedInformation | None:
        """Do scores know more of errors than the free baselines? None: too few errors for the
        folds."""
        try:
            return adds_information(scores, self.controls, self.wrong(correctness), self.clusters)
        except ValueError:
            return None

    def beyond_free(self, scores: np.ndarray, correctness: str) -> str:
        """The same as it is written."""
        found = self.tested(scores, correctness)
        return added_text(found) if found else "too few errors"


def files_of(folder: Path) -> list[tuple[str, str, str, Path]]:
    """(model, setting, run, file) of what is complete, in the order of these."""
    named = [
        (m, c, r, folder / m / f"{c}.{r}.parquet") for m in MODELS for c in SETTINGS for r in RUNS
    ]
    return [one for one in named if one[-1].exists()]


def load(folder: Path) -> list[Evidence]:
    """All complete runs of settings.

    Raises:
        ValueError: a file of the same form with a name that no table would show.
    """
    found = files_of(folder)
    unknown = sorted(set(folder.glob("*/*.parquet")) - {file for *_, file in found})
    if unknown:
        raise ValueError(
            f"{unknown[0]} is named as no model, setting and run that this script knows: see "
            "MODELS, SETTINGS and RUNS"
        )
    evidence = []
    for model, setting, run, file in found:
        table = pq.read_table(file)
        about = json.loads((table.schema.metadata or {}).get(b"run", b"{}"))
        asked = about.get("data", {}).get("limit")
        # Scores without masks of their own go by their symbols.
        own = {n: of["symbol"] for n, of in about.get("methods", {}).items()}
        short = {f"score {n}": f"score {s}" for n, s in own.items() if s not in METHODS.values()}
        answers = table.to_pandas().rename(columns=short)
        evidence.append(Evidence(model, setting, run, answers, asked))
    for own in evidence:
        if own.run == "sources" and "copied" not in own.answers:
            for again in others(own, evidence, ("copied",)):
                own.shared_with(again)
                own.answers["copied"] = again.answers["copied"]
    return evidence


def others(own: Evidence, evidence: Iterable[Evidence], runs: Sequence[str]) -> list[Evidence]:
    """The runs so named of the same setting."""
    return [
        e for e in evidence if (e.model, e.setting) == (own.model, own.setting) and e.run in runs
    ]


def digest(folder: Path) -> str:
    """What tells the files from others."""
    more = [file for file in sorted(folder.glob("**/*.csv")) if file.parent.name != TABLES]
    return digest_of([*(file for *_, file in files_of(folder)), *more])


def digest_of(files: Iterable[Path]) -> str:
    sums = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    return hashlib.sha256("".join(sums).encode()).hexdigest()[:16]


def labelled(evidence: Iterable[Evidence], correctness: str) -> list[Evidence]:
    """Settings that can be judged by their own answers."""
    return [e for e in evidence if e.run in OWN_ANSWERS and e.ranked(correctness)]


class Table(NamedTuple):
    """Settings as texts, such as "+0.50 [+0.39, +0.60]" or "500 / 237"."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def csv(self) -> str:
        """The same with one plain number a setting: an interval is three columns, a pair two."""
        parts = [_split(name, [row[i] for row in self.rows]) for i, name in enumerate(self.columns)]
        columns = [column for one in parts for column in one]
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
    """A column as one or more of plain numbers, where its texts have a known shape."""
    texts = [text.replace("−", "-") for text in texts]
    if " / " in name:
        before, comma, last = name.rpartition(", ")
        names = last.split(" / ")
        pairs = [text.split(" / ") if text else [""] * len(names) for text in texts]
        columns = zip(names, zip(*pairs, strict=True), strict=True)
        return [part for own, values in columns for part in _split(before + comma + own, values)]
    if name == "answers" and any(" of " in text for text in texts):
        pairs = [text.partition(" of ")[::2] for text in texts]
        return [("answers", [n for n, _ in pairs]), ("planned answers", [n for _, n in pairs])]
    for shape, endings in _SHAPES:
        found = [shape.fullmatch(text) for text in texts]
        if any(found):
            columns = []
            for i, ending in enumerate(endings):
                own = [m[i + 1] if m else "" if i else c for m, c in zip(found, texts, strict=True)]
                columns.append((name.removesuffix(": z (p)") + ending, [*map(_number, own)]))
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
    """Write tables as CSV files, and delete files of tables that are not made any more.

    Args:
        old: names of CSV files there are.
        check: change nothing.

    Returns:
        Names of files that differ, or that did.
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
    """Script -> digest of the files that it last made its tables from."""
    file = folder / MADE_FROM
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def record(folder: Path, script: str, digest: str, check: bool) -> list[str]:
    """Write down what tables were made from.

    Returns:
        The file's name, if that was not written there.
    """
    known = made_from(folder)
    if known.get(script) == digest:
        return []
    if not check:
        text = json.dumps(dict(sorted((known | {script: digest}).items())), indent=2)
        (folder / MADE_FROM).write_text(f"{text}\n", encoding="utf-8")
    return [MADE_FROM]


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


def z_text(value: float) -> str:
    return "" if np.isnan(value) else minus(f"{value:+.1f}")


def added_text(found: AddedInformation) -> str:
    return f"{z_text(found.statistic)} ({p_text(found.p_value)})"


def share(values: np.ndarray) -> str:
    return f"{np.mean(values):.0%}"


def correlation(one: np.ndarray, other: np.ndarray) -> str:
    return minus(f"{rank_correlation(one, other):+.2f}") if np.ptp(one) and np.ptp(other) else "–"
