"""Statistics on arrays: what scores, errors and tokens say. Knows neither models nor files.

Every statistic is a plain function that returns a small result; `lm_polygraph_asmi.saved` reads
finished runs, `lm_polygraph_asmi.report` makes tables and figures of both.
"""

from lm_polygraph_asmi.analysis.clusters import (
    Interval,
    cluster_draws,
    cluster_interval,
    text_clusters,
)
from lm_polygraph_asmi.analysis.comparison import (
    McNemar,
    Tally,
    auroc,
    auroc_interval,
    difference_interval,
    mcnemar,
    prr_intervals,
    tally,
)
from lm_polygraph_asmi.analysis.cost import PhaseSeconds, phase_seconds
from lm_polygraph_asmi.analysis.coverage import coverage_by_band, tail_entropy_bound
from lm_polygraph_asmi.analysis.depth import DepthSelection, Sweep, depth_selection
from lm_polygraph_asmi.analysis.distinct import DistinctSignal, distinct_signal
from lm_polygraph_asmi.analysis.mechanism import (
    ErrorSeparation,
    MaskingResponse,
    Vote,
    error_separation,
    masking_response,
    votes,
)
from lm_polygraph_asmi.analysis.prr import PRR, normalised_prr, prr_draws, prr_with_error
from lm_polygraph_asmi.analysis.redraws import (
    Stability,
    rank_correlation,
    rank_correlations,
    redraw_stability,
)
from lm_polygraph_asmi.analysis.selective import (
    Filter,
    Quadrants,
    TokenNull,
    aurc,
    confident_but_fragile,
    confident_filter,
    filter_curve,
    global_selector,
    retained_error,
    risk_coverage,
    token_null,
)

__all__ = [
    "PRR",
    "DepthSelection",
    "DistinctSignal",
    "ErrorSeparation",
    "Filter",
    "Interval",
    "MaskingResponse",
    "McNemar",
    "PhaseSeconds",
    "Quadrants",
    "Stability",
    "Sweep",
    "Tally",
    "TokenNull",
    "Vote",
    "aurc",
    "auroc",
    "auroc_interval",
    "cluster_draws",
    "cluster_interval",
    "confident_but_fragile",
    "confident_filter",
    "coverage_by_band",
    "depth_selection",
    "difference_interval",
    "distinct_signal",
    "error_separation",
    "filter_curve",
    "global_selector",
    "masking_response",
    "mcnemar",
    "normalised_prr",
    "phase_seconds",
    "prr_draws",
    "prr_intervals",
    "prr_with_error",
    "rank_correlation",
    "rank_correlations",
    "redraw_stability",
    "retained_error",
    "risk_coverage",
    "tail_entropy_bound",
    "tally",
    "text_clusters",
    "token_null",
    "votes",
]
