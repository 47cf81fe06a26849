"""Make the tables of the pages of evidence anew, from the small files beside them.

    python scripts/evidence_pages.py            # writes them into docs/evidence/*.md
    python scripts/evidence_pages.py --check    # says which would change

A table stands between `<!-- table NAME -->` and `<!-- end -->`; all else on a page is written by
hand. The files, docs/evidence/MODEL/CELL.RUN.parquet, are made by scripts/evidence.sh.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import click
import numpy as np
import pandas as pd

from lm_polygraph_asmi.analysis import (
    Interval,
    adds_information,
    augrc,
    auroc_interval,
    holm,
    prr_draws,
    rank_correlation,
    stacked_gain,
)
from lm_polygraph_asmi.analysis.clusters import percentile_interval, two_sided
from lm_polygraph_asmi.analysis.prr import normalised_prr

EVIDENCE = Path(__file__).parents[1] / "docs" / "evidence"
RESAMPLES = 2000
AGGREGATIONS: dict[str, Callable[[np.ndarray], float]] = {
    "mean": np.mean,
    "sum": np.sum,
    "max": np.max,
    "first": lambda tokens: tokens[0],
}
MODELS = {
    "smollm2": "SmolLM2 0.13B",
    "gemma": "Gemma-3 0.27B",
    "qwen05": "Qwen2.5-Coder 0.5B",
    "qwen15": "Qwen2.5-Coder 1.5B",
}
CELLS = {
    "open": "XQuAD, bare prompt",
    "open-worked": "XQuAD, worked questions",
    "closed": "closed book, bare prompt",
    "closed-worked": "closed book, worked questions",
    "babi": "BabiQA",
}
JUDGES = {"stands": "the reference stands in the answer", "rouge": "ROUGE-L"}


@dataclass(frozen=True)
class Evidence:
    """One model on one data set: a row per answer, with statistics of its tokens."""

    model: str
    cell: str
    answers: pd.DataFrame

    @property
    def clusters(self) -> list[str]:
        return list(self.answers["cluster"])

    def quality(self, judge: str) -> np.ndarray:
        column = "ReferenceInAnswer" if judge == "stands" else "quality Rouge_rougeL"
        return self.answers[column].to_numpy(dtype=float)

    def wrong(self, judge: str) -> np.ndarray:
        return self.quality(judge) < 0.5

    @cached_property
    def length(self) -> np.ndarray:
        return self.answers["asmi_entropy"].map(len).to_numpy()

    def baseline(self, name: str) -> np.ndarray:
        return self.answers[f"score {name}"].to_numpy(dtype=float)

    def tokens(self, method: str, source: str = "all") -> list[np.ndarray]:
        """Per-token scores of ASMI or Sem-ASMI, in nats; higher = more uncertain."""
        ending = "_d60" if source == "all" else f"_d60_{source}"
        scores = [np.asarray(own, dtype=float) for own in self.answers[f"asmi_mi{ending}"]]
        if method == "Sem-ASMI":
            agreements = map(np.asarray, self.answers[f"asmi_agreement{ending}"])
            scores = [own * (1 - a) for own, a in zip(scores, agreements, strict=True)]
        return scores

    def score(self, method: str, source: str = "all", aggregation: str = "mean") -> np.ndarray:
        return np.array([AGGREGATIONS[aggregation](own) for own in self.tokens(method, source)])

    @property
    def controls(self) -> np.ndarray:
        """MSP, mean token entropy and length: what is free."""
        free = [self.baseline("MaximumSequenceProbability"), self.baseline("MeanTokenEntropy")]
        return np.column_stack([*free, self.length])


def load(folder: Path) -> list[Evidence]:
    """All cells below a folder that hold answers, in the order of `MODELS` and `CELLS`."""
    found = []
    for model in MODELS:
        for cell in CELLS:
            file = folder / model / f"{cell}.sources.parquet"
            if file.exists():
                found.append(Evidence(model, cell, pd.read_parquet(file)))
    return found


def prr(
    scores: dict[str, np.ndarray], evidence: Evidence, judge: str
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """PRR of each, and on shared resamples of clusters."""
    quality = evidence.quality(judge)
    drawn = prr_draws(list(scores.values()), quality, evidence.clusters, RESAMPLES)
    values = {name: normalised_prr(own, quality) for name, own in scores.items()}
    return values, {name: drawn[:, i] for i, name in enumerate(scores)}


def table(columns: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(
        [f"| {' | '.join(columns)} |", f"| {' | '.join(['---'] * len(columns))} |", *body]
    )


def signed(interval: Interval) -> str:
    if np.isnan(interval.low):
        return "undefined" if np.isnan(interval.value) else f"{interval.value:+.2f}"
    return f"{interval.value:+.2f} [{interval.low:+.2f}, {interval.high:+.2f}]".replace("-", "−")


def p_text(value: float) -> str:
    return "" if np.isnan(value) else "< .001" if value < 0.001 else f"{value:.3f}".lstrip("0")


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
        scores = {source: evidence.score(method, source) for source in ("context", "all")}
        values, drawn = prr(scores, evidence, judge)
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
    *((model, "babi") for model in MODELS),
}  # fmt: skip


def source_table(cells: list[Evidence], judge: str, method: str = "Sem-ASMI") -> str:
    planned = [c for c in cells if (c.model, c.cell) in PLANNED]
    tests = [SourceTests.of(cell, judge, method) for cell in planned]
    adjusted = [
        holm([getattr(test, p) for test in tests]) for p in ("p_passage", "p_difference", "p_added")
    ]

    def rows() -> Iterator[Sequence[str]]:
        for i, test in enumerate(tests):
            e = test.evidence
            wrong = e.wrong(judge)
            yield [
                MODELS[e.model],
                CELLS[e.cell],
                f"{len(wrong)} / {len(set(e.clusters))} / {int(wrong.sum())}",
                signed(test.whole),
                signed(test.passage),
                p_text(adjusted[0][i]),
                signed(test.difference),
                p_text(adjusted[1][i]),
                f"{test.statistic:+.1f}".replace("-", "−"),
                p_text(adjusted[2][i]),
            ]

    columns = [
        "model", "data", "answers / clusters / wrong", "PRR, all", "PRR, passage", "p (1)",
        "passage − all", "p (2)", "beyond what is free, z", "p (3)",
    ]  # fmt: skip
    return table(columns, rows())


def worth_table(cells: list[Evidence], judge: str) -> str:
    def rows() -> Iterator[Sequence[str]]:
        for e in cells:
            wrong = e.wrong(judge)
            scores = {
                "msp": e.baseline("MaximumSequenceProbability"),
                "perplexity": e.baseline("Perplexity"),
                "asmi": e.score("ASMI"),
                "sem": e.score("Sem-ASMI"),
                "sum": e.score("Sem-ASMI", aggregation="sum"),
            }
            values, drawn = prr(scores, e, judge)
            intervals = {n: percentile_interval(values[n], drawn[n]) for n in scores}
            gaps = [
                percentile_interval(values["sem"] - values[n], drawn["sem"] - drawn[n])
                for n in ("msp", "perplexity")
            ]
            try:
                added = adds_information(scores["sem"], e.controls, wrong, e.clusters)
                said = f"{added.statistic:+.1f} ({p_text(added.p_value)})".replace("-", "−")
            except ValueError:
                said = "too few errors"
            yield [
                f"{MODELS[e.model]}, {CELLS[e.cell]}",
                f"{len(wrong)} / {len(set(e.clusters))} / {1 - wrong.mean():.0%}",
                *(signed(intervals[n]) for n in scores),
                *map(signed, gaps),
                said,
            ]

    columns = [
        "cell", "answers / clusters / right", "MSP", "Perplexity", "ASMI", "Sem-ASMI",
        "Sem-ASMI, sum", "Sem − MSP", "Sem − Perplexity", "beyond what is free, z (p)",
    ]  # fmt: skip
    return table(columns, rows())


def aggregation_table(cells: list[Evidence], judge: str) -> str:
    def rows() -> Iterator[Sequence[str]]:
        for e in cells:
            for method in ("ASMI", "Sem-ASMI"):
                scores = {a: e.score(method, aggregation=a) for a in AGGREGATIONS}
                values, drawn = prr(scores, e, judge)
                cuts = [signed(percentile_interval(values[a], drawn[a])) for a in scores]
                along = [
                    f"{rank_correlation(own, e.length):+.2f}".replace("-", "−")
                    for own in scores.values()
                ]
                yield [f"{MODELS[e.model]}, {CELLS[e.cell]}", method, *cuts, " / ".join(along)]

    columns = ["cell", "score", *AGGREGATIONS, "rank correlation with length"]
    return table(columns, rows())


def other_measures(cells: list[Evidence], judge: str) -> str:
    def rows() -> Iterator[Sequence[str]]:
        for e in cells:
            wrong = e.wrong(judge)
            scores = {
                "MSP": e.baseline("MaximumSequenceProbability"),
                "Perplexity": e.baseline("Perplexity"),
                "ASMI": e.score("ASMI"),
                "Sem-ASMI": e.score("Sem-ASMI"),
            }
            areas = {n: auroc_interval(s, wrong, e.clusters) for n, s in scores.items()}
            try:
                gain = stacked_gain(scores["Sem-ASMI"], e.controls, wrong, e.clusters)
                stacked = signed(gain.auroc)
            except ValueError:
                stacked = "too few errors"
            yield [
                f"{MODELS[e.model]}, {CELLS[e.cell]}",
                *(f"{i.value:.2f} [{i.low:.2f}, {i.high:.2f}]" for i in areas.values()),
                " / ".join(f"{augrc(s, wrong):.3f}" for s in scores.values()),
                stacked,
            ]

    columns = [
        "cell", "AUROC: MSP", "Perplexity", "ASMI", "Sem-ASMI", "AUGRC, the same four",
        "what Sem-ASMI adds to a stack, AUROC",
    ]  # fmt: skip
    return table(columns, rows())


TABLES: dict[str, Callable[[list[Evidence]], str]] = {}
for _judge in JUDGES:
    TABLES[f"source {_judge}"] = partial(source_table, judge=_judge)
    TABLES[f"source raw {_judge}"] = partial(source_table, judge=_judge, method="ASMI")
    TABLES[f"worth {_judge}"] = partial(worth_table, judge=_judge)
    TABLES[f"aggregation {_judge}"] = partial(aggregation_table, judge=_judge)
    TABLES[f"measures {_judge}"] = partial(other_measures, judge=_judge)

_PLACE = re.compile(r"(<!-- table ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str, cells: list[Evidence]) -> str:
    """A page with its tables made anew."""
    return _PLACE.sub(lambda m: f"{m[1]}{TABLES[m[2]](cells)}\n{m[3]}", page)


@click.command(help=__doc__)
@click.option("--check", is_flag=True, help="Change nothing; exit with 1 where a table differs.")
def main(check: bool) -> None:
    cells = load(EVIDENCE)
    stale = []
    for page in sorted(EVIDENCE.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        made = filled(text, cells)
        if made != text:
            stale.append(page.name)
            if not check:
                page.write_text(made, encoding="utf-8")
    click.echo(f"{'to be made anew' if check else 'made anew'}: {', '.join(stale) or 'nothing'}")
    raise SystemExit(bool(check and stale))


if __name__ == "__main__":
    main()
