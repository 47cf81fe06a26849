"""p-values corrected for their number."""

import numpy as np
from numpy.typing import ArrayLike


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
