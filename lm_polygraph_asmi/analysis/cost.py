"""Seconds per answer and phase."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class PhaseSeconds(NamedTuple):
    """Seconds an answer takes in one phase: median over the n answers after the warm-up."""

    median: float
    n: int


PHASES_OF = {
    "MSP": ("greedy",),
    "Semantic Entropy": ("greedy", "samples", "nli"),
    "Sem-ASMI": ("greedy", "asmi"),
    "Adapt-ASMI": ("greedy", "samples", "asmi", "diversity"),
    "ASMI alone, marginal": ("asmi",),
}
"""Phases that each row of table "cost" of the paper needs."""


def method_seconds(
    seconds: Mapping[str, Sequence[float]], warm_up: int = 10
) -> dict[str, PhaseSeconds]:
    """Median over answers of the seconds of all phases of a method together.

    This differs from the sum of medians. A method is left out if one of its phases was not
    measured, or was measured for other or too few answers. Source: table "cost" of the paper.

    Args:
        seconds: phase ("greedy", "samples", "nli", "asmi", "diversity") -> (n,) seconds of every
            answer, in order of computation; summed over all depths of a run.
        warm_up: number of first answers left out, also of `phase_seconds`.

    Example:
        >>> seconds = {"greedy": [1.0, 3.0, 2.0], "asmi": [2.0, 0.5, 3.0]}
        >>> method_seconds(seconds, warm_up=0)["Sem-ASMI"]  # of 3, 3.5 and 5; both medians make 4
        PhaseSeconds(median=3.5, n=3)
    """
    by_method = {}
    for method, phases in PHASES_OF.items():
        measured = [seconds[phase] for phase in phases if phase in seconds]
        if len(measured) == len(phases) and len(set(map(len, measured))) == 1:
            by_method[method] = np.sum(measured, axis=0)
    return phase_seconds(by_method, warm_up)


def phase_seconds(
    seconds: Mapping[str, Sequence[float]], warm_up: int = 10
) -> dict[str, PhaseSeconds]:
    """Median seconds per phase, as in `method_seconds`; one with too few answers is left out.

    Source: appendix "Measured Cost" of the paper.

    Example:
        >>> phase_seconds({"greedy": [30.0, 1.0, 2.0, 3.0]}, warm_up=1)  # the first answer warms up
        {'greedy': PhaseSeconds(median=2.0, n=3)}
    """
    return {
        phase: PhaseSeconds(float(np.median(values[warm_up:])), len(values) - warm_up)
        for phase, values in seconds.items()
        if len(values) > warm_up
    }
