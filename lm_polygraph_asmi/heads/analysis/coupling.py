"""Does disagreement correlate with concentrated head criticality, and more than entropy does?

Source: appendix "Head-Level Structural Analysis" of the paper, table "op-coupling".
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike

from lm_polygraph_asmi.analysis.clusters import (
    Clustered,
    Interval,
    bootstrap_values,
    finite,
    percentile_interval,
)

HIGH = 0.1
"""Share of tokens in the paper's high-MI stratum, which is the top decile."""


class Coupling(NamedTuple):
    """Spearman correlations with z_t of MI_t and of H_t, as in the paper's first two columns.

    `difference` is the first minus the second, on the same resamples.
    """

    information: Interval
    entropy: Interval
    difference: Interval


def criticality_coupling(
    information: ArrayLike, entropy: ArrayLike, z: ArrayLike, rows: Clustered
) -> Coupling:
    """Rank correlations over tokens, with intervals over whole clusters.

    Resamples draw tokens together with their z_t, which is not computed again.

    Args:
        information: (N,) MI_t, nats.
        entropy: (N,) single-pass entropy H_t, nats.
        z: (N,) from `permutation_null`, higher = fewer heads than noise.
        rows: the tokens. Their clusters are answers, as in the paper, or passages.

    Example:
        >>> z, rows = np.arange(40.0), Clustered([str(n // 4) for n in range(40)])
        >>> coupling = criticality_coupling(z**2, [0.0, 1.0] * 20, z, rows)
        >>> [round(rho.value, 1) for rho in (coupling.information, coupling.entropy)]  # z**2, noise
        [1.0, 0.0]
        >>> coupling.difference.excludes(0)
        True
    """
    rho = correlations(rows, information=information, entropy=entropy, z=z)
    mi, h = rho[:, 0, 2], rho[:, 1, 2]
    return Coupling(*(_interval(values, rows) for values in (mi, h, mi - h)))


def sharpening(
    shallow: tuple[ArrayLike, ArrayLike], deep: tuple[ArrayLike, ArrayLike], rows: Clustered
) -> Interval:
    """Rank correlation of MI_t and z_t at a deeper layer, minus that at a shallower one.

    Positive = stronger at the deeper layer. NaN if a column is constant. `shallow` and `deep` are
    pairs of MI_t (N,) and z_t (N,) of the same tokens, as in `criticality_coupling`.

    Example:
        >>> z, rows = np.arange(40.0), Clustered([str(n // 4) for n in range(40)])
        >>> shallow, deep = ([0.0, 1.0] * 20, z), (z**2, z)  # noise at the first layer, then z**2
        >>> sharpening(shallow, deep, rows).low > 0
        True
    """
    rho = correlations(rows, mi=shallow[0], z=shallow[1], deep_mi=deep[0], deep_z=deep[1])
    return _interval(rho[:, 2, 3] - rho[:, 0, 1], rows)


def high_stratum(information: ArrayLike) -> Bool[np.ndarray, " N"]:
    """(N,) whether a token is among the tenth with the highest MI_t, at least one token.

    Among tokens with equal MI_t, the first ones are taken.

    Example:
        >>> high_stratum([0.1, 0.9, 0.2]).tolist()  # a tenth of three is one
        [False, True, False]
    """
    values = finite(information=information)
    order = np.argsort(-values, kind="stable")
    chosen = np.zeros(len(values), dtype=bool)
    chosen[order[: int(np.ceil(HIGH * len(values)))]] = True
    return chosen


def correlations(rows: Clustered, **columns: ArrayLike) -> Float[np.ndarray, "values c c"]:
    """(1 + resamples, c, c) Spearman correlations of c columns: of all rows, then of resamples."""
    groups = [np.unique(c, return_inverse=True)[1] for c in rows.columns(**columns)]
    drawn = bootstrap_values(
        lambda counts: np.array([_correlation(groups, times) for times in counts]), rows
    )
    return np.concatenate([[_correlation(groups, np.ones(len(rows), dtype=int))], drawn])


def _correlation(
    groups: Sequence[Int[np.ndarray, " N"]], times: Int[np.ndarray, " N"]
) -> Float[np.ndarray, "c c"]:
    """(c, c) Spearman correlations of a sample in which each row occurs `times` times.

    NaN if a column is constant. `groups` has an array (N,) for each column: the number of each
    value among the column's distinct values. Computing ranks from the sizes of these groups takes a
    quarter of the time of sorting every sample.
    """
    ranks = []
    for group in groups:
        sizes = np.bincount(group, times)
        ranks.append((sizes.cumsum() - (sizes - 1) / 2)[group])
    covariance = np.cov(ranks, fweights=times)
    spread = np.sqrt(np.diag(covariance))
    with np.errstate(invalid="ignore"):
        return covariance / spread / spread[:, None]


def _interval(values: Float[np.ndarray, " values"], rows: Clustered) -> Interval:
    """95 % interval of a statistic (1 + B,): its value, followed by its values on resamples."""
    return percentile_interval(float(values[0]), values[1:], rows.n_clusters)
