"""Do results depend on the correctness label? Thresholds, metrics, noise, length, audit."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lm_polygraph_asmi.analysis.clusters import Interval
from lm_polygraph_asmi.analysis.comparison import auroc_interval, prr_intervals
from lm_polygraph_asmi.analysis.labels import (
    THRESHOLDS,
    auroc_by_label,
    label_noise,
    same_order,
    strata,
)
from lm_polygraph_asmi.analysis.stability import rank_correlation
from lm_polygraph_asmi.report import figures
from lm_polygraph_asmi.report.item import Items, frame
from lm_polygraph_asmi.report.items.benchmark import competes
from lm_polygraph_asmi.report.items.mechanism import last_question
from lm_polygraph_asmi.results.run_groups import RunGroup, Unavailable
from lm_polygraph_asmi.results.runs import RIGHT

AUDITED = 50


def _qualities(group: RunGroup) -> dict[str, np.ndarray]:
    """Quality of the rows in use, for metrics that are finite for all of them."""
    table = group.run.quality.iloc[group.rows]
    return {
        str(name): table[name].to_numpy(dtype=float)
        for name in table
        if np.isfinite(table[name]).all()
    }


def correctness_labels(groups: Sequence[RunGroup]) -> Items:
    """Order of the methods at other thresholds and by every saved metric."""
    title = "Other correctness labels: thresholds and metrics"

    def compute(group: RunGroup) -> list[dict[str, Any]]:
        group.need_errors()
        scores = {m: group.score(m) for m in group.scores if competes(m, group)}
        if len(scores) < 3:
            raise Unavailable("fewer than three methods: no order to compare")
        u_sem = {} if group.u_sem is None else {"u_sem": group.u_sem}
        found = auroc_by_label(scores | u_sem, _qualities(group))
        reference = {m: found[group.metric, RIGHT][m] for m in scores}
        rows = []
        for metric in dict.fromkeys(metric for metric, _ in found):
            own = {at: found[metric, at] for at in THRESHOLDS if (metric, at) in found}
            row: dict[str, Any] = {"setting": group.label, "correctness": metric}
            for at in THRESHOLDS:
                order = {m: own[at][m] for m in scores} if at in own else {}
                row[f"τ at {at:g}"] = same_order(reference, order) if order else None
            if RIGHT in own:
                row["highest at 0.5"] = max(scores, key=lambda m: own[RIGHT][m])
            if u_sem:
                values = [by_method["u_sem"] for by_method in own.values()]
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

    def compute(group: RunGroup) -> list[dict[str, Any]]:
        group.need_errors()
        rows = []
        for name, score in (("u_sem", group.u_sem), ("MSP", group.msp)):
            if score is not None:
                found = auroc_interval(score, group.wrong, group.clusters)
                share = label_noise(found)
                rows.append(
                    {
                        "setting": group.label,
                        "score": name,
                        "AUROC": found,
                        "ranks errors": _ranks(found),
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


def _ranks(found: Interval) -> str:
    if not found.excludes(0.5):
        return "inconclusive"
    return "yes" if found.value > 0.5 else "worse than chance"


def length(groups: Sequence[RunGroup]) -> Items:
    """PRR within answers of similar length, and without empty answers."""
    title = "Length: PRR within strata"

    def compute(group: RunGroup) -> list[dict[str, Any]]:
        group.need_errors()
        u_sem, msp, lengths = group.need("u_sem", "msp", "lengths")
        part = strata(lengths)
        chosen = {"all": np.ones(len(group), dtype=bool)}
        for number in range(part.max() + 1):
            low, high = (int(end(lengths[part == number])) for end in (np.min, np.max))
            tokens = f"{low}" if low == high else f"{low} to {high}"
            chosen[f"{tokens} token{'' if high == 1 else 's'}"] = part == number
        if group.empty is not None and group.empty.any():
            chosen["without empty answers"] = ~group.empty
        rows = []
        for name, inside in chosen.items():
            keys = [c for c, used in zip(group.clusters, inside, strict=True) if used]
            if not keys:
                continue
            scores = {"u_sem": u_sem[inside], "MSP": msp[inside], "length": lengths[inside]}
            alone, paired = prr_intervals(
                scores, group.quality[inside], keys, [("u_sem", "MSP")], 2000
            )
            rows.append(
                {
                    "setting": group.label,
                    "answers of": name,
                    "n": int(inside.sum()),
                    "error rate": float(group.wrong[inside].mean()),
                    "PRR u_sem": alone["u_sem"],
                    "PRR MSP": alone["MSP"],
                    "PRR length": alone["length"] if np.ptp(lengths[inside]) else None,
                    "u_sem Δ MSP": paired["u_sem", "MSP"],
                    "ρ of u_sem and length": rank_correlation(u_sem[inside], lengths[inside])
                    if np.ptp(u_sem[inside]) and np.ptp(lengths[inside])
                    else None,
                }
            )
        return rows

    def draw(table: pd.DataFrame) -> Figure:
        panels = {
            group: {
                f"{answers}, n = {n}": difference
                for answers, n, difference in zip(
                    own["answers of"], own["n"], own["u_sem Δ MSP"], strict=True
                )
            }
            for group, own in table.groupby("setting", sort=False)
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
        calls = np.array([quality >= RIGHT for quality in qualities.values()])
        split = np.ptp(calls.astype(int), axis=0) > 0
        place = np.argsort(np.argsort(u_sem, kind="stable"), kind="stable") / len(group)
        # How far the score contradicts the label: wrong but robust, right but fragile.
        against = np.where(group.wrong, 1 - place, place)
        order = np.lexsort([-against, ~split])[:AUDITED]
        return [
            {
                "setting": group.label,
                "id": group.ids[i] if group.ids else str(group.rows[i]),
                "question": last_question(prompts[i]),
                "reference": str(references[i])[:200] if references else None,
                "answer": answers[i].strip()[:200],
                **{metric: float(quality[i]) for metric, quality in qualities.items()},
                "u_sem, rank": float(place[i]),
                "disagree": "metrics" if split[i] else "score and label",
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
