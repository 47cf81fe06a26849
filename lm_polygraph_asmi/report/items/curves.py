"""Rejection curves."""

from collections.abc import Sequence
from typing import Any

import numpy as np

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
