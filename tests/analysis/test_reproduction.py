"""The verdict rule of reproductions: its level by simulation, and its edges."""

import numpy as np
import pytest
from scipy.stats import binomtest, norm

from lm_polygraph_asmi.analysis.clusters import Clustered, Interval, cluster_interval
from lm_polygraph_asmi.analysis.reproduction import (
    AGREES,
    DIFFERS,
    INCONCLUSIVE,
    compare_published,
    reproduction_verdicts,
    standard_error,
)

MARGIN, LEVEL = 0.10, 0.05


def at_most(count: int, n: int, rate: float) -> bool:
    """Whether a count is no evidence, at one in ten thousand, that its rate is above `rate`."""
    return binomtest(count, n, rate, alternative="greater").pvalue > 1e-4


def published(rng: np.random.Generator, truth: np.ndarray, error: float, digits: int = 2):
    """Values and errors as a paper prints them, and as `read_published` takes the errors."""
    values = np.round(truth + error * rng.normal(size=truth.shape), digits)
    half = 0.5 * 10.0**-digits
    return values, round(error, digits) + half, half


def comparisons(rng, difference: float, rows: int, here: float = 0.018, there: float = 0.0249):
    """Rows whose true values differ by `difference`, with normal errors."""
    truth = rng.uniform(0, 0.8, rows)
    values, error, rounding = published(rng, truth, there)
    measured = truth + difference + here * rng.normal(size=rows)
    reach = norm.isf(0.025) * here
    return [
        compare_published(Interval(m, m - reach, m + reach), v, error, rounding)
        for m, v in zip(measured, values, strict=True)
    ]


def test_false_differences_are_rare_over_a_whole_table():
    """At most one table of fifty in twenty has any, where every number is reproduced."""
    rng, tables = np.random.default_rng(0), 300
    false = sum(
        any(
            v == DIFFERS for v, _ in reproduction_verdicts(comparisons(rng, 0.0, 50), [MARGIN] * 50)
        )
        for _ in range(tables)
    )
    assert at_most(false, tables, LEVEL)


@pytest.mark.parametrize("difference", [MARGIN, -MARGIN, 1.5 * MARGIN])
def test_false_agreement_is_rare(difference):
    rng, rows = np.random.default_rng(1), 8000
    verdicts = reproduction_verdicts(comparisons(rng, difference, rows), [MARGIN] * rows)
    assert at_most(sum(v == AGREES for v, _ in verdicts), rows, LEVEL)


def test_it_has_power():
    """True reproductions with small errors mostly agree, and large differences are named."""
    rng, rows = np.random.default_rng(2), 500
    same = comparisons(rng, 0.0, rows, here=0.01, there=0.01)
    far = comparisons(rng, 0.3, rows, here=0.01, there=0.01)
    verdicts = [v for v, _ in reproduction_verdicts([*same, *far], [MARGIN] * 2 * rows)]
    assert verdicts[:rows].count(AGREES) > 0.95 * rows
    assert verdicts[rows:].count(DIFFERS) == rows
    # With errors as large as the margin nothing agrees, whatever was measured.
    vague = comparisons(rng, 0.0, rows, here=0.05, there=0.05)
    assert all(c.reach > MARGIN for c in vague)
    assert {v for v, _ in reproduction_verdicts(vague, [MARGIN] * rows)} == {INCONCLUSIVE}


def test_the_level_holds_for_bootstrap_intervals_over_clusters():
    """Means of clustered answers, here by their bootstrap, there by the sd over many samples."""
    rng, repeats, clusters, size = np.random.default_rng(3), 120, 60, 3
    keys = [str(i // size) for i in range(clusters * size)]

    def sample() -> np.ndarray:
        return np.repeat(rng.normal(size=clusters), size) + rng.normal(size=clusters * size)

    error = np.std([sample().mean() for _ in range(2000)])
    compared = []
    for _ in range(repeats):
        answers, value = sample(), round(sample().mean(), 2)
        measured = cluster_interval(
            lambda rows, a=answers: float(a[rows].mean()), Clustered(keys, resamples=200)
        )
        compared.append(compare_published(measured, value, error, 0.005))
    false = sum(c.p_value < LEVEL for c in compared)
    assert at_most(false, repeats, LEVEL)
    assert false > 0.01 * repeats  # it is a test


def test_values_of_a_formula():
    """Twin: the interval and p-value written out."""
    measured = Interval(0.52, 0.46, 0.58)
    compared = compare_published(measured, 0.45, 0.025, 0.005)
    here = 0.12 / (2 * norm.isf(0.025))
    spread = (here**2 + 0.025**2) ** 0.5
    assert standard_error(measured) == pytest.approx(here)
    assert compared.difference == pytest.approx(0.07)
    assert compared.low == pytest.approx(0.07 - norm.isf(0.05) * spread - 0.005, abs=1e-12)
    assert compared.high == pytest.approx(0.07 + norm.isf(0.05) * spread + 0.005)
    assert compared.reach == pytest.approx(norm.isf(0.05) * spread + 0.005)
    assert compared.p_value == pytest.approx(2 * norm.sf((0.07 - 0.005) / spread), rel=1e-6)


def test_a_count_has_no_error_but_its_rounding():
    exact = Interval(499.0, 499.0, 499.0)
    assert compare_published(exact, 499.0, 0.0, 0.5).p_value == 1
    assert compare_published(exact, 480.0, 0.0, 0.5).p_value == 0
    verdicts = reproduction_verdicts(
        [compare_published(exact, value, 0.0, 0.5) for value in (499.0, 495.0, 400.0)], [9.98] * 3
    )
    assert [v for v, _ in verdicts] == [AGREES, AGREES, DIFFERS]


def test_agreement_comes_before_significance():
    """A difference within the margin agrees, however significant; Holm counts all rows."""
    tiny = compare_published(Interval(0.52, 0.5195, 0.5205), 0.5, 0.0005, 0.0)
    assert tiny.p_value < 1e-9
    assert reproduction_verdicts([tiny], [0.05]) == [(AGREES, tiny.p_value)]
    alone = compare_published(Interval(0.56, 0.54, 0.58), 0.5, 0.02, 0.0)
    assert reproduction_verdicts([alone], [0.05])[0][0] == DIFFERS
    vague = compare_published(Interval(0.5, 0.4, 0.6), 0.5, 0.1, 0.0)
    among = reproduction_verdicts([alone, *[vague] * 20], [0.05] * 21)
    assert among[0][0] == INCONCLUSIVE
    assert among[0][1] == pytest.approx(21 * alone.p_value)
