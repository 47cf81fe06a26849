"""Calibration by isotonic fits, and whether its probabilities hold what they say."""

import numpy as np
import pytest
from sklearn.isotonic import IsotonicRegression

from lm_polygraph_asmi.analysis.calibration import (
    SMALLEST_STEP,
    Step,
    calibrate,
    probability_at,
)


def noisy(n, slope=0.0, seed=0):
    """Scores, and errors of which a few more have high ones."""
    draw = np.random.default_rng(seed)
    scores = draw.random(n).round(2)
    return scores, draw.random(n) < 0.4 + slope * (scores - 0.5)


@pytest.mark.parametrize(("n", "slope"), [(10, 0), (49, 0.5), (60, 0), (300, 0.3), (999, 0.8)])
def test_steps_are_those_of_isotonic_regression_joined(n, slope):
    scores, wrong = noisy(n, slope)
    steps = calibrate(scores, wrong)
    assert sum(step.n for step in steps) == n
    assert all(step.n >= min(n, SMALLEST_STEP) for step in steps)
    rates = [step.errors / step.n for step in steps]
    assert rates == sorted(set(rates))
    # Each holds whole steps of the fit, and no answer of a score lies on two.
    starts = [step.start for step in steps]
    for start, end, step in zip(starts, [*starts[1:], np.inf], steps, strict=True):
        inside = (scores >= start) & (scores < end)
        assert (inside.sum(), wrong[inside].sum()) == (step.n, step.errors)
    fitted = IsotonicRegression().fit_transform(scores, wrong)
    for start in starts[1:]:
        assert fitted[scores < start].max() < fitted[scores >= start].min()


def test_steps_that_are_large_enough_stay():
    scores = np.repeat([0.1, 0.2, 0.3], 25)
    wrong = np.concatenate([np.arange(25) < errors for errors in (4, 12, 20)])
    assert calibrate(scores, wrong) == [(0.1, 25, 4), (0.2, 25, 12), (0.3, 25, 20)]


def test_scores_apart_by_rounding_alone():
    scores = np.r_[np.zeros(30), -1e-17 * np.arange(30), np.full(40, 1e-3)]
    for wrong in (np.arange(100) >= 30, np.arange(100) < 30):
        rates = [step.errors / step.n for step in calibrate(scores, wrong)]
        assert rates == sorted(set(rates))


def test_no_probability_is_certain():
    """Where all answers of a step are wrong, another one may be right."""
    steps = calibrate(np.arange(100.0), np.arange(100) >= 50)
    assert steps == [(0.0, 50, 0), (50.0, 50, 50)]
    found = [probability_at(steps, score) for score in (-5, 0, 49.9, 50, 1e9)]
    assert found == pytest.approx([0.5 / 51] * 3 + [50.5 / 51] * 2)
    # Many right answers are near to certain: one answer more is all that is added.
    assert probability_at([Step(0.0, 500, 0), Step(1.0, 500, 500)], 0) == pytest.approx(0.5 / 501)
    (one,) = calibrate(np.array([0.1, 0.9]), np.array([False, True]))
    assert probability_at([one], 0.9) == 0.5
    # Nor where all answers are of one kind.
    assert probability_at([Step(0.0, 500, 0)], 0) == pytest.approx(0.5 / 501)
    assert probability_at([Step(0.0, 3, 3)], 0) == pytest.approx(3.5 / 4)
