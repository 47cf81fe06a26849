"""How many questions a comparison needs, from a pilot."""

import math
from statistics import NormalDist
from typing import NamedTuple


class SampleSize(NamedTuple):
    """Clusters and questions needed to detect a difference, in the pilot's proportion.

    `detectable` is the difference that a sample of the pilot's size detects with the same power.
    """

    clusters: int
    questions: int
    detectable: float


def sample_size(
    difference: float,
    standard_error: float,
    clusters: int,
    questions: int,
    power: float = 0.8,
    level: float = 0.05,
) -> SampleSize:
    """Clusters and questions for a two-sided test to detect a difference with this power.

    Assumes that the pilot's standard error falls with the square root of the number of clusters, as
    for means; for PRR, this is approximate. With few errors or clusters, a pilot's standard error
    is imprecise.

    Args:
        difference: to be detected, for example in PRR.
        standard_error: of the pilot's difference, over clusters.
        clusters, questions: numbers of the pilot.
        power: chance to detect the difference, in (0, 1).
        level: of the two-sided test, in (0, 1).

    Example:
        >>> pilot = {"standard_error": 0.05, "clusters": 100, "questions": 200}
        >>> [sample_size(gap, **pilot).clusters for gap in (0.1, 0.05)]  # half as large: four times
        [197, 785]
    """
    positive = 0 < difference < math.inf and 0 < standard_error < math.inf
    if not (positive and 0 < clusters <= questions):
        raise ValueError(
            "expected a positive, finite difference and standard error, and at least as many "
            f"questions as clusters, got {difference}, {standard_error}, {clusters} clusters, "
            f"{questions} questions"
        )
    if not (0 < power < 1 and 0 < level < 1):
        raise ValueError(f"power and level must lie in (0, 1), got {power} and {level}")
    quantiles = NormalDist().inv_cdf(1 - level / 2) + NormalDist().inv_cdf(power)
    needed = max(2, math.ceil(clusters * (quantiles * standard_error / difference) ** 2))
    return SampleSize(needed, math.ceil(needed * questions / clusters), quantiles * standard_error)


def equivalence_size(
    margin: float,
    standard_error: float,
    clusters: int,
    questions: int,
    power: float = 0.8,
    level: float = 0.05,
) -> int:
    """Questions for two one-sided tests to show that two equal methods are equivalent.

    Both tests must reject, so each may miss in at most half of the allowed cases. Smaller
    differences than the margin count as equivalent; `level`, below 0.5, is of each one-sided test.
    All else is as in `sample_size`.

    Example:
        >>> pilot = {"standard_error": 0.02, "clusters": 100, "questions": 200}
        >>> [equivalence_size(margin, **pilot) for margin in (0.04, 0.02)]  # half: four times
        [430, 1714]
    """
    # The normal quantiles of a two-sided test at twice the level are those of one-sided ones.
    return sample_size(
        margin, standard_error, clusters, questions, 1 - (1 - power) / 2, 2 * level
    ).questions
