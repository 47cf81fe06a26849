"""Statistics of scores, errors and tokens, on arrays: functions that need no models or files.

Unless said otherwise, arrays are (n,), one finite value an answer. Scores, signals and
uncertainties: higher = more uncertain; quality: higher = better; wrong: correctness labels, 1 or
True = wrong. `answers` is a `Labelled`: labels and clusters, checked once, with the number and seed
of resamples. Functions of several arrays raise ValueError for unequal lengths, no answer, values
that are not finite, and labels other than 0 and 1.

`lm_polygraph_asmi.results` loads finished runs; `lm_polygraph_asmi.report` makes tables and figures
from both.
"""

from lm_polygraph_asmi.lazy import attach

# Imported on first use.
__getattr__, __dir__, __all__ = attach(__name__, {
    "clusters": "Clustered Interval cluster_band cluster_interval text_clusters wilson_interval",
    "comparison": "McNemar auroc auroc_difference auroc_interval mcnemar prr_intervals",
    "cost": "PhaseSeconds method_seconds phase_seconds",
    "coverage": "coverage_by_band coverage_intervals tail_entropy_bound",
    "depth": "DepthSelection Sweep depth_selection",
    "distinct": "DistinctSignal distinct_signal",
    "features": "free_features",
    "labelled": "Labelled",
    "mechanism": "ErrorSeparation MaskingResponse Vote error_separation masking_response votes",
    "prr": "PRR normalised_prr prr_draws prr_with_error",
    "selective": (
        "Filter Quadrants TokenNull aurc aurc_difference confident_but_fragile "
        "confident_filter filter_curve global_selector retained_error risk_coverage "
        "token_null"
    ),
    "stability": "Stability rank_correlation seed_stability",
})  # fmt: skip
