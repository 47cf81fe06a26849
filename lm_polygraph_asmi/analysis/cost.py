"""Seconds per answer and phase."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class PhaseSeconds(NamedTuple):
    """Seconds an answer takes in one phase.

    Attributes:
        median: over the answers.
        n: answers counted, warm-up left out.
    """

    median: float
    n: int


def phase_seconds(
    seconds: Mapping[str, Sequence[float]], warm_up: int = 10
) -> dict[str, PhaseSeconds]:
    """Median seconds per phase, the first `warm_up` answers left out.

    A phase with too few answers for that is left out. Source: appendix "Measured Cost" of the
    paper.

    Args:
        seconds: by phase, (n,) seconds of every answer in the order they were made.
        warm_up: answers at the beginning that do not count.
    """
    return {
        phase: PhaseSeconds(float(np.median(taken[warm_up:])), len(taken) - warm_up)
        for phase, taken in seconds.items()
        if len(taken) > warm_up
    }
