"""Do results depend on the correctness label? Thresholds, metrics, noise, length, audit."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lm_polygraph_asmi.analysis.clusters import RESAMPLES, Interval
from lm_polygraph_asmi.analysis.comparison import auroc_interval, prr_intervals
from lm_polygraph_asmi.analysis.labels import (
    THRESHOLDS,
    auroc_by_label,
    label_noise,
    same_order,
    strata,
)
from lm_polygraph_asmi.analysis.stability import rank_correlation
from lm_polygraph_asmi.prompts import last_question
from lm_polygraph_asmi.report import figures
from lm_polygraph_asmi.report.item import Items, frame
from lm_polygraph_asmi.report.items.benchmark import competes
from lm_polygraph_asmi.results.run_groups import RunGroup, Unavailable, once
from lm_polygraph_asmi.results.runs import RIGHT, on_scale

AUDITED = 50


def _qualities(group: RunGroup) -> dict[str, np.ndarray]:
    """Quality of the rows in use, for metrics that are finite and from 0 to 1 for all of them."""
    table = group.run.quality.iloc[group.rows]
    return {str(name): table[name].to_numpy(dtype=float) for name in table if on_scale(table[name])}


def correctness_labels(groups: Sequence[RunGroup]) -> Items:
    """Order of the methods at other thresholds and by every saved metric."""
    title = "Other correctness labels: thresholds and metrics"

    def compute(group: RunGroup) -> list[dict[str, Any]]:
        group.need_errors()
        scores = {m: group.score(m) for m in group.scores if competes(m, group)}
        if len(scores) < 3:
            raise Unavailable("fewer than three methods: no order to compare")
        u_sem = {} if group.u_sem is None else {"u_sem": group.u_sem}
        aurocs = auroc_by_label(scores | u_sem, _qualities(group))
        reference = {m: aurocs[group.metric, RIGHT][m] for m in scores}
        rows = []
        for metric in dict.fromkeys(metric for metric, _ in aurocs):
            by_threshold = {t: aurocs[metric, t] for t in THRESHOLDS if (metric, t) in aurocs}
            row: dict[str, Any] = {"setting": group.label, "correctness": metric}
            for t in THRESHOLDS:
                order = {m: by_threshold[t][m] for m in scores} if t in by_threshold else {}
                row[f"τ at {t:g}"] = same_order(reference, order) if order else None
            if RIGHT in by_threshold:
                row["highest at 0.5"] = max(scores, key=lambda m: by_threshold[RIGHT][m])
            if u_sem:
                values = [by_method["u_sem"] for by_method in by_threshold.values()]
                row |= {"u_sem, lowest": min(values), "u_sem, highest": max(values)}
            rows.append(row)
        return rows

    notes = [
        "τ: Kendall's tau-b between the methods' order by AUROC with this correctness label (an "
        "answer is right from the threshold on) and with the report's label at 0.5 (1 = same "
        "order, 0 = unrelated). Methods: baselines and the variants at the operating depth. Last "
        "columns: AUROC of u_sem over the thresholds. A dash: all answers right, or all wrong."
    ]
    return frame("correctness_labels", title, groups, compute, notes)


def noise(groups: Sequence[RunGroup]) -> Items:
    """How many wrong labels would change the verdict that a score ranks errors."""
    title = "How much label noise a verdict tolerates"

    @once
    def compute(group: RunGroup) -> list[dict[str, Any]]:
        group.need_errors()
        rows = []
        for name, score in (("u_sem", group.u_sem), ("MSP", group.msp)):
            if score is not None:
                auroc = auroc_interval(score, group.answers)
                share = label_noise(auroc)
                rows.append(
                    {
                        "setting": group.label,
                        "score": name,
                        "AUROC": auroc,
                        "ranks errors": _ranks(auroc),
                        "noise that erases": share if share >= 0 else None,
                        "noise that may hide": -share if share < 0 else None,
                    }
                )
        return rows

    notes = [
        "AUROC with 95 % over clusters. If a share e0 of answers labelled right is truly wrong, "
        "and e1 of those labelled wrong truly right, AUROC − 0.5 is (1 − e0 − e1) times its true "
        "value. Erases: additional e0 + e1 with which the interval would include 0.5. May hide: "
        "e0 + e1 in these labels with which the interval of the true AUROC would exclude 0.5. "
        "Only random noise; the width of intervals is assumed to be unchanged."
    ]
    return frame("label_noise", title, groups, compute, notes)


def _ranks(auroc: Interval) -> str:
    if not auroc.excludes(0.5):
        return "inconclusive"
    return "yes" if auroc.value > 0.5 else "worse than chance"


def length(groups: Sequence[RunGroup]) -> Items:
    """PRR within answers of similar length, and without empty answers."""
    title = "Length: PRR within strata"

    @once
    def compute(group: RunGroup) -> list[dict[str, Any]]:
        group.need_errors()
        u_sem, msp, lengths = group.need("u_sem", "msp", "lengths")
        stratum = strata(lengths)
        chosen = {"all": np.ones(len(group), dtype=bool)}
        for number in range(stratum.max() + 1):
            low, high = (int(end(lengths[stratum == number])) for end in (np.min, np.max))
            tokens = f"{low}" if low == high else f"{low} to {high}"
            chosen[f"{tokens} token{'' if high == 1 else 's'}"] = stratum == number
        if group.empty is not None and group.empty.any():
            chosen["without empty answers"] = ~group.empty
        rows = []
        for name, selected in chosen.items():
            if not selected.any():
                continue
            answers = group.answers.take(selected).resampled(RESAMPLES)
            scores = {"u_sem": u_sem[selected], "MSP": msp[selected], "length": lengths[selected]}
            intervals, paired = prr_intervals(scores, answers, [("u_sem", "MSP")])
            rows.append(
                {
                    "setting": group.label,
                    "answers of": name,
                    "n": int(selected.sum()),
                    "error rate": float(group.wrong[selected].mean()),
                    "PRR u_sem": intervals["u_sem"],
                    "PRR MSP": intervals["MSP"],
                    "PRR length": intervals["length"] if np.ptp(lengths[selected]) else None,
                    "u_sem Δ MSP": paired["u_sem", "MSP"],
                    "ρ of u_sem and length": rank_correlation(u_sem[selected], lengths[selected])
                    if np.ptp(u_sem[selected]) and np.ptp(lengths[selected])
                    else None,
                }
            )
        return rows

    def draw(table: pd.DataFrame) -> Figure:
        panels = {
            group: {
                f"{answers}, n = {n}": difference
                for answers, n, difference in zip(
                    rows["answers of"], rows["n"], rows["u_sem Δ MSP"], strict=True
                )
            }
            for group, rows in table.groupby("setting", sort=False)
        }
        return figures.forest(panels, "PRR, u_sem minus MSP, 95 % over clusters")

    notes = [
        "Thirds by the number of tokens, equal lengths together; PRR is normalised within each. "
        "Length: the number of tokens as a score. If a correctness label depends on length, a "
        "score that follows length ranks errors for that reason; within a stratum, that effect is "
        "small. A dash: all answers of the stratum have one length or are equally good; the "
        "figure then leaves it out. Empty: without a letter or digit."
    ]
    return frame("length", title, groups, compute, notes, draw, signed=("u_sem Δ MSP",))


def audit(groups: Sequence[RunGroup]) -> Items:
    """Answers for a human to label: metrics disagree, else score and label disagree."""
    title = "For a human audit"

    def compute(group: RunGroup) -> list[dict[str, Any]]:
        prompts, answers = group.saved("input_texts"), group.saved("greedy_texts")
        references = group.saved("target_texts")
        (u_sem,) = group.need("u_sem")
        if not prompts or not answers:
            raise Unavailable("prompts or answers not saved")
        qualities = _qualities(group)
        labels = np.array([quality >= RIGHT for quality in qualities.values()])
        disagree = np.ptp(labels.astype(int), axis=0) > 0
        rank = np.argsort(np.argsort(u_sem, kind="stable"), kind="stable") / len(group)
        # How far the score contradicts the label: wrong but robust, right but fragile.
        contradiction = np.where(group.wrong, 1 - rank, rank)
        order = np.lexsort([-contradiction, ~disagree])[:AUDITED]
        return [
            {
                "setting": group.label,
                "id": group.ids[i] if group.ids else str(group.rows[i]),
                "question": last_question(prompts[i]),
                "reference": str(references[i])[:200] if references else None,
                "answer": answers[i].strip()[:200],
                **{metric: float(quality[i]) for metric, quality in qualities.items()},
                "u_sem, rank": float(rank[i]),
                "disagree": "metrics" if disagree[i] else "score and label",
                "right by a human": None,
            }
            for i in order
        ]

    notes = [
        f"Up to {AUDITED} answers per setting: first those where metrics disagree, then those "
        "where the score contradicts the label (wrong but robust, right but fragile). Fill in the "
        "last column by hand. These answers are selected for disagreement: their share of label "
        "errors does not estimate that of all answers."
    ]
    return frame("audit", title, groups, compute, notes, inline=False)
