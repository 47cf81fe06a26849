"""Data whose truth is known, and what an estimate from simulations is off by."""

from collections.abc import Iterable, Sequence

import numpy as np
from scipy.stats import norm, t as student


def keys(clusters: int, size: int) -> list[str]:
    """`size` rows for each of the clusters, one after the other."""
    return [str(i) for i in range(clusters) for _ in range(size)]


def shared(rng: np.random.Generator, clusters: int, size: int, share: float = 0.5) -> np.ndarray:
    """Standard normal rows that correlate by `share` within their cluster."""
    common = np.repeat(rng.normal(size=clusters), size)
    return share**0.5 * common + (1 - share) ** 0.5 * rng.normal(size=clusters * size)


def capitals(
    rows: Sequence[tuple[object, bool, bool]],
    risk: float,
    largest: int,
    bets: Sequence[float],
    above: bool = False,
) -> list[float]:
    """The bet in plain loops: mean capital of a gambler for every stake, after each cluster.

    Rows have a cluster, whether they are accepted, and whether they are wrong; `above` bets that
    more than `risk` of the accepted are wrong.
    """
    worst, sign = (risk, 1) if above else (1 - risk, -1)
    purses, after = [1.0] * len(bets), [1.0]
    for key in dict.fromkeys(key for key, _, _ in rows):
        of_cluster = [(accepted, wrong) for own, accepted, wrong in rows if own == key][:largest]
        excess = sum(wrong - risk for accepted, wrong in of_cluster if accepted)
        for number, bet in enumerate(bets):
            purses[number] *= 1 + sign * bet * excess / (worst * largest)
        after.append(sum(purses) / len(purses))
    return after


def monte_carlo_error(share: float, simulations: int) -> float:
    """Standard error of a share that was counted over simulations."""
    return float(np.sqrt(share * (1 - share) / simulations))


def ends(drawn: Iterable[float], clusters: int) -> np.ndarray:
    """Ends of a 95 % interval: percentiles as far out as Student's t wants of so few clusters."""
    far = student.ppf(0.975, clusters - 1) * np.sqrt(clusters / (clusters - 1))
    return np.nanquantile(np.asarray(drawn), [norm.cdf(-far), norm.cdf(far)])
