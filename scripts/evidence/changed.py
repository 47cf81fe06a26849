"""Tables of the results pages: answers to a changed passage, to another passage, or to none.

In settings `changed`, the gold answer in the passage was replaced by another answer of its kind; in
`exchanged`, the passage by one of another article (scripts/build_counterfactual.py). `closed-book`
has no passage.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from evidence import (
    CHANGED,
    CLOSED,
    MAIN_RUNS,
    MIN_ANSWERS,
    Evidence,
    Table,
    minus,
    runs_like,
    share,
    signed,
    table,
    unsigned,
)
from keep import BEFORE

from lm_polygraph_asmi.analysis import (
    Clustered,
    Labelled,
    auroc_interval,
    cluster_interval,
    prr_intervals,
)

RESAMPLES = 2000
SIGNALS = ("MSP", "Perplexity", "ASMI", "Sem-ASMI", "Sem-ASMI, sum")
EXCHANGED = ("exchanged", "exchanged-few-shot")


def signals_of(e: Evidence) -> dict[str, np.ndarray]:
    """Signals that could detect whether an answer followed its passage."""
    return {**e.signals, "Sem-ASMI, passage": e.score("Sem-ASMI", "context"), **e.dependence}


def followed(e: Evidence) -> tuple[np.ndarray, np.ndarray]:
    """Whether each answer contains the gold answer of the changed, and of the original passage."""
    return e.quality("contains") >= 0.5, e.answers[BEFORE].to_numpy(dtype=float) >= 0.5


def changed_runs(evidence: list[Evidence]) -> list[Evidence]:
    return [
        e for e in evidence if e.setting in CHANGED and BEFORE in e.answers and e.run == "sources"
    ]


def followed_table(evidence: list[Evidence]) -> Table:
    """How often answers follow the changed passage, or are correct with the original passage."""
    rows = []
    for e in changed_runs(evidence):
        now, before = followed(e)
        originals = [o for o in original_runs(e, evidence) if o.has("contains")]
        rows.append(
            [e.label, e.size, share(now & ~before), share(before & ~now), share(now & before),
             share(~now & ~before),
             share(~originals[0].wrong("contains")) if originals else "not measured"]
        )  # fmt: skip
    columns = [
        "setting",
        "answers / clusters",
        "as the changed passage says",
        "as the original passage says",
        "both",
        "neither",
        "correct with the original passage",
    ]
    return table(columns, rows)


def original_runs(e: Evidence, evidence: list[Evidence]) -> list[Evidence]:
    """Runs on the same questions with the original passages."""
    original = Evidence(e.model, CHANGED[e.setting], e.run, e.answers)
    return runs_like(original, evidence, ("sources",))


def detection_table(evidence: list[Evidence]) -> Table:
    """AUROC of each signal as a detector of answers that do not follow the changed passage."""
    rows = []
    for e in changed_runs(evidence):
        now, before = followed(e)
        exactly_one = now != before
        for name, score in signals_of(e).items():
            shown = []
            for subset, positive in ((np.ones(len(now), bool), ~now), (exactly_one, before)):
                target = positive[subset]
                if min(target.sum(), (~target).sum()) < MIN_ANSWERS:
                    shown.append("too few")
                    continue
                clusters = [c for c, selected in zip(e.clusters, subset, strict=True) if selected]
                answers = Labelled(target, clusters, resamples=RESAMPLES)
                shown.append(unsigned(auroc_interval(score[subset], answers)))
            rows.append([e.label, name, *shown])
    columns = [
        "setting", "signal", "AUROC, higher if the changed passage was not followed",
        "AUROC, original against changed answer",
    ]  # fmt: skip
    return table(columns, rows)


def exchanged_table(evidence: list[Evidence]) -> Table:
    """Dependence of answers on their own passage, and on a passage of another article.

    Medians over answers; the difference of medians is paired over the same resamples.
    """
    rows = []
    for e in evidence:
        if e.setting not in EXCHANGED or e.run != "sources":
            continue
        for original in original_runs(e, evidence):
            original = original.select(original.answers["id"].isin(e.answers["id"]).to_numpy())
            row_of = {name: i for i, name in enumerate(e.answers["id"])}
            order = [row_of[name] for name in original.answers["id"]]
            after, before = signals_of(e), signals_of(original)
            for name in (name for name in (*original.dependence, "ASMI", "MSP") if name in after):
                first, second = before[name], after[name][order]

                def median_change(
                    rows: np.ndarray, first: np.ndarray = first, second: np.ndarray = second
                ) -> float:
                    return float(np.median(second[rows]) - np.median(first[rows]))

                change = cluster_interval(median_change, Clustered(original.clusters, RESAMPLES))
                rows.append(
                    [original.label, original.size, name,
                     f"{np.median(first):.3g}", f"{np.median(second):.3g}",
                     minus(f"{change.value:+.3g} [{change.low:+.3g}, {change.high:+.3g}]")]
                )  # fmt: skip
    columns = [
        "setting",
        "answers / clusters",
        "median of",
        "own passage",
        "another passage",
        "difference",
    ]
    return table(columns, rows)


def _mean(values: np.ndarray, rows: np.ndarray) -> float:
    return float(values[rows].mean())


def closed_table(evidence: list[Evidence]) -> Table:
    """Correctness without the passage, and how often scores are higher without it."""
    rows = []
    for e in evidence:
        if e.setting not in CLOSED or e.run not in MAIN_RUNS:
            continue
        prr = ["too few correct"] * 2
        if e.ranked("rouge"):
            scores = {name: e.signals[name] for name in ("MSP", "Sem-ASMI")}
            intervals, _ = prr_intervals(scores, e.labels("rouge", RESAMPLES))
            prr = [signed(intervals[name]) for name in scores]
        open_book = Evidence(e.model, CLOSED[e.setting], e.run, e.answers)
        higher = [""] * (1 + len(e.signals))
        for opened in runs_like(open_book, evidence, MAIN_RUNS):
            row_of = {name: i for i, name in enumerate(opened.answers["id"])}
            both = e.answers["id"].isin(list(row_of)).to_numpy()
            closed, order = e.select(both), [row_of[name] for name in e.answers["id"][both]]
            higher = [str(len(order))]
            for name, score in closed.signals.items():
                rises = (score > opened.signals[name][order]).astype(float)
                share_of = partial(_mean, rises)
                higher.append(
                    unsigned(cluster_interval(share_of, Clustered(closed.clusters, RESAMPLES)))
                )
        correctness_labels = [share(~e.wrong(correctness)) for correctness in ("contains", "rouge")]
        rows.append([e.label, e.size, *correctness_labels, *prr, *higher])
    columns = [
        "setting", "answers / clusters", "correct (contains)", "correct (ROUGE-L)",
        "PRR of MSP (ROUGE-L)", "PRR of Sem-ASMI (ROUGE-L)", "answers also with the passage",
        *(f"share higher without it, {name}" for name in SIGNALS),
    ]  # fmt: skip
    return table(columns, rows)


TABLES: dict[str, Callable[[list[Evidence]], Table]] = {
    "changed followed": followed_table,
    "changed telling": detection_table,
    "exchanged": exchanged_table,
    "closed-book": closed_table,
}
