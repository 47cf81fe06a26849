"""Does a measured value reproduce a published one? Agrees, differs or inconclusive."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from scipy.special import ndtr, ndtri

from lm_polygraph_asmi.analysis.clusters import Interval
from lm_polygraph_asmi.analysis.hypotheses import LEVEL, holm

AGREES, DIFFERS, INCONCLUSIVE = "agrees", "differs", "inconclusive"
REPRODUCTIONS = (AGREES, DIFFERS, INCONCLUSIVE)


def standard_error(interval: Interval) -> float:
    """Of a 95 % interval: its width over twice the normal quantile; NaN if it has no ends.

    Example:
        >>> round(standard_error(Interval(0.5, 0.402, 0.598)), 3)
        0.05
    """
    return (interval.high - interval.low) / (2 * float(ndtri(0.975)))


class Reproduction(NamedTuple):
    """The difference of a measured value and a published one, the former minus the latter.

    Attributes:
        low, high: its 90 % interval, widened by the rounding of the published value.
        p_value: two-sided, that the two differ by no more than that rounding; not adjusted.
        reach: smallest margin within which a difference of 0 could agree: half the width of the
            interval.
    """

    difference: float
    low: float
    high: float
    p_value: float
    reach: float

    def agrees(self, margin: float) -> bool:
        """Whether the 90 % interval is within the margin: two one-sided tests at 5 %."""
        return -margin <= self.low and self.high <= margin


def compare_published(
    measured: Interval, value: float, error: float, rounding: float
) -> Reproduction:
    """Compare a measured value with a published one, of independent samples.

    Both errors are taken as normal and independent. Answers to the same questions share a part of
    it, so the interval is rather too wide, and neither verdict too frequent.

    Args:
        value, error: as published, with its standard error.
        rounding: half of the last digit of the published value.

    Example:
        >>> measured = Interval(0.50, 0.48, 0.52)
        >>> near = compare_published(measured, value=0.51, error=0.01, rounding=0.005)
        >>> near.agrees(margin=0.05), near.agrees(margin=0.02)
        (True, False)
    """
    error_here = standard_error(measured)
    if not all(map(math.isfinite, (measured.value, error_here, value, error))):
        raise ValueError("no finite value and interval")
    difference, spread = measured.value - value, math.hypot(error_here, error)
    reach = spread * float(ndtri(0.95)) + rounding
    beyond = abs(difference) - rounding - 1e-12
    exact = 0.0 if beyond > 0 else 1.0
    p_value = min(1.0, 2 * float(ndtr(-beyond / spread))) if spread else exact
    return Reproduction(difference, difference - reach, difference + reach, p_value, reach)


def reproduction_verdicts(
    compared: Sequence[Reproduction], margins: Sequence[float]
) -> list[tuple[str, float]]:
    """One of `REPRODUCTIONS` and the p-value after Holm for each comparison.

    Agrees: the 90 % interval of the difference is within its margin (two one-sided tests,
    Schuirmann 1987), which was fixed before, even if the difference is significant. Differs: p <
    .05 after Holm over all.

    Example:
        >>> measured, published = Interval(0.5, 0.48, 0.52), [0.50, 0.30, 0.45]
        >>> compared = [compare_published(measured, value, 0.02, 0.0) for value in published]
        >>> [verdict for verdict, _ in reproduction_verdicts(compared, [0.05] * 3)]
        ['agrees', 'differs', 'inconclusive']
    """
    adjusted = holm([c.p_value for c in compared]).tolist()
    rows = zip(compared, margins, adjusted, strict=True)
    return [
        (AGREES if c.agrees(margin) else DIFFERS if p < LEVEL else INCONCLUSIVE, p)
        for c, margin, p in rows
    ]
