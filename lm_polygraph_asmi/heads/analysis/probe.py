"""Choose tokens and heads for the causal probe, and compute how often predictions flip.

Source: appendix "Head-Level Structural Analysis" of the paper, table "causal-flip". The paper has
no intervals, and no random heads as a control.
"""

import numpy as np
import pandas as pd
from jaxtyping import Float
from numpy.typing import ArrayLike

from lm_polygraph_asmi.analysis.clusters import (
    Clustered,
    Interval,
    bootstrap_interval,
    wilson_interval,
)

COUNT = 200
"""Number of tokens with the highest MI, and with the lowest MI, as in the paper."""
NUMBERS = (1, 2, 4, 8, 16)
"""Numbers of heads that are ablated together, as in the paper."""


def extremes(mi: pd.Series, count: int = COUNT) -> tuple[pd.Index, pd.Index]:
    """Indices of the `count` tokens of highest and of lowest MI, the most extreme first.

    If there are fewer than 2 x count tokens, each group has half of them. Among tokens of equal MI,
    the first ones are taken. NaN is never chosen.
    """
    known = mi.dropna()
    count = min(count, len(known) // 2)
    high = known.nlargest(count).index
    return high, known.drop(high).nsmallest(count).index


def ablations(order: ArrayLike, numbers: ArrayLike) -> Float[np.ndarray, "... K H"]:
    """(..., K, H) masks, 1 = kept. For each k of the K `numbers`, the first k heads of the order
    (..., H) are ablated."""
    rank = np.argsort(np.asarray(order), axis=-1)  # place of each head in the order
    return (rank[..., None, :] >= np.asarray(numbers)[:, None]).astype(float)


def flip_rates(flips: ArrayLike, rows: Clustered) -> list[Interval]:
    """Share of tokens that flip for each number of ablated heads, with 95 % intervals.

    Intervals are from a bootstrap over whole clusters. They are Wilson's over clusters if each
    cluster has one token, or if none or all flip, since resamples of equal values do not vary.

    Args:
        flips: (m, K), a column for each number of ablated heads. 1 = the token flips, or a fraction
            of draws for random heads.
        rows: the tokens. Their clusters are answers or passages.

    Example:
        >>> rows = Clustered([str(n) for n in range(20)])
        >>> rates = flip_rates([[0, 1]] * 10 + [[0, 0]] * 10, rows)  # one head ablated, and two
        >>> [str(rate) for rate in rates]
        ['+0.00 [+0.00, +0.16]', '+0.50 [+0.30, +0.70]']
    """
    (table,) = rows.columns(flips=flips)
    if table.ndim != 2:
        raise ValueError(f"flips must have shape (m, K), a column for each k, got {table.shape}")
    return [_rate(column, rows) for column in table.T]


def _rate(flips: Float[np.ndarray, " m"], rows: Clustered) -> Interval:
    """The share of tokens that flip, for one number of heads."""
    rate, total, equal = float(flips.mean()), rows.n_clusters, not np.ptp(flips)
    if np.isin(flips, (0, 1)).all() and (equal or total == len(flips)):
        return wilson_interval(round(rate * total), total)
    if equal:
        return Interval(rate, float("nan"), float("nan"))
    return bootstrap_interval(rate, lambda counts: counts @ flips / counts.sum(1), rows)
