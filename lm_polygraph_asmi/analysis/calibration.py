"""Probability of error by isotonic fits."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from lm_polygraph_asmi.analysis.clusters import binary, finite

SMALLEST_STEP = 25
"""Fewest answers of a step of the calibration; a plain isotonic fit has steps of one."""


class Step(NamedTuple):
    """Answers of a calibration that share a probability of error.

    Attributes:
        start: the lowest of their scores, nats.
        n, errors: answers, and wrong ones among them.
    """

    start: float
    n: int
    errors: int


def calibrate(scores: ArrayLike, wrong: ArrayLike) -> list[Step]:
    """Steps of an isotonic fit, merged with neighbours until each has `SMALLEST_STEP` answers.

    They are by increasing score, and their error rates increase, too. Fewer answers in total form
    one step.

    Example:
        >>> calibrate([0.1] * 25 + [0.9] * 25, [0] * 20 + [1] * 5 + [1] * 20 + [0] * 5)
        [Step(start=0.1, n=25, errors=5), Step(start=0.9, n=25, errors=20)]
    """
    score, errors = finite(scores=scores), binary(wrong=wrong).astype(float)
    if not score.size:
        raise ValueError("there is no answer to calibrate on")
    if score.shape != errors.shape:
        raise ValueError(f"{len(score)} scores for {len(errors)} answers: one each")
    distinct, group, sizes = np.unique(score, return_inverse=True, return_counts=True)
    sums = np.bincount(group, errors)
    fitted = _isotonic(sums / sizes, sizes)
    steps: list[Step] = []
    for part in np.split(np.arange(len(fitted)), 1 + np.flatnonzero(np.diff(fitted))):
        step = Step(float(distinct[part[0]]), int(sizes[part].sum()), int(sums[part].sum()))
        steps = _joined(steps, step) if steps and steps[-1].n < SMALLEST_STEP else [*steps, step]
    if len(steps) > 1 and steps[-1].n < SMALLEST_STEP:
        steps = _joined(steps[:-1], steps[-1])
    return steps


def _isotonic(rates: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The function that scikit-learn uses, called directly for a thousand fits."""
    from scipy.optimize import isotonic_regression  # a second to import

    return isotonic_regression(rates, weights=sizes).x


def _joined(steps: list[Step], step: Step) -> list[Step]:
    last = steps[-1]
    return [*steps[:-1], Step(last.start, last.n + step.n, last.errors + step.errors)]


def step_at(steps: Sequence[Step], score: float) -> Step:
    """The step that contains a score; the first for a score below all."""
    return steps[max(0, bisect_right([step.start for step in steps], score) - 1)]


def probability_at(steps: Sequence[Step], score: float) -> float:
    """Error rate of the score's step, with one more answer that is wrong at the overall rate.

    So no probability is 0 or 1, and a large step hardly changes. If all answers are right, or all
    wrong, that one counts as half wrong. ValueError for a score that is not finite, or no step.

    Example:
        >>> steps = [Step(0.1, 25, 5), Step(0.9, 25, 20)]  # half of all answers are wrong
        >>> round(probability_at(steps, 2.0), 2)  # (20 + 0.5) / (25 + 1)
        0.79
    """
    finite(score=score)
    if not steps:
        raise ValueError("there is no step: calibrate on at least one answer")
    overall = sum(step.errors for step in steps) / sum(step.n for step in steps)
    step = step_at(steps, score)
    return (step.errors + (overall if 0 < overall < 1 else 0.5)) / (step.n + 1)
