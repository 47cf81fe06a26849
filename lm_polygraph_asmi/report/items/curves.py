"""Rejection curves, and calibration of the probability of error."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lm_polygraph_asmi.analysis.calibration import (
    DRAWS,
    SMALLEST_STEP,
    held_out_probability,
    reliability,
)
from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.analysis.prr import normalised_prr, rejection_curve
from lm_polygraph_asmi.report import figures
from lm_polygraph_asmi.report.item import Items, frame
from lm_polygraph_asmi.results.run_groups import RunGroup, Unavailable, once

SHOWN = (1.0, 0.9, 0.75, 0.5, 0.25)
"""Shares of accepted answers in the table."""


def rejection(groups: Sequence[RunGroup]) -> Items:
    """The curve of PRR: mean quality of the accepted answers."""
    title = "Rejection curves: PRR is their normalised area"

    @once
    def compute(group: RunGroup) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        names = ("u_sem", "MSP", "entropy")
        scores = dict(zip(names, group.need("u_sem", "msp", "entropy"), strict=True))
        prr = {name: normalised_prr(score, group.quality) for name, score in scores.items()}
        if np.isnan(prr["u_sem"]):
            raise Unavailable("all answers are equally good")
        curves = {n: rejection_curve(s, group.answers) for n, s in scores.items()}
        unclustered = Labelled(quality=group.quality, clusters=["all" for _ in group.quality])
        oracle = rejection_curve(-group.quality, unclustered)  # needs no band
        rows = [
            {"setting": group.label, "rejected by": name, "PRR": prr.get(name, 1.0)}
            | {
                f"{share:.0%} kept": float(np.interp(share, curve.coverages, curve.values))
                for share in SHOWN
            }
            for name, curve in {**curves, "quality (oracle)": oracle}.items()
        ]
        return rows, {f"{group.label}, n = {len(group)}": (curves, oracle)}

    notes = [
        "Mean quality of the accepted answers when the most uncertain are rejected. Oracle: "
        "ranked by quality itself."
    ]
    pictured = (
        "Figure: simultaneous 95 % bands over clusters (1,000 resamples): each covers its whole "
        "curve at once. Overlapping bands do not test a difference: see the paired intervals."
    )
    return frame(
        "rejection", title, groups, compute, notes, figures.rejection, digits=3,
        pictured=pictured,
    )  # fmt: skip


def reliable(groups: Sequence[RunGroup]) -> Items:
    """Reliability diagram of the held-out probability of error, calibrated from u_sem."""
    title = "Reliability of the probability of error"

    @once
    def compute(group: RunGroup) -> tuple[dict[str, Any], dict[str, Any]]:
        group.need_errors()
        (u_sem,) = group.need("u_sem")
        held_out = held_out_probability(u_sem, group.answers)
        if held_out is None:
            raise Unavailable(
                f"fewer than two clusters, or fewer than {2 * SMALLEST_STEP} answers outside a fold"
            )
        chance, base = held_out
        diagram = reliability(chance, group.answers)
        row = {
            "setting": group.label,
            "n": len(group),
            "error rate": float(group.wrong.mean()),
            "Brier score": diagram.brier,
            "of the error rate": float(np.mean((base - group.wrong) ** 2)),
            "miscalibration": diagram.miscalibration,
            "discrimination": diagram.discrimination,
            "uncertainty": diagram.uncertainty,
            "p, calibrated": diagram.p_value,
        }
        return row, {f"{group.label}, n = {len(group)}": diagram}

    notes = [
        "Probability of error from an isotonic fit of u_sem on four folds of clusters, compared "
        "with the errors of the fifth (lower Brier score = better). Brier score = miscalibration "
        "− discrimination + uncertainty; of the error rate: the held-out Brier score of a "
        "constant error rate. p, calibrated: probability of a miscalibration as large in "
        f"{DRAWS:,} draws with calibrated probabilities (random signs of whole clusters)."
    ]
    pictured = (
        "Figure: the curve is an isotonic fit of the errors on the probabilities, without bins; "
        "calibrated probabilities lie on the diagonal. Shaded: pointwise range of the curve in 95 "
        "% of those draws (consistency band). Bars: answers at each probability, relative to the "
        "most frequent one."
    )
    return frame(
        "reliability", title, groups, compute, notes, figures.reliability, digits=3,
        p_values=("p, calibrated",), pictured=pictured,
    )  # fmt: skip
