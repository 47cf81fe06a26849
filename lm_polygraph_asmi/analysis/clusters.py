"""Intervals that respect clusters: questions over one passage are not independent."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import bootstrap


class Interval(NamedTuple):
    """A value with its 95 % interval; NaN where undefined."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def cluster_interval(
    statistic: Callable[[np.ndarray], float],
    clusters: Sequence[str],
    resamples: int = 1000,
    seed: int = 20260711,
) -> Interval:
    """Percentile bootstrap interval over clusters, which are drawn whole.

    Two methods are compared by giving their difference as the statistic: one draw of clusters then
    serves both. Resamples where the statistic is NaN are left out. Source: section "Main Results"
    of the paper (cluster-respecting paired bootstrap, percentile 95 %).

    Args:
        statistic: of an array of row numbers, which may repeat.
        clusters: cluster key of each row.
    """
    rows = list(pd.Series(range(len(clusters))).groupby(list(clusters)).apply(np.array))
    value = statistic(np.arange(len(clusters)))
    if np.isnan(value) or len(rows) < 2:
        return Interval(value, float("nan"), float("nan"))

    def of_clusters(drawn: np.ndarray) -> float:
        return statistic(np.concatenate([rows[i] for i in drawn]))

    found = bootstrap(
        (np.arange(len(rows)),),
        of_clusters,
        vectorized=False,
        n_resamples=resamples,
        method="percentile",
        random_state=np.random.default_rng(seed),
    ).bootstrap_distribution
    low, high = np.nanpercentile(found, [2.5, 97.5])
    return Interval(float(value), float(low), float(high))
