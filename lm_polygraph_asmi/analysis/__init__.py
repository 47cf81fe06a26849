"""Statistics of scores, errors and tokens. The functions take arrays, not models or files.

Arrays are (n,) with one finite value for each answer, unless a docstring says otherwise. For
scores, signals and uncertainties, higher = more uncertain. For quality, higher = better. `wrong`
holds correctness labels, where 1 or True = wrong. `answers` is a `Labelled`: it checks labels and
clusters once, and holds the number and seed of resamples.

Functions of several arrays raise ValueError if the lengths differ, if there is no answer, if a
value is not finite, or if a label is neither 0 nor 1.

`lm_polygraph_asmi.results` loads finished runs. `lm_polygraph_asmi.report` makes tables and figures
of them with these functions.
"""

from typing import TYPE_CHECKING

from lm_polygraph_asmi.lazy import attach_imports

if TYPE_CHECKING:
    from lm_polygraph_asmi.analysis.clusters import (
        Clustered as Clustered,
        Interval as Interval,
        cluster_band as cluster_band,
        cluster_interval as cluster_interval,
        text_clusters as text_clusters,
        wilson_interval as wilson_interval,
    )
    from lm_polygraph_asmi.analysis.comparison import (
        McNemar as McNemar,
        auroc as auroc,
        auroc_difference as auroc_difference,
        auroc_interval as auroc_interval,
        mcnemar as mcnemar,
        prr_intervals as prr_intervals,
    )
    from lm_polygraph_asmi.analysis.cost import (
        PhaseSeconds as PhaseSeconds,
        method_seconds as method_seconds,
        phase_seconds as phase_seconds,
    )
    from lm_polygraph_asmi.analysis.coverage import (
        coverage_by_band as coverage_by_band,
        coverage_intervals as coverage_intervals,
        tail_entropy_bound as tail_entropy_bound,
    )
    from lm_polygraph_asmi.analysis.depth import (
        DepthSelection as DepthSelection,
        Sweep as Sweep,
        depth_selection as depth_selection,
    )
    from lm_polygraph_asmi.analysis.distinct import (
        DistinctSignal as DistinctSignal,
        distinct_signal as distinct_signal,
    )
    from lm_polygraph_asmi.analysis.features import free_features as free_features
    from lm_polygraph_asmi.analysis.labelled import Labelled as Labelled
    from lm_polygraph_asmi.analysis.mechanism import (
        ErrorSeparation as ErrorSeparation,
        MaskingResponse as MaskingResponse,
        Vote as Vote,
        error_separation as error_separation,
        masking_response as masking_response,
        votes as votes,
    )
    from lm_polygraph_asmi.analysis.prr import (
        PRR as PRR,
        normalised_prr as normalised_prr,
        prr_draws as prr_draws,
        prr_with_error as prr_with_error,
    )
    from lm_polygraph_asmi.analysis.selective import (
        Filter as Filter,
        Quadrants as Quadrants,
        TokenNull as TokenNull,
        aurc as aurc,
        aurc_difference as aurc_difference,
        confident_but_fragile as confident_but_fragile,
        confident_filter as confident_filter,
        filter_curve as filter_curve,
        global_selector as global_selector,
        retained_error as retained_error,
        risk_coverage as risk_coverage,
        token_null as token_null,
    )
    from lm_polygraph_asmi.analysis.stability import (
        Stability as Stability,
        rank_correlation as rank_correlation,
        seed_stability as seed_stability,
    )
else:  # on first use
    __getattr__, __dir__, __all__ = attach_imports(__name__)
