"""A page on a calibration: error rate by share of accepted answers, and tests of the threshold.

The page loads nothing from elsewhere. A threshold passes its test exactly if the upper bound of its
error rate, at the level of the test, is at most the risk. So the chart of the bounds shows the
tests.
"""

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from lm_polygraph_asmi.analysis.clusters import cluster_codes
from lm_polygraph_asmi.analysis.risk_control import p_value, tests_of
from lm_polygraph_asmi.decisions.calibration import Calibration, Sample
from lm_polygraph_asmi.scoring.page import template
from lm_polygraph_asmi.scoring.signals import unit_of

SCALE = 10_000  # bounds are rounded up to 1 / SCALE
STEPS = (0.01, 0.02, 0.05, 0.1, 0.2)
Outcome = Literal["passed", "failed", "open"]
"""Outcome of a test. "failed" ends the sequence of tests; "open" means that labels are missing."""


class Bound(NamedTuple):
    """The test of one threshold: it passes if the error rate's upper bound is at most the risk."""

    share: float  # share of all answers that the threshold accepts
    bound: float  # one-sided upper bound at the test's own level, from the answers that test
    outcome: Outcome
    level: float  # level of the test


def bounds_of(calibration: Calibration) -> tuple[list[Bound], int]:
    """The tests of a calibration that was just made, and the number of answers that test.

    Each sequence of tests ends at the first test that is not passed. An answer without a label
    counts as wrong.
    """
    rule, sample, bounds = calibration.guarantee, calibration.sample, list[Bound]()
    tests = tests_of(
        (sample.values, sample.wrong, cluster_codes(sample.clusters)),
        np.zeros(len(sample.values), bool) if sample.chose is None else sample.chose,
        rule.risk, 1 - (1 - rule.confidence) / rule.signals, sample.unlabelled,
        rule.largest if rule.labels is None else 1,
    )  # fmt: skip
    score, wrong, codes = tests.rows
    for grid, level in tests.grids:
        for limit in grid:
            now, at_best = (
                partial(p_value, score <= limit, errors, codes, largest=tests.largest)
                for errors in (wrong != 0, wrong == 1)
            )
            outcome: Outcome = "failed"
            if now(rule.risk) <= level:
                outcome = "passed"
            elif at_best(rule.risk) <= level:
                outcome = "open"
            accepted = float((sample.values <= limit).mean())
            bounds.append(Bound(accepted, _least_risk(now, level), outcome, level))
            if outcome != "passed":
                break
    return bounds, len(score)


def _least_risk(p_value_of: Callable[[float], float], level: float) -> float:
    """The smallest risk at which a test passes: p-values fall as the risk rises, also for bets."""
    return bisect_left(range(SCALE), True, key=lambda r: p_value_of(r / SCALE) <= level) / SCALE


def error_rates(sample: Sample) -> tuple[np.ndarray, np.ndarray]:
    """For each threshold, share of accepted answers and error rate among the labelled ones, (t,).

    The last threshold is the value of the last answer with a label.
    """
    order = np.argsort(sample.values, kind="stable")
    wrong, ranked = sample.wrong[order], sample.values[order]
    labels = (~np.isnan(wrong)).cumsum()
    ends = np.flatnonzero(np.r_[np.diff(ranked) > 0, True] & (labels > 0))
    ends = ends[: 1 + np.searchsorted(labels[ends], labels[-1])]
    return (1 + ends) / len(order), np.nancumsum(wrong)[ends] / labels[ends]


def page_of(calibration: Calibration) -> str:
    """A self-contained HTML page of a calibration; ValueError if the calibration was loaded."""
    rule, sample = calibration.guarantee, calibration.sample
    if sample is None:
        raise ValueError(
            "expected a calibration that was just made, got a loaded one, which does not hold "
            "the labels: use `polygraph_asmi calibrate ... --html page.html`"
        )
    (shares, rates), (bounds, tested) = error_rates(sample), bounds_of(calibration)
    order, n = np.argsort(sample.values, kind="stable"), len(sample.values)
    # The first error rates are of few answers and jump, so they do not set the height.
    heights = [*rates[shares >= 0.1], *rates[-1:]]
    heights += [bound.bound for bound in bounds if bound.outcome != "open"]
    reach = min(1.0, 1.1 * max([2 * rule.risk, *heights]))
    step = next(step for step in STEPS if reach / step <= 6 or step == STEPS[-1])
    return template("decisions/picture.html.jinja").render(
        style=template().make_module().style(),  # type: ignore[attr-defined]
        calibration=calibration,
        rule=rule,
        lines=list(calibration.promise()),
        unit=unit_of(calibration.signal).strip(),
        bounds=bounds,
        outcomes={bound.outcome for bound in bounds},
        tested=tested,
        levels=sorted({f"{100 * (1 - bound.level):.3g}%" for bound in bounds}),
        top=step * np.ceil(reach / step - 1e-9),
        step=step,
        curve=list(zip(shares.tolist(), rates.tolist(), strict=True)),
        ticks={kind: (np.flatnonzero(sample.wrong[order] == kind) + 0.5) / n for kind in (0, 1)},
        scores=[
            (share, sample.values[order[min(n - 1, int(share * n))]])
            for share in (0, 0.25, 0.5, 0.75, 1)
        ],
        n=n,
    )
