"""Does disagreement correlate with concentrated head criticality, and more than entropy does?

Source: appendix "Head-Level Structural Analysis" of the paper, table "op-coupling".
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from lm_polygraph_asmi.analysis.clusters import (
    RESAMPLES,
    SEED,
    Clustered,
    Interval,
    bootstrap_values,
    check_rows,
    finite,
    percentile_interval,
)

HIGH = 0.1
"""Share of tokens in the paper's high-MI stratum: the top decile."""


@dataclass(frozen=True)
class Coupling:
    """Spearman correlations with the standardised concentration z_t of head criticality.

    Attributes:
        information: of MI_t, the paper's first column.
        entropy: of H_t, its second.
        difference: the former minus the latter, on the same resamples.
        tokens, units: numbers of tokens, and of independent units (examples or clusters).
    """

    information: Interval
    entropy: Interval
    difference: Interval
    tokens: int
    units: int


def criticality_coupling(
    information: ArrayLike,
    entropy: ArrayLike,
    z: ArrayLike,
    units: Sequence[str],
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> Coupling:
    """Rank correlations over tokens, with intervals over whole units.

    A drawn unit brings all its tokens, as often as it is drawn; z_t is fixed.

    Args:
        information: (N,) MI_t, nats.
        entropy: (N,) single-pass entropy H_t, nats.
        z: (N,) from `permutation_null`, higher = fewer heads than noise.
        units: (N,) key of each token's example, as in the paper, or of its cluster.

    Example:
        >>> z, units = np.arange(40.0), [str(n // 4) for n in range(40)]
        >>> coupling = criticality_coupling(z**2, [0.0, 1.0] * 20, z, units, resamples=200)
        >>> [round(rho.value, 1) for rho in (coupling.information, coupling.entropy)]  # z**2, noise
        [1.0, 0.0]
        >>> coupling.difference.excludes(0)
        True
    """
    rho = correlations([information, entropy, z], units, resamples, seed)
    total, mi, h = len(set(units)), rho[:, 0, 2], rho[:, 1, 2]
    a, b, difference = (interval(column, total) for column in (mi, h, mi - h))
    return Coupling(a, b, difference, len(units), total)


def sharpening(
    shallow: tuple[ArrayLike, ArrayLike],
    deep: tuple[ArrayLike, ArrayLike],
    units: Sequence[str],
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> Interval:
    """Rank correlation of MI_t and z_t at a deeper layer minus that at another, same tokens.

    Positive = stronger at the deeper layer; NaN if a column is constant. `shallow` and `deep` are
    MI_t (N,) and z_t (N,) each, as in `criticality_coupling`.

    Example:
        >>> z, units = np.arange(40.0), [str(n // 4) for n in range(40)]
        >>> shallow, deep = ([0.0, 1.0] * 20, z), (z**2, z)  # noise at the first layer, then z**2
        >>> sharpening(shallow, deep, units, resamples=200).low > 0
        True
    """
    rho = correlations([*shallow, *deep], units, resamples, seed)
    return interval(rho[:, 2, 3] - rho[:, 0, 1], len(set(units)))


def high_stratum(information: ArrayLike) -> np.ndarray:
    """(N,) whether a token is in the tenth with the highest MI_t, at least one; ties in order.

    Example:
        >>> high_stratum([0.1, 0.9, 0.2]).tolist()  # a tenth of three is one
        [False, True, False]
    """
    values = finite(information=information)
    order = np.argsort(-values, kind="stable")
    chosen = np.zeros(len(values), dtype=bool)
    chosen[order[: int(np.ceil(HIGH * len(values)))]] = True
    return chosen


def correlations(
    columns: Sequence[ArrayLike], units: Sequence[str], resamples: int, seed: int = SEED
) -> np.ndarray:
    """Spearman correlations of all pairs of c columns: on all rows, then on resamples of units.

    (1 + resamples, c, c), (1, c, c) with fewer than two units; NaN if a column is constant.
    """
    check_rows(units, **{f"column {i}": column for i, column in enumerate(columns)})
    ranks = [_Ranks(column) for column in columns]
    matrices = _matrices(ranks, np.ones((1, len(units)), dtype=int))
    if len(set(units)) < 2:
        return matrices
    drawn = bootstrap_values(
        lambda counts: _matrices(ranks, counts), Clustered(units, resamples, seed)
    )
    return np.concatenate([matrices, drawn])


def interval(values: np.ndarray, units: int) -> Interval:
    """95 % interval of a statistic (1 + B,): its value, then its values on resamples."""
    return percentile_interval(float(values[0]), values[1:], units)


class _Ranks:
    """Mid-ranks of one column in samples with repeated rows."""

    def __init__(self, column: ArrayLike) -> None:
        values, self.group = np.unique(np.asarray(column, dtype=float), return_inverse=True)
        self.order = np.argsort(self.group, kind="stable")
        self.starts = np.searchsorted(self.group[self.order], np.arange(len(values)))

    def __call__(self, counts: np.ndarray) -> np.ndarray:
        """(b, N) ranks, in samples with each row `counts` (b, N) times."""
        sizes = np.add.reduceat(counts.take(self.order, axis=1), self.starts, axis=1)
        return (sizes.cumsum(1) - (sizes - 1) / 2).take(self.group, axis=1)


def _matrices(ranks: Sequence[_Ranks], counts: np.ndarray) -> np.ndarray:
    """(b, c, c) Spearman correlations in samples of counts (b, N)."""
    table = np.stack([of(counts) for of in ranks], axis=1)
    total = counts.sum(1)[:, None, None]
    centred = table - (table * counts[:, None]).sum(2, keepdims=True) / total
    squares = (centred * counts[:, None]) @ centred.transpose(0, 2, 1)
    spread = np.sqrt(np.einsum("bcc->bc", squares))
    scale = spread[:, :, None] * spread[:, None, :]
    return np.divide(squares, scale, out=np.full_like(squares, np.nan), where=scale > 1e-9)
