"""Statistics of scores, errors and tokens, on arrays: functions that need no models or files.

Arrays are (n,) with one finite value for each answer, unless a docstring says otherwise. For
scores, signals and uncertainties, higher = more uncertain. For quality, higher = better. `wrong`
holds correctness labels, where 1 or True = wrong. `answers` is a `Labelled`: labels and clusters,
which are checked once, with the number and seed of resamples.

Functions of several arrays raise ValueError if lengths differ, if there is no answer, if a value is
not finite, or if a label is neither 0 nor 1.

`lm_polygraph_asmi.results` loads finished runs. `lm_polygraph_asmi.report` makes tables and figures
of them with these functions.
"""

from typing import TYPE_CHECKING

from lm_polygraph_asmi.lazy import attach_imports

# ruff: noqa: F401 (names for others)

if TYPE_CHECKING:
    from lm_polygraph_asmi.analysis.clusters import (
        Clustered,
        Interval,
        cluster_band,
        cluster_interval,
        text_clusters,
        wilson_interval,
    )
    from lm_polygraph_asmi.analysis.comparison import (
        McNemar,
        auroc,
        auroc_difference,
        auroc_interval,
        mcnemar,
        prr_intervals,
    )
    from lm_polygraph_asmi.analysis.cost import PhaseSeconds, method_seconds, phase_seconds
    from lm_polygraph_asmi.analysis.coverage import (
        coverage_by_band,
        coverage_intervals,
        tail_entropy_bound,
    )
    from lm_polygraph_asmi.analysis.depth import DepthSelection, Sweep, depth_selection
    from lm_polygraph_asmi.analysis.distinct import DistinctSignal, distinct_signal
    from lm_polygraph_asmi.analysis.features import free_features
    from lm_polygraph_asmi.analysis.labelled import Labelled
    from lm_polygraph_asmi.analysis.mechanism import (
        ErrorSeparation,
        MaskingResponse,
        Vote,
        error_separation,
        masking_response,
        votes,
    )
    from lm_polygraph_asmi.analysis.prr import PRR, normalised_prr, prr_draws, prr_with_error
    from lm_polygraph_asmi.analysis.selective import (
        Filter,
        Quadrants,
        TokenNull,
        aurc,
        aurc_difference,
        confident_but_fragile,
        confident_filter,
        filter_curve,
        global_selector,
        retained_error,
        risk_coverage,
        token_null,
    )
    from lm_polygraph_asmi.analysis.stability import Stability, rank_correlation, seed_stability
else:  # on first use
    __getattr__, __dir__, __all__ = attach_imports(__name__)
