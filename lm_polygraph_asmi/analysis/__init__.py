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

if TYPE_CHECKING:
    from lm_polygraph_asmi.analysis.clusters import Clustered as Clustered
    from lm_polygraph_asmi.analysis.clusters import Interval as Interval
    from lm_polygraph_asmi.analysis.clusters import cluster_band as cluster_band
    from lm_polygraph_asmi.analysis.clusters import cluster_interval as cluster_interval
    from lm_polygraph_asmi.analysis.clusters import text_clusters as text_clusters
    from lm_polygraph_asmi.analysis.clusters import wilson_interval as wilson_interval
    from lm_polygraph_asmi.analysis.comparison import McNemar as McNemar
    from lm_polygraph_asmi.analysis.comparison import auroc as auroc
    from lm_polygraph_asmi.analysis.comparison import auroc_difference as auroc_difference
    from lm_polygraph_asmi.analysis.comparison import auroc_interval as auroc_interval
    from lm_polygraph_asmi.analysis.comparison import mcnemar as mcnemar
    from lm_polygraph_asmi.analysis.comparison import prr_intervals as prr_intervals
    from lm_polygraph_asmi.analysis.cost import PhaseSeconds as PhaseSeconds
    from lm_polygraph_asmi.analysis.cost import method_seconds as method_seconds
    from lm_polygraph_asmi.analysis.cost import phase_seconds as phase_seconds
    from lm_polygraph_asmi.analysis.coverage import coverage_by_band as coverage_by_band
    from lm_polygraph_asmi.analysis.coverage import coverage_intervals as coverage_intervals
    from lm_polygraph_asmi.analysis.coverage import tail_entropy_bound as tail_entropy_bound
    from lm_polygraph_asmi.analysis.depth import DepthSelection as DepthSelection
    from lm_polygraph_asmi.analysis.depth import Sweep as Sweep
    from lm_polygraph_asmi.analysis.depth import depth_selection as depth_selection
    from lm_polygraph_asmi.analysis.distinct import DistinctSignal as DistinctSignal
    from lm_polygraph_asmi.analysis.distinct import distinct_signal as distinct_signal
    from lm_polygraph_asmi.analysis.features import free_features as free_features
    from lm_polygraph_asmi.analysis.labelled import Labelled as Labelled
    from lm_polygraph_asmi.analysis.mechanism import ErrorSeparation as ErrorSeparation
    from lm_polygraph_asmi.analysis.mechanism import MaskingResponse as MaskingResponse
    from lm_polygraph_asmi.analysis.mechanism import Vote as Vote
    from lm_polygraph_asmi.analysis.mechanism import error_separation as error_separation
    from lm_polygraph_asmi.analysis.mechanism import masking_response as masking_response
    from lm_polygraph_asmi.analysis.mechanism import votes as votes
    from lm_polygraph_asmi.analysis.prr import PRR as PRR
    from lm_polygraph_asmi.analysis.prr import normalised_prr as normalised_prr
    from lm_polygraph_asmi.analysis.prr import prr_draws as prr_draws
    from lm_polygraph_asmi.analysis.prr import prr_with_error as prr_with_error
    from lm_polygraph_asmi.analysis.selective import Filter as Filter
    from lm_polygraph_asmi.analysis.selective import Quadrants as Quadrants
    from lm_polygraph_asmi.analysis.selective import TokenNull as TokenNull
    from lm_polygraph_asmi.analysis.selective import aurc as aurc
    from lm_polygraph_asmi.analysis.selective import aurc_difference as aurc_difference
    from lm_polygraph_asmi.analysis.selective import confident_but_fragile as confident_but_fragile
    from lm_polygraph_asmi.analysis.selective import confident_filter as confident_filter
    from lm_polygraph_asmi.analysis.selective import filter_curve as filter_curve
    from lm_polygraph_asmi.analysis.selective import global_selector as global_selector
    from lm_polygraph_asmi.analysis.selective import retained_error as retained_error
    from lm_polygraph_asmi.analysis.selective import risk_coverage as risk_coverage
    from lm_polygraph_asmi.analysis.selective import token_null as token_null
    from lm_polygraph_asmi.analysis.stability import Stability as Stability
    from lm_polygraph_asmi.analysis.stability import rank_correlation as rank_correlation
    from lm_polygraph_asmi.analysis.stability import seed_stability as seed_stability
else:  # on first use
    __getattr__, __dir__, __all__ = attach_imports(__name__)
