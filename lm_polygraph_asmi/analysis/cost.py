"""Seconds per answer, by phase and by method."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class PhaseSeconds(NamedTuple):
    """Seconds per answer of one phase: median over the n answers after the warm-up."""

    median: float
    n: int


WARM_UP = 10
"""Number of first answers of a run that are left out."""
PHASES_OF = {
    "MSP": ("greedy",),
    "Semantic Entropy": ("greedy", "samples", "nli"),
    "Sem-ASMI": ("greedy", "asmi"),
    "Adapt-ASMI": ("greedy", "samples", "asmi", "diversity"),
    "ASMI alone, marginal": ("asmi",),
}
"""Row of table "cost" of the paper -> the phases that it needs."""


def method_seconds(seconds: Mapping[str, Sequence[float]]) -> dict[str, PhaseSeconds]:
    """Median over answers of a method's seconds, summed over its phases.

    This differs from the sum of medians. A method is left out if one of its phases was not
    measured, or was measured on other answers or on too few. Source: table "cost" of the paper.

    Args:
        seconds: (n,) seconds of every answer for each phase ("greedy", "samples", "nli", "asmi",
            "diversity"), in the order of computation. All depths of a run are summed.

    Example:
        >>> start = [30.0] * 10  # the first ten answers warm up
        >>> seconds = {"greedy": [*start, 1.0, 3.0, 2.0], "asmi": [*start, 2.0, 0.5, 3.0]}
        >>> method_seconds(seconds)["Sem-ASMI"]  # of 3, 3.5 and 5; the two medians would make 4
        PhaseSeconds(median=3.5, n=3)
    """
    by_method = {}
    for method, phases in PHASES_OF.items():
        measured = [seconds[phase] for phase in phases if phase in seconds]
        if len(measured) == len(phases) and len(set(map(len, measured))) == 1:
            by_method[method] = np.sum(measured, axis=0)
    return phase_seconds(by_method)


def phase_seconds(seconds: Mapping[str, Sequence[float]]) -> dict[str, PhaseSeconds]:
    """Median seconds per phase, as in `method_seconds`. Phases with too few answers are left out.

    Source: appendix "Measured Cost" of the paper.

    Example:
        >>> phase_seconds({"greedy": [30.0] * 10 + [1.0, 2.0, 3.0]})  # the first ten warm up
        {'greedy': PhaseSeconds(median=2.0, n=3)}
    """
    return {
        phase: PhaseSeconds(float(np.median(values[WARM_UP:])), len(values) - WARM_UP)
        for phase, values in seconds.items()
        if len(values) > WARM_UP
    }
