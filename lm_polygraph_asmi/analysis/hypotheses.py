"""Better, equivalent or inconclusive: differences of PRR, corrected for their number."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from lm_polygraph_asmi.analysis.clusters import Interval, percentile_interval, share_of_tail, tail
from lm_polygraph_asmi.analysis.comparison import drawn_prr
from lm_polygraph_asmi.analysis.labelled import Labelled

MARGIN = 0.02
"""Smaller differences of PRR count as equivalent."""
LEVEL = 0.05
OUTCOMES = ("better", "equivalent", "inconclusive", "worse")


class Comparison(NamedTuple):
    """A paired difference of PRR, tested within its family.

    Attributes:
        difference: first minus second, with its uncorrected 95 % interval.
        p_value: two-sided, of no difference; adjusted for the family.
        p_equivalent: of a difference of at least the margin, by two one-sided tests.
        least, least_equivalent: the smallest values that the number of resamples allows for either
            p-value; a p-value equal to it is an upper bound.
        reach: smallest margin at which a difference of 0 could count as equivalent: half the width
            of the 90 % interval; None if too few resamples give no such interval.
    """

    difference: Interval
    p_value: float
    p_equivalent: float
    least: float = 0.0
    least_equivalent: float = 0.0
    reach: float | None = None

    @property
    def outcome(self) -> str | None:
        """One of `OUTCOMES`; None if undefined."""
        if np.isnan([self.difference.value, self.p_value]).any():
            return None
        if self.p_value < LEVEL:
            return "better" if self.difference.value > 0 else "worse"
        return "equivalent" if self.p_equivalent < LEVEL else "inconclusive"


def romano_wolf(values: ArrayLike, drawn: ArrayLike, clusters: int | None = None) -> np.ndarray:
    """Two-sided p-values of values being 0, adjusted for their number.

    Stepwise, each value is compared with the largest of its family on the same resamples, so that
    correlated values cost little power. (m,), all NaN if no resample is defined. Source: Romano and
    Wolf (2005), Stepwise multiple testing as formalized data snooping.

    Args:
        values: (m,) estimates.
        drawn: (B, m) the same on B resamples; rows with NaN are left out.
        clusters: number resampled; with few, p-values rise as intervals widen (`clusters.tail`, for
            either side). None: very many.

    Example:
        >>> drawn = np.random.default_rng(0).normal([1.0, 0.1], 0.2, size=(999, 2))
        >>> (romano_wolf([1.0, 0.1], drawn) < 0.05).tolist()  # 5 and 0.5 standard errors
        [True, False]
    """
    estimates, resampled = np.asarray(values, dtype=float), np.asarray(drawn, dtype=float)
    resampled = resampled[np.isfinite(resampled).all(1)]
    if len(resampled) < 2 or np.isnan(estimates).any():
        return np.full(len(estimates), np.nan)
    spread = resampled.std(0, ddof=1)
    spread[spread == 0] = np.inf  # the same score twice: no difference in any resample
    sizes, null = np.abs(estimates) / spread, np.abs(resampled - estimates) / spread
    adjusted, least = np.empty(len(estimates)), 0.0
    order = np.argsort(-sizes, kind="stable")
    for place, i in enumerate(order):
        largest = null[:, order[place:]].max(1)
        least = max(least, (1 + (largest >= sizes[i] - 1e-12).sum()) / (1 + len(resampled)))
        adjusted[i] = min(1.0, 2 * tail(least / 2, clusters))
    return adjusted


def holm(p_values: ArrayLike) -> np.ndarray:
    """p-values adjusted for their number under any dependence; NaN stay and do not count.

    Source: Holm (1979), A simple sequentially rejective multiple test procedure.

    Example:
        >>> holm([0.01, 0.04, 0.03]).round(2).tolist()
        [0.03, 0.06, 0.06]
    """
    adjusted = np.array(p_values, dtype=float)
    known = np.flatnonzero(np.isfinite(adjusted))
    order = known[np.argsort(adjusted[known], kind="stable")]
    steps = adjusted[order] * np.arange(len(order), 0, -1)
    adjusted[order] = np.minimum(1, np.maximum.accumulate(steps))
    return adjusted


def equivalence(drawn: ArrayLike, margin: float = MARGIN, clusters: int | None = None) -> float:
    """p-value of a difference of at least `margin` in size: the larger of two one-sided tests.

    Of the difference `drawn` (B,) on B resamples, without NaN; NaN if none is finite. Below 0.05
    exactly if the 90 % interval, widened for few `clusters` (None: very many), is within the
    margin. Source: Schuirmann (1987), two one-sided tests.

    Example:
        >>> equivalence([0.0] * 999, margin=0.02)  # all draws within the margin
        0.001
        >>> equivalence([0.05] * 999, margin=0.02)  # all outside
        1.0
    """
    known = np.asarray(drawn, dtype=float)
    known = known[np.isfinite(known)]
    if not len(known):
        return float("nan")
    above, below = (known >= margin).sum(), (known <= -margin).sum()
    return tail((1 + max(above, below)) / (1 + len(known)), clusters)


def equivalence_reach(drawn: ArrayLike, clusters: int | None = None) -> float | None:
    """Margin up to which `equivalence` cannot fall below 0.05, whatever the difference.

    Half the width of the 90 % interval that must be within the margin; None if too few resamples
    give no such interval, so that no margin is wide enough.
    """
    known = np.asarray(drawn, dtype=float)
    known = known[np.isfinite(known)]
    share = share_of_tail(LEVEL, clusters)
    if share * (1 + len(known)) <= 1:
        return None
    low, high = np.quantile(known, [share, 1 - share])
    return float(high - low) / 2


def prr_comparisons(
    scores: Mapping[str, ArrayLike],
    answers: Labelled,
    differences: Iterable[tuple[str, str]],
    margin: float = MARGIN,
) -> tuple[dict[str, Interval], dict[tuple[str, str], Comparison]]:
    """PRR of every method, and differences (first minus second) tested as one family.

    By method, and by pair; a positive difference means that the first is better. All share the
    resamples of clusters. The choice of methods is not corrected for: a best method chosen on the
    same answers looks better than it is.

    Args:
        differences: pairs of methods: all that will be reported.
        margin: smaller differences count as equivalent.

    Example:
        >>> good, bad = [0.1, 0.9] * 10, [0.9, 0.1] * 10
        >>> scores, pairs = {"a": good, "b": bad, "c": good}, [("a", "b"), ("a", "c")]
        >>> answers = Labelled([0, 1] * 10, range(20), resamples=200)
        >>> _, comparisons = prr_comparisons(scores, answers, pairs)
        >>> [c.outcome for c in comparisons.values()]
        ['better', 'equivalent']
    """
    value, column = drawn_prr(scores, answers)
    total = answers.n_clusters
    pairs = list(dict.fromkeys(differences))
    intervals = {name: percentile_interval(value[name], column[name], total) for name in scores}
    gaps = [value[a] - value[b] for a, b in pairs]
    drawn = [column[a] - column[b] for a, b in pairs]
    adjusted = romano_wolf(gaps, np.array(drawn).T, total) if pairs else np.array([])
    defined = np.isfinite(drawn).all(0).sum() if pairs else 0
    return intervals, {
        pair: Comparison(
            percentile_interval(gap, d, total),
            float(p),
            equivalence(d, margin, total),
            2 * tail(0.5 / (1 + defined), total),
            tail(1 / (1 + np.isfinite(d).sum()), total),
            equivalence_reach(d, total),
        )
        for pair, gap, d, p in zip(pairs, gaps, drawn, adjusted, strict=True)
    }
