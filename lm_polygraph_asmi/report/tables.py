"""Tables of results in a terminal."""

from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from lm_polygraph_asmi.analysis.clusters import FEW, Interval
from lm_polygraph_asmi.analysis.comparison import augrc, auroc, prr_intervals
from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.analysis.prr import has_contrast, prr_with_error
from lm_polygraph_asmi.results.names import masked_layer
from lm_polygraph_asmi.results.runs import MSP, RIGHT, Run, on_scale, says_nothing

SIDE_MODELS = ("nli_path", "cross_encoder_path", "align_score_path")


def prr_rows(run: Run, metric: str) -> list[dict[str, Any]]:
    """PRR per estimator, best first, for one quality metric of a run, as plain values.

    Returns:
        For each `method`: `prr` and its `standard_error` over answers; `auroc` and `augrc` for
        detecting wrong answers (quality below `RIGHT`; AUGRC: lower = better), undefined for a
        metric outside 0 to 1; where clusters are
        known, the difference of PRR from `MSP` with its 95 % interval over clusters, `minus_msp`,
        `low` and `high`. None: undefined.
    """
    finite = run.finite(metric)
    quality = run.quality.loc[finite, metric]
    scores = {name: run.scores.loc[finite, name] for name in run.scores}
    keys = range(len(finite)) if run.clusters is None else run.clusters
    clusters = [key for key, ok in zip(keys, finite, strict=True) if ok]
    labels = quality < RIGHT if on_scale(quality) else None
    answers = Labelled(labels, clusters, quality)
    rows = {name: prr_with_error(score, answers) for name, score in scores.items()}
    differences: dict[tuple[str, str], Interval] = {}
    if run.clusters is not None and MSP in scores:
        pairs = [(name, MSP) for name in scores if name != MSP]
        _, differences = prr_intervals(scores, answers, pairs)
    results = []
    for name, prr in sorted(rows.items(), key=lambda row: -np.nan_to_num(row[1].value, nan=-9)):
        row: dict[str, Any] = {
            "method": name,
            "prr": _plain(prr.value),
            "standard_error": _plain(prr.standard_error),
            "auroc": _plain(area := np.nan if labels is None else auroc(scores[name], labels)),
            "augrc": None if np.isnan(area) else _plain(augrc(scores[name], answers.wrong)),
        }
        if (name, MSP) in differences:
            difference = differences[name, MSP]
            row |= {
                "minus_msp": _plain(difference.value),
                "low": _plain(difference.low),
                "high": _plain(difference.high),
            }
        results.append(row)
    return results


def _plain(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def prr_table(run: Run, metric: str) -> Table:
    """`prr_rows` for a terminal."""
    rows = prr_rows(run, metric)
    paired = any("minus_msp" in row for row in rows)
    table = Table(title=f"PRR over {run.finite(metric).sum()} answers, quality: {metric}")
    table.add_column("method", overflow="fold")
    table.add_column("PRR", justify="right")
    table.add_column("± SE", justify="right")
    table.add_column("AUROC", justify="right")
    table.add_column("AUGRC", justify="right")
    if paired:
        table.add_column("minus MSP [95 % over clusters]", justify="right")

    def shown(value: float | None, form: str, otherwise: str = "") -> str:
        return otherwise if value is None else format(value, form)

    for row in rows:
        undefined = row["prr"] is None
        values = [
            row["method"],
            shown(row["prr"], "+.2f", "undefined"),
            "" if undefined else shown(row["standard_error"], ".2f"),
            shown(row["auroc"], ".2f", "undefined"),
            shown(row["augrc"], ".3f"),
        ]
        if paired and "minus_msp" not in row:
            values.append("")
        elif paired and row["low"] is None:
            values.append("undefined")
        elif paired:
            values.append(str(Interval(row["minus_msp"], row["low"], row["high"])))
        table.add_row(*values, style="bold" if row["method"] in run.methods else None)
    return table


def about_quality(run: Run, metric: str) -> str:
    """Notes on a metric and its answers, to print below its table."""
    finite = run.finite(metric)
    quality = run.quality.loc[finite, metric]
    if not on_scale(quality):
        lines = [f"{metric} is outside 0 to 1: which answers are right is unknown."]
    else:
        lines = [f"Right answers ({metric} at least {RIGHT}): {(quality >= RIGHT).mean():.0%}."]
    if unlabelled := run.unlabelled(metric):
        lines.append(f"Left out: {unlabelled}.")
    if metric.startswith("Rouge"):
        lines.append(
            "Quality is ROUGE overlap with the gold answer: do not compare with AlignScore values."
        )
    if not finite.all():
        lines.append(f"Left out: {(~finite).sum()} answers without a finite score or quality.")
    if not has_contrast(quality):
        lines.append("All answers are equally good or bad: there are no errors to rank.")
    if run.clusters is not None:
        kept = [cluster for cluster, ok in zip(run.clusters, finite, strict=True) if ok]
        lines.append(f"Clusters (stories, passages or prompts): {len(set(kept))}.")
        if on_scale(quality) and Labelled(quality.to_numpy() < RIGHT, kept).too_few:
            lines.append(FEW)
    return "\n".join(lines)


def about_run(run: Run) -> str:
    """How to read the tables of a run, and its settings."""
    lines = [
        *run.missing_rows,
        "PRR: 1 = errors rejected first, 0 = chance, negative = worse than chance. MSP: "
        "MaximumSequenceProbability. SE: bootstrap over answers. AUROC: 0.5 = chance. AUGRC: wrong "
        "answers accepted, lower = better. PRR gives the few most confident answers most weight; "
        "the other two weigh all alike.",
    ]
    empty = says_nothing(run.stats.get("greedy_texts"))
    if empty is not None and empty.any():
        many = " A few-shot prompt may help (data.prompt_style=demo)."
        lines.append(
            f"Empty answers: {empty.sum()} of {len(empty)}. They cannot be right, and masks hardly "
            f"change them.{many if empty.mean() > 0.2 else ''}"
        )
    for used in run.settings():
        lines.append(
            f"ASMI at depth {used['depth']:.0%}: {masked_layer(used)}, "
            f"H = {used['num_heads']}, p = {used['mask_rate']}, S = {used['num_masks']}, "
            f"K = {used['top_k']}, {used['mask_sampler']} masks, scope {used['scope']}, "
            f"{used['attention']} attention."
        )
        if saved := run.at(used["depth"]):
            tokens = np.concatenate([row["mi"] for row in saved])
            lines.append(
                f"Masking response: MI_t per token, mean {tokens.mean():.4f} nats, median "
                f"{np.median(tokens):.4f}."
            )
    replaced = [
        f"{key} = {Path(path).name}"
        for key in SIDE_MODELS
        if (path := run.recorded("config").get(key)) and Path(path).is_absolute()
    ]
    if replaced:
        lines.append(f"Side models from local files: {', '.join(replaced)}.")
    drawn = run.stats.get("asmi_num_responses")
    if drawn:
        lines.append(
            f"Adapt-ASMI compared {np.median(drawn):.0f} sampled answers per question (median)."
        )
    seconds = run.seconds()
    if seconds is not None:
        lines.append(f"ASMI took {seconds:.1f} s per answer (median).")
    return "\n".join(lines)
