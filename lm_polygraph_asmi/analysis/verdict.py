"""Better, equivalent or undecided: differences of PRR judged together, not one by one."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from lm_polygraph_asmi.analysis.clusters import (
    SEED,
    Interval,
    percentile_interval,
    share_of_tail,
    tail,
)
from lm_polygraph_asmi.analysis.comparison import drawn_prr

MARGIN = 0.02
"""Difference of PRR below which two methods are as good as equal."""
LEVEL = 0.05
OUTCOMES = ("better", "equivalent", "undecided", "worse")


class Comparison(NamedTuple):
    """A paired difference of PRR, judged within its family.

    Attributes:
        difference: first minus second, with its own 95 % interval, adjusted for nothing.
        p_value: two-sided, of no difference; adjusted for the family.
        p_equivalent: of a difference of at least the margin, by two one-sided tests.
        least, least_equivalent: the smallest that so many resamples could have made of either: what
            is found there is at most that.
        reach: the margin below which no difference, not even zero, could be called equivalent: half
            of the 90 % interval; None where so few resamples have no such interval.
    """

    difference: Interval
    p_value: float
    p_equivalent: float
    least: float = 0.0
    least_equivalent: float = 0.0
    reach: float | None = None

    @property
    def outcome(self) -> str | None:
        """One of `OUTCOMES`; None where nothing is defined."""
        if np.isnan([self.difference.value, self.p_value]).any():
            return None
        if self.p_value < LEVEL:
            return "better" if self.difference.value > 0 else "worse"
        return "equivalent" if self.p_equivalent < LEVEL else "undecided"


def romano_wolf(values: ArrayLike, drawn: ArrayLike, clusters: int | None = None) -> np.ndarray:
    """Two-sided p-values of values being zero, adjusted for being looked at together.

    A value is held against the largest of its family on the same resamples, step by step, so that
    values that go together cost little. Source: Romano and Wolf (2005), Stepwise multiple testing
    as formalized data snooping.

    Args:
        values: (m,) estimates.
        drawn: (B, m) the same on B resamples; rows with NaN are left out.
        clusters: how many were resampled; with few, p-values rise as intervals widen
            (`clusters.tail`, for either side). None: very many.

    Returns:
        (m,), all NaN where no resample is defined.

    Example:
        >>> drawn = np.random.default_rng(0).normal([1.0, 0.1], 0.2, size=(999, 2))
        >>> (romano_wolf([1.0, 0.1], drawn) < 0.05).tolist()  # 5 and 0.5 standard errors
        [True, False]
    """
    found, resampled = np.asarray(values, dtype=float), np.asarray(drawn, dtype=float)
    resampled = resampled[np.isfinite(resampled).all(1)]
    if len(resampled) < 2 or np.isnan(found).any():
        return np.full(len(found), np.nan)
    spread = resampled.std(0, ddof=1)
    spread[spread == 0] = np.inf  # the same score twice differs in no resample
    sizes, null = np.abs(found) / spread, np.abs(resampled - found) / spread
    adjusted, least = np.empty(len(found)), 0.0
    order = np.argsort(-sizes, kind="stable")
    for place, i in enumerate(order):
        largest = null[:, order[place:]].max(1)
        least = max(least, (1 + (largest >= sizes[i] - 1e-12).sum()) / (1 + len(resampled)))
        adjusted[i] = min(1.0, 2 * tail(least / 2, clusters))
    return adjusted


def holm(p_values: ArrayLike) -> np.ndarray:
    """p-values adjusted for their number, whatever their dependence; NaN stay and do not count.

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

    Source: Schuirmann (1987), two one-sided tests; below 0.05 just where the 90 % interval, as wide
    as for so many clusters, lies within the margin.

    Args:
        drawn: (B,) the difference on B resamples; NaN are left out.
        clusters: how many were resampled; None: very many.

    Example:
        >>> equivalence([0.0] * 999, margin=0.02)  # all draws within
        0.001
        >>> equivalence([0.05] * 999, margin=0.02)  # all without
        1.0
    """
    known = np.asarray(drawn, dtype=float)
    known = known[np.isfinite(known)]
    if not len(known):
        return float("nan")
    above, below = (known >= margin).sum(), (known <= -margin).sum()
    return tail((1 + max(above, below)) / (1 + len(known)), clusters)


def equivalence_reach(drawn: ArrayLike, clusters: int | None = None) -> float | None:
    """Margin up to which `equivalence` cannot fall below 0.05, wherever the difference lies.

    Half of the 90 % interval that the two one-sided tests ask to lie within the margin; None where
    so few resamples have no such interval: no margin is wide enough.

    Args:
        drawn, clusters: as of `equivalence`.
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
    quality: ArrayLike,
    clusters: Sequence[str],
    differences: Iterable[tuple[str, str]],
    resamples: int = 10_000,
    seed: int = SEED,
    margin: float = MARGIN,
) -> tuple[dict[str, Interval], dict[tuple[str, str], Comparison]]:
    """PRR of every method, and a family of differences (first minus second) judged together.

    One draw of clusters serves all. Which methods are compared is taken as given: a best one that
    was chosen on the same answers looks better than it is.

    Args:
        scores, quality, clusters: as of `prr_intervals`.
        differences: pairs of methods: all that will be looked at.
        margin: of equivalence.

    Returns:
        By method, and by pair.

    Raises:
        ValueError: lengths differ, or a value is not finite.

    Example:
        >>> good, bad, own = [0.1, 0.9] * 10, [0.9, 0.1] * 10, [str(n) for n in range(20)]
        >>> scores, pairs = {"a": good, "b": bad, "c": good}, [("a", "b"), ("a", "c")]
        >>> _, found = prr_comparisons(scores, [1.0, 0.0] * 10, own, pairs, resamples=200)
        >>> [one.outcome for one in found.values()]
        ['better', 'equivalent']
    """
    value, column = drawn_prr(scores, quality, clusters, resamples, seed)
    groups = len(set(clusters))
    pairs = list(dict.fromkeys(differences))
    alone = {name: percentile_interval(value[name], column[name], groups) for name in scores}
    gaps = [value[a] - value[b] for a, b in pairs]
    drawn = [column[a] - column[b] for a, b in pairs]
    adjusted = romano_wolf(gaps, np.array(drawn).T, groups) if pairs else np.array([])
    defined = np.isfinite(drawn).all(0).sum() if pairs else 0
    return alone, {
        pair: Comparison(
            percentile_interval(gap, d, groups),
            float(p),
            equivalence(d, margin, groups),
            2 * tail(0.5 / (1 + defined), groups),
            tail(1 / (1 + np.isfinite(d).sum()), groups),
            equivalence_reach(d, groups),
        )
        for pair, gap, d, p in zip(pairs, gaps, drawn, adjusted, strict=True)
    }
