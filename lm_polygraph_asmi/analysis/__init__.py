"""Evidence from a finished run: starts from saved results, never from a model."""

from lm_polygraph_asmi.analysis.clusters import Interval, cluster_interval
from lm_polygraph_asmi.analysis.prr import PRR, normalised_prr, prr_with_error
from lm_polygraph_asmi.analysis.redraws import (
    Stability,
    rank_correlation,
    rank_correlations,
    redraw_stability,
)
from lm_polygraph_asmi.analysis.results import Run, load_run

__all__ = [
    "PRR",
    "Interval",
    "Run",
    "Stability",
    "cluster_interval",
    "load_run",
    "normalised_prr",
    "prr_with_error",
    "rank_correlation",
    "rank_correlations",
    "redraw_stability",
]
