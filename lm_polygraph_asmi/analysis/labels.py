"""Do results depend on the correctness label? Thresholds, wrong labels, length of answers."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import kendalltau, rankdata

from lm_polygraph_asmi.analysis.clusters import Interval, finite
from lm_polygraph_asmi.analysis.comparison import auroc

THRESHOLDS = (0.3, 0.4, 0.5, 0.6, 0.7)
"""Quality from which an answer counts as right."""


def auroc_by_label(
    scores: Mapping[str, ArrayLike],
    qualities: Mapping[str, ArrayLike],
    thresholds: Sequence[float] = THRESHOLDS,
) -> dict[tuple[str, float], dict[str, float]]:
    """AUROC of every method by every metric at every threshold of quality.

    (metric, threshold) -> method -> AUROC, 0.5 = chance; labels that are the same for all answers
    are left out. A score may be infinite, not NaN.

    Example:
        >>> scores, qualities = {"msp": [0.3, 0.1, 0.9]}, {"ROUGE-L": [0.9, 0.6, 0.2]}
        >>> auroc_by_label(scores, qualities, thresholds=[0.5, 0.7])  # is the middle answer right?
        {('ROUGE-L', 0.5): {'msp': 1.0}, ('ROUGE-L', 0.7): {'msp': 0.5}}
    """
    by_label = {}
    for metric, quality in qualities.items():
        for threshold in thresholds:
            wrong = finite(quality=quality) < threshold
            if wrong.any() and not wrong.all():
                by_label[metric, threshold] = {m: auroc(s, wrong) for m, s in scores.items()}
    return by_label


def same_order(first: Mapping[str, float], second: Mapping[str, float]) -> float:
    """Kendall's tau-b between two rankings of the same methods; NaN if one is constant.

    1 = the same order, -1 = reversed, by values such as AUROC. ValueError if a method is in only
    one of them.

    Example:
        >>> round(same_order({"msp": 0.8, "asmi": 0.9}, {"asmi": 0.7, "msp": 0.6}), 2)
        1.0
    """
    if set(first) != set(second):
        unshared = ", ".join(sorted(set(first) ^ set(second)))
        raise ValueError(f"both rankings must be of the same methods; only in one: {unshared}")
    return float(kendalltau([first[m] for m in first], [second[m] for m in first]).statistic)


def label_noise(interval: Interval) -> float:
    """Share of wrong labels that would erase the verdict "ranks errors", or may hide it.

    If a share e0 of answers labelled right is truly wrong, and e1 of those labelled wrong truly
    right, both at random, AUROC - 0.5 is (1 - e0 - e1) times its true value. The width of its
    interval, the argument, is assumed to be unchanged.

    Returns:
        e0 + e1. Positive if the interval excludes 0.5: with so much more noise, it would include
        0.5. Negative if it includes 0.5: with so much noise in these labels, the interval of the
        true AUROC would exclude 0.5. NaN if undefined, or at exactly 0.5.

    Example:
        >>> round(label_noise(Interval(0.7, 0.6, 0.8)), 2)  # with it, 0.2 above chance is 0.1
        0.5
        >>> round(label_noise(Interval(0.55, 0.45, 0.65)), 2)  # without it, 0.05 would be 0.1
        -0.5
    """
    value, low, high = interval
    gap, width = abs(value - 0.5), value - low if value > 0.5 else high - value
    if np.isnan(width) or gap == 0 or width == 0:
        return float("nan")
    return float(1 - width / gap) if interval.excludes(0.5) else float(gap / width - 1)


def strata(values: ArrayLike, parts: int = 3) -> np.ndarray:
    """(n,) index of the part, from 0, that each value, such as a length, belongs to by rank.

    Equal values stay together, so parts may differ in size, or be fewer than `parts`.

    Example:
        >>> strata([5, 1, 9, 1, 7, 3]).tolist()  # low, middle, high
        [1, 0, 2, 0, 2, 1]
    """
    place = (rankdata(finite(values=values), method="average") - 0.5) / len(np.asarray(values))
    return np.unique(np.floor(place * parts), return_inverse=True)[1]
