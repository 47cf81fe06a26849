"""Do answers come as those did that a threshold was made on? Told without labels."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from lm_polygraph_asmi.analysis.clusters import finite

FEWEST = 20
"""Values from which two distributions are compared; below, a test finds only what is glaring."""
LEVEL = 0.01
"""Of all quantities together."""


class Drift(NamedTuple):
    """A quantity that is distributed otherwise than it was.

    Attributes:
        name: of the quantity.
        distance: largest gap between the two distribution functions, 0 to 1.
        p_value: of so large a gap, times the number of quantities.
        before, now: medians.
    """

    name: str
    distance: float
    p_value: float
    before: float
    now: float

    def __str__(self) -> str:
        return (
            f"{self.name} is distributed otherwise than in the reference: median {self.now:.4g}, "
            f"there {self.before:.4g} (largest gap {self.distance:.2f}, p = {self.p_value:.2g})"
        )


def drifts(
    before: Mapping[str, ArrayLike], now: Mapping[str, ArrayLike], level: float = LEVEL
) -> list[Drift]:
    """Quantities whose distributions differ, by Kolmogorov's and Smirnov's two-sample test.

    Each is tested at `level` over their number. The test takes rows as independent: many rows over
    one passage make it too ready to warn. Nothing is said of fewer than `FEWEST` values.

    Args:
        before, now: name -> values; names that only one side has are passed over.

    Raises:
        ValueError: values that are not finite.

    Example:
        >>> before = {"length": range(100), "score": range(100)}
        >>> [found] = drifts(before, {"length": range(50, 150), "score": range(100)})
        >>> found.name, round(found.distance, 2), found.before, found.now
        ('length', 0.5, 49.5, 99.5)
    """
    from scipy.stats import ks_2samp

    names = [name for name in before if name in now]
    found = []
    for name in names:
        first, second = finite(**{name: before[name]}), finite(**{name: now[name]})
        if min(len(first), len(second)) < FEWEST:
            continue
        test = ks_2samp(first, second, method="asymp")
        p_value = min(1.0, float(test.pvalue) * len(names))
        if p_value < level:
            found.append(
                Drift(
                    name, float(test.statistic), p_value, float(np.median(first)),
                    float(np.median(second)),
                )
            )  # fmt: skip
    return found
