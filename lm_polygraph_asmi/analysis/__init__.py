"""Statistics of scores, errors and tokens, on arrays: functions that need no models or files.

Unless said otherwise, arrays are (n,), one finite value an answer. Scores, signals and
uncertainties: higher = more uncertain; quality: higher = better; wrong: correctness labels, 1 or
True = wrong. `answers` is a `Labelled`: labels and clusters, checked once, with the number and seed
of resamples. Functions of several arrays raise ValueError for unequal lengths, no answer, values
that are not finite, and labels other than 0 and 1.

`lm_polygraph_asmi.results` loads finished runs; `lm_polygraph_asmi.report` makes tables and figures
from both.
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
