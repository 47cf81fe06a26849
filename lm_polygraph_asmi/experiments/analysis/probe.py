"""How often predictions flip when heads are ablated: rates with intervals over examples.

Source: appendix "Head-Level Structural Analysis" of the paper, table "causal-flip", which has
no intervals and no random heads as a control.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from lm_polygraph_asmi.analysis.clusters import (
    RESAMPLES,
    SEED,
    Clustered,
    Interval,
    bootstrap_values,
    check_rows,
    percentile_interval,
    wilson_interval,
)


def flip_rates(
    flips: ArrayLike, units: Sequence[str], resamples: int = RESAMPLES, seed: int = SEED
) -> list[Interval]:
    """Share of tokens that flip, for each number of ablated heads, with 95 % intervals.

    Bootstrap over whole units. Wilson's interval over units if every unit has one token, or if none
    or all flip, because resamples of equal values do not vary.

    Args:
        flips: (m, K) 0 or 1, a column for each number of ablated heads; a fraction for the mean
            over draws of random heads.
        units: (m,) key of each token's example, or cluster.

    Example:
        >>> keys = [str(n) for n in range(20)]
        >>> rates = flip_rates([[0, 1]] * 10 + [[0, 0]] * 10, keys)  # one head ablated, and two
        >>> [str(rate) for rate in rates]
        ['+0.00 [+0.00, +0.16]', '+0.50 [+0.30, +0.70]']
    """
    total, rates = len(set(units)), flip_differences(flips, units, resamples, seed)
    for i, column in enumerate(np.asarray(flips, dtype=float).T):
        is_binary = bool(np.isin(column, (0, 1)).all())
        if is_binary and (total == len(column) or not np.ptp(column)):
            rates[i] = wilson_interval(round(float(column.mean()) * total), total)
    return rates


def flip_differences(
    differences: ArrayLike, units: Sequence[str], resamples: int = RESAMPLES, seed: int = SEED
) -> list[Interval]:
    """Mean paired differences (m, K) of flips under two rules, with K 95 % bootstrap intervals.

    Without bounds if all tokens are equal, or with fewer than two units; all else as `flip_rates`.

    Example:
        >>> keys = [str(n) for n in range(20)]
        >>> [gap] = flip_differences([[1], [0], [1], [1]] * 5, keys)  # critical minus random heads
        >>> gap.value, gap.excludes(0)
        (0.75, True)
    """
    table = _checked(differences, units)
    drawn = bootstrap_values(
        lambda counts: _means(table, counts), Clustered(units, resamples, seed)
    )
    return _intervals(table.mean(0), drawn, np.ptp(table, axis=0) == 0, units)


def flip_contrasts(
    first: ArrayLike,
    first_units: Sequence[str],
    second: ArrayLike,
    second_units: Sequence[str],
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> list[Interval]:
    """Mean flips of one group of tokens minus those of another, with 95 % bootstrap intervals.

    Units with tokens of both groups are drawn with both. Without bounds with fewer than two units,
    or if tokens are equal within both groups.

    Args:
        first, second: (m, K) and (n, K), from -1 to 1: flips, or differences of flips.
        first_units, second_units: keys of the tokens' examples or clusters, of both groups alike.

    Example:
        >>> keys = [str(n) for n in range(20)]
        >>> [gap] = flip_contrasts([[1]] * 15 + [[0]] * 5, keys, [[0]] * 20, keys)
        >>> str(gap)
        '+0.75 [+0.55, +0.95]'
    """
    a, b = _checked(first, first_units), _checked(second, second_units)
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"both flips must have a column for each k: {a.shape} and {b.shape}")
    units, split = [*first_units, *second_units], len(a)
    drawn = bootstrap_values(
        lambda counts: _means(a, counts[:, :split]) - _means(b, counts[:, split:]),
        Clustered(units, resamples, seed),
    )
    constant = (np.ptp(a, axis=0) == 0) & (np.ptp(b, axis=0) == 0)
    return _intervals(a.mean(0) - b.mean(0), drawn, constant, units)


def _checked(flips: ArrayLike, units: Sequence[str]) -> np.ndarray:
    table = np.asarray(flips, dtype=float)
    if table.ndim != 2:
        raise ValueError(f"flips must have shape (m, K), a column for each k, got {table.shape}")
    check_rows(units, **{f"column {i}": column for i, column in enumerate(table.T)})
    return table


def _intervals(
    values: np.ndarray, drawn: np.ndarray, constant: np.ndarray, units: Sequence[str]
) -> list[Interval]:
    """Of (K,) values and (resamples, K) draws; without bounds where the flips are constant."""
    drawn[:, constant] = np.nan
    columns = zip(values, drawn.T, strict=True)
    return [percentile_interval(float(v), column, len(set(units))) for v, column in columns]


def _means(table: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(draws, K) from (m, K) and how often each row is in each draw; NaN where none is."""
    with np.errstate(invalid="ignore"):
        return counts @ table / counts.sum(1, keepdims=True)
