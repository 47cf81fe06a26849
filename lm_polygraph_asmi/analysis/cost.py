"""Seconds per answer and phase, from what a run saved."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lm_polygraph_asmi.manifest import PHASES


class PhaseSeconds(NamedTuple):
    """Seconds an answer takes in one phase.

    Attributes:
        median: over the answers.
        n: answers counted, warm-up left out.
    """

    median: float
    n: int


def phase_seconds(stats: Mapping[str, Sequence[Any]], warm_up: int = 10) -> dict[str, PhaseSeconds]:
    """Median seconds per phase that was saved, the first `warm_up` answers left out.

    A phase with too few answers for that is left out. Source: appendix "Measured Cost" of the
    paper.
    """
    return {
        phase: PhaseSeconds(float(np.median(stats[name][warm_up:])), len(stats[name]) - warm_up)
        for name, phase in PHASES.items()
        if len(stats.get(name, ())) > warm_up
    }
