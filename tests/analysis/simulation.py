"""Data whose truth is known, and what an estimate from simulations is off by."""

from collections.abc import Iterable

import numpy as np
from scipy.stats import norm, t as student

from lm_polygraph_asmi.analysis import Interval


def keys(clusters: int, size: int) -> list[str]:
    """`size` rows for each of the clusters, one after the other."""
    return [str(i) for i in range(clusters) for _ in range(size)]


def shared(rng: np.random.Generator, clusters: int, size: int, share: float = 0.5) -> np.ndarray:
    """Standard normal rows that correlate by `share` within their cluster."""
    common = np.repeat(rng.normal(size=clusters), size)
    return share**0.5 * common + (1 - share) ** 0.5 * rng.normal(size=clusters * size)


def coverage(intervals: Iterable[Interval], truth: float) -> float:
    """Share of intervals that hold the truth."""
    return float(np.mean([not interval.excludes(truth) for interval in intervals]))


def monte_carlo_error(share: float, simulations: int) -> float:
    """Standard error of a share that was counted over simulations."""
    return float(np.sqrt(share * (1 - share) / simulations))


def ends(drawn: Iterable[float], clusters: int) -> np.ndarray:
    """Ends of a 95 % interval: percentiles as far out as Student's t wants of so few clusters."""
    far = student.ppf(0.975, clusters - 1) * np.sqrt(clusters / (clusters - 1))
    return np.nanquantile(np.asarray(drawn), [norm.cdf(-far), norm.cdf(far)])
