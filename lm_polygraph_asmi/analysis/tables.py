"""Rendering of results in a terminal."""

from pathlib import Path

import numpy as np
import pandas as pd
from rich.table import Table

from lm_polygraph_asmi.analysis.clusters import cluster_interval
from lm_polygraph_asmi.analysis.prr import normalised_prr, prr_with_error
from lm_polygraph_asmi.analysis.results import Run
from lm_polygraph_asmi.statistics import at_depth

REFERENCE, REFERENCE_SYMBOL = "MaximumSequenceProbability", "MSP"
"""The baseline that differences are taken from."""

SIDE_MODELS = ("nli_path", "cross_encoder_path", "align_score_path")

RIGHT = 0.5
"""Quality from which an answer counts as right."""


def finite_rows(run: Run, metric: str) -> np.ndarray:
    """Examples where quality and every score are finite: one mask for all methods."""
    return (np.isfinite(run.quality[metric]) & np.isfinite(run.scores).all(axis=1)).to_numpy()


def prr_table(run: Run, metric: str) -> Table:
    """PRR per estimator, best first, for one quality metric of a run.

    Where clusters are known, also its difference from `REFERENCE` with a 95 % interval over them.
    """
    finite = finite_rows(run, metric)
    quality = run.quality.loc[finite, metric]
    compared = run.clusters is not None and REFERENCE in run.scores
    rows = {name: prr_with_error(run.scores.loc[finite, name], quality) for name in run.scores}
    table = Table(title=f"PRR over {len(quality)} answers")
    table.add_column("method", overflow="fold")
    table.add_column("PRR", justify="right")
    table.add_column("± SE", justify="right")
    if compared:
        table.add_column(f"− {REFERENCE_SYMBOL} [95 % over clusters]", justify="right")
    for name, prr in sorted(rows.items(), key=lambda row: -np.nan_to_num(row[1].value, nan=-9)):
        style = "bold" if "ASMI" in name else None
        undefined = np.isnan(prr.value)
        value = "undefined" if undefined else f"{prr.value:+.2f}"
        error = "" if undefined else f"{prr.standard_error:.2f}"
        difference = _difference(run, name, finite, quality) if compared else []
        table.add_row(name, value, error, *difference, style=style)
    return table


def _difference(run: Run, name: str, finite: np.ndarray, quality: pd.Series) -> list[str]:
    """Cell of a method's difference from the reference."""
    if name == REFERENCE:
        return [""]
    assert run.clusters is not None
    quality = quality.to_numpy()
    ours, theirs = (run.scores.loc[finite, method].to_numpy() for method in (name, REFERENCE))

    def difference(rows: np.ndarray) -> float:
        return normalised_prr(ours[rows], quality[rows]) - normalised_prr(
            theirs[rows], quality[rows]
        )

    clusters = [cluster for cluster, ok in zip(run.clusters, finite, strict=True) if ok]
    found = cluster_interval(difference, clusters)
    if np.isnan(found.low):
        return ["undefined"]
    return [str(found)]


def notes(run: Run, metric: str) -> str:
    """What a reader of the table has to know."""
    finite = finite_rows(run, metric)
    quality = run.quality.loc[finite, metric]
    lines = [
        "1 = errors rejected first, 0 = uninformative, below 0 = errors ranked the wrong way. "
        "SE: bootstrap over answers.",
        f"Right answers ({metric} at least {RIGHT}): {(quality >= RIGHT).mean():.0%}.",
    ]
    if metric.startswith("Rouge"):
        lines.append(
            "Quality is ROUGE overlap with the reference: never compare with AlignScore figures."
        )
    if not finite.all():
        lines.append(f"{(~finite).sum()} answers without a finite score or quality left out.")
    if np.isclose(quality.min(), quality.max()):
        lines.append("All answers are equally good (or bad): there are no errors to rank.")
    for used in run.settings():
        lines.append(
            f"ASMI at depth {used['depth']:.0%}: layer {used['layer']} of {used['num_layers']}, "
            f"H = {used['num_heads']}, p = {used['mask_rate']}, S = {used['num_masks']}, "
            f"K = {used['top_k']}, {used['mask_sampler']} masks, scope {used['scope']}, "
            f"{used['attention']} attention."
        )
        saved = run.stats.get(at_depth("asmi_mi", used["depth"]))
        if saved:
            tokens = np.concatenate(saved)
            lines.append(
                f"Masking response: MI_t of a token {tokens.mean():.4f} nats on average, "
                f"{np.median(tokens):.4f} in the median."
            )
    if run.clusters is not None:
        kept = {cluster for cluster, ok in zip(run.clusters, finite, strict=True) if ok}
        lines.append(f"Clusters (stories, passages or prompts): {len(kept)}.")
    replaced = [
        f"{key} = {Path(path).name}"
        for key in SIDE_MODELS
        if (path := (run.manifest or {}).get("config", {}).get(key)) and Path(path).is_absolute()
    ]
    if replaced:
        lines.append(f"Side models from local files: {', '.join(replaced)}.")
    drawn = run.stats.get("asmi_num_responses")
    if drawn:
        lines.append(f"Adapt-ASMI compared {np.median(drawn):.0f} sampled answers (median).")
    seconds = run.seconds()
    if seconds is not None:
        lines.append(f"ASMI took {seconds:.1f} s an answer (median).")
    return "\n".join(lines)
