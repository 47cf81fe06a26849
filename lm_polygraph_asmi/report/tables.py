"""Tables of results in a terminal."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from rich.table import Table

from lm_polygraph_asmi.analysis.clusters import FEW, Interval
from lm_polygraph_asmi.analysis.comparison import auroc, prr_intervals
from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.analysis.mechanism import masking_response
from lm_polygraph_asmi.analysis.prr import PRR, has_contrast, standard_errors
from lm_polygraph_asmi.analysis.right import RIGHT, on_scale, says_nothing
from lm_polygraph_asmi.core.statistics import masked_layer
from lm_polygraph_asmi.results.runs import MSP, Run


def _answers(run: Run, metric: str) -> Labelled:
    """The answers of `Run.finite`; without labels if the quality is not between 0 and 1."""
    finite = run.finite(metric)
    quality = run.quality.loc[finite, metric].to_numpy(dtype=float)
    labels = quality < RIGHT if on_scale(quality) else None
    return Labelled(labels, [run.cluster_keys[i] for i in np.flatnonzero(finite)], quality)


class MethodPRR(NamedTuple):
    """The PRR of one method."""

    prr: PRR  # with its standard error over answers
    interval: Interval  # 95 % interval over clusters
    minus_msp: Interval  # PRR minus the PRR of MSP; NaN for MSP itself, and if there is no MSP


def method_prrs(scores: Mapping[str, ArrayLike], answers: Labelled) -> dict[str, MethodPRR]:
    """The PRR of every method, by name."""
    pairs = [(name, MSP) for name in scores if MSP in scores and name != MSP]
    intervals, differences = prr_intervals(scores, answers, pairs)
    errors = standard_errors([*scores.values()], answers)
    return {
        name: MethodPRR(
            prr=PRR(whole.value, error),
            interval=whole,
            minus_msp=differences.get((name, MSP), Interval(np.nan, np.nan, np.nan)),
        )
        for (name, whole), error in zip(intervals.items(), errors, strict=True)
    }


def prr_rows(run: Run, metric: str) -> list[dict[str, Any]]:
    """PRR of each method of a run with one quality metric, the highest first.

    Returns:
        Rows with the fields

        - `method`
        - `prr`, and its `standard_error` over answers
        - `minus_msp`, the PRR minus that of `MSP`, and the ends `low` and `high` of its 95 %
          interval over clusters
        - `auroc` of detecting wrong answers, which are those with a quality below `RIGHT`

        Undefined values are NaN.
    """
    scores = dict(run.scores[run.finite(metric)].items())
    answers = _answers(run, metric)
    labelled = on_scale(answers.quality)
    rows = [
        {
            "method": name,
            "prr": each.prr.value,
            "standard_error": each.prr.standard_error,
            **dict(zip(("minus_msp", "low", "high"), each.minus_msp, strict=True)),
            "auroc": auroc(scores[name], answers.wrong) if labelled else np.nan,
        }
        for name, each in method_prrs(scores, answers).items()
    ]
    return sorted(rows, key=lambda row: -9 if np.isnan(row["prr"]) else row["prr"], reverse=True)


def prr_table(run: Run, metric: str) -> Table:
    """The result of `prr_rows` as a table for a terminal of 80 columns."""
    table = Table(title=f"PRR over {run.finite(metric).sum()} answers, quality: {metric}")
    table.add_column("method", overflow="fold")
    for name in ("PRR", "minus MSP [95 %]", "AUROC"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in prr_rows(run, metric):
        minus = Interval(row["minus_msp"], row["low"], row["high"])
        table.add_row(
            row["method"],
            "undefined" if np.isnan(row["prr"]) else f"{row['prr']:+.2f}",
            "" if np.isnan(minus.value) else str(minus),
            "undefined" if np.isnan(row["auroc"]) else f"{row['auroc']:.2f}",
            style="bold" if row["method"] in run.methods else None,
        )
    return table


def about_quality(run: Run, metric: str) -> str:
    """Notes on a metric and its answers, printed below the table."""
    answers, unlabelled = _answers(run, metric), run.unlabelled(metric)
    labelled, left_out = on_scale(answers.quality), int((~run.finite(metric)).sum())
    right = (
        f"Right answers ({metric} at least {RIGHT}): {(~answers.wrong).mean():.0%}."
        if labelled
        else f"{metric} is outside 0 to 1, so it is unknown which answers are right."
    )
    clusters = "Clusters (stories, passages or prompts), which intervals are over"
    rouge = "Quality is ROUGE overlap with the gold answer: do not compare with AlignScore values."
    lines = {
        right: True,
        f"Left out: {unlabelled}.": unlabelled,
        rouge: metric.startswith("Rouge"),
        f"Left out: {left_out} answers without a finite score or quality.": left_out,
        "All answers are equally good or bad: there are no errors to rank.": not has_contrast(
            answers.quality
        ),
        f"{clusters}: {answers.n_clusters}.": True,
        FEW: labelled and answers.too_few,
    }
    return "\n".join(line for line, holds in lines.items() if holds)


def parameters_line(used: Mapping[str, Any]) -> str:
    """One line with the settings that ASMI used in a run at one depth."""
    return (
        f"ASMI at depth {100 * used['depth']:g}%: {masked_layer(used)}, "
        f"H = {used['num_heads']}, p = {used['mask_rate']}, S = {used['num_masks']}, "
        f"K = {used['top_k']}, {used['mask_sampler']} masks, scope {used['scope']}"
    )


def about_run(run: Run) -> str:
    """How to read the tables of a run, and the settings that ASMI used."""
    lines = [
        "PRR: 1 = errors rejected first, 0 = chance, negative = worse than chance. MSP: "
        "MaximumSequenceProbability. AUROC: 0.5 = chance. PRR gives most weight to the few most "
        "confident answers; AUROC weighs all answers alike.",
    ]
    empty = says_nothing(run.stats.get("greedy_texts"))
    if empty is not None and empty.any():
        lines.append(f"Empty answers, which cannot be right: {empty.sum()} of {len(empty)}.")
    for used in run.settings():
        lines.append(f"{parameters_line(used)}, {used['attention']} attention.")
        if saved := run.at(used["depth"]):
            response = masking_response([row["mi"] for row in saved])
            lines.append(
                f"Masking response: MI_t per token, mean {response.mean:.4f} nats, median "
                f"{response.median:.4f}."
            )
    if seconds := run.stats.get("asmi_seconds"):
        lines.append(f"ASMI took {np.median(seconds):.1f} s per answer (median).")
    return "\n".join(lines)
