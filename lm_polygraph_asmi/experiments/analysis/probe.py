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
    table, total = np.asarray(flips, dtype=float), len(set(units))
    if table.ndim != 2:
        raise ValueError(f"flips must have shape (m, K), a column for each k, got {table.shape}")
    check_rows(units, **{f"column {i}": column for i, column in enumerate(table.T)})
    drawn = bootstrap_values(
        lambda counts: _means(table, counts), Clustered(units, resamples, seed)
    )
    drawn[:, np.ptp(table, axis=0) == 0] = np.nan  # equal values: no bounds
    rates = []
    for value, column, means in zip(table.mean(0).tolist(), table.T, drawn.T, strict=True):
        is_binary = bool(np.isin(column, (0, 1)).all())
        if is_binary and (total == len(column) or not np.ptp(column)):
            rates.append(wilson_interval(round(float(column.mean()) * total), total))
        else:
            rates.append(percentile_interval(value, means, total))
    return rates


def _means(table: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(draws, K) from (m, K) and how often each row is in each draw; NaN where none is."""
    with np.errstate(invalid="ignore"):
        return counts @ table / counts.sum(1, keepdims=True)
