"""Do answers differ from those that a threshold was set on? Tested without labels."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from lm_polygraph_asmi.analysis.clusters import finite

FEWEST = 20
"""Fewest values for a comparison; with fewer, a test detects only large differences."""
LEVEL = 0.01
"""Level of the test over all quantities together."""


class Drift(NamedTuple):
    """A quantity whose distribution has changed, with its medians before and now.

    Attributes:
        distance: largest gap between the two distribution functions, 0 to 1.
        p_value: of so large a gap, times the number of quantities.
    """

    name: str
    distance: float
    p_value: float
    before: float
    now: float

    def __str__(self) -> str:
        return (
            f"{self.name} differs from the calibration: median {self.now:.4g} instead "
            f"of {self.before:.4g} (largest gap {self.distance:.2f}, p = {self.p_value:.2g})"
        )


def drifts(
    before: Mapping[str, ArrayLike], now: Mapping[str, ArrayLike], level: float = LEVEL
) -> list[Drift]:
    """Quantities whose distributions differ, by the two-sample Kolmogorov-Smirnov test.

    Each is tested at `level`, in (0, 1), divided by their number. The test takes rows as
    independent: many rows on one passage cause false warnings. Fewer than `FEWEST` values are
    untested.

    Args:
        before: name -> values (n,) of the calibration answers; gives the order of the result.
        now: name -> values (m,) of new answers; names on only one side are ignored.

    Example:
        >>> before = {"length": range(100), "score": range(100)}
        >>> [drift] = drifts(before, {"length": range(50, 150), "score": range(100)})
        >>> drift.name, round(drift.distance, 2), drift.before, drift.now
        ('length', 0.5, 49.5, 99.5)
    """
    from scipy.stats import ks_2samp

    names = [name for name in before if name in now]
    changed = []
    for name in names:
        first, second = finite(**{name: before[name]}), finite(**{name: now[name]})
        if min(len(first), len(second)) < FEWEST:
            continue
        test = ks_2samp(first, second, method="asymp")
        p_value = min(1.0, float(test.pvalue) * len(names))
        if p_value < level:
            medians = float(np.median(first)), float(np.median(second))
            changed.append(Drift(name, float(test.statistic), p_value, *medians))
    return changed
