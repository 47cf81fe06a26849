"""Families of comparisons: adjusted p-values against plain loops, levels, and outcomes."""

import numpy as np
import pytest
from scipy.stats import norm
from statsmodels.stats.multitest import multipletests

from lm_polygraph_asmi.analysis import (
    Comparison,
    Interval,
    Labelled,
    equivalence,
    holm,
    prr_comparisons,
    prr_intervals,
    romano_wolf,
)
from lm_polygraph_asmi.analysis.hypotheses import equivalence_reach
from tests.analysis.simulation import keys, monte_carlo_error


def test_holm_is_statsmodels():
    rng = np.random.default_rng(0)
    p_values = rng.random(20) ** 3
    expected = multipletests(p_values, method="holm")[1]
    np.testing.assert_allclose(holm(p_values), expected)
    with_gaps = np.insert(p_values, 4, np.nan)
    found = holm(with_gaps)
    assert np.isnan(found[4])
    np.testing.assert_allclose(np.delete(found, 4), expected)
    assert holm([0.04]) == [0.04]


def test_romano_wolf_against_a_loop():
    rng = np.random.default_rng(1)
    values = np.array([0.3, -0.1, 0.25, 0.0])
    drawn = values + rng.normal(size=(300, 4)) @ rng.normal(size=(4, 4)) * 0.1
    found = romano_wolf(values, drawn)
    spread = drawn.std(0, ddof=1)
    left, least, expected = [0, 1, 2, 3], 0.0, {}
    while left:
        sizes = {i: abs(values[i]) / spread[i] for i in left}
        top = max(sizes, key=sizes.get)
        beaten = 0
        for row in drawn:
            beaten += max(abs(row[i] - values[i]) / spread[i] for i in left) >= sizes[top]
        least = max(least, (1 + beaten) / 301)
        expected[top] = least
        left.remove(top)
    assert found.tolist() == pytest.approx([expected[i] for i in range(4)])


def test_romano_wolf_of_one_is_a_bootstrap_test():
    drawn = np.random.default_rng(2).normal(2, 1, size=20_000)
    (found,) = romano_wolf([2.0], drawn[:, None])
    assert found == pytest.approx(2 * norm.sf(2), abs=0.004)
    assert romano_wolf([0.0], np.zeros((50, 1))) == [1]
    assert np.isnan(romano_wolf([np.nan, 1.0], np.full((1, 2), np.nan))).all()


def test_copies_cost_nothing():
    """Comparisons that are the same one are not paid for twice, as they are with Holm."""
    drawn = np.random.default_rng(3).normal(2.3, 1, size=(5000, 1))
    alone = romano_wolf([2.3], drawn)[0]
    assert romano_wolf([2.3] * 5, np.repeat(drawn, 5, axis=1)) == pytest.approx([alone] * 5)
    independent = np.random.default_rng(3).normal(2.3, 1, size=(5000, 5))
    assert romano_wolf([2.3] * 5, independent)[0] > 3 * alone


def test_the_family_keeps_its_level():
    """Five true nulls at once: one of them is rejected in at most about one case of twenty."""
    rng, rejected = np.random.default_rng(4), 0
    for _ in range(150):
        data = rng.normal(size=(60, 5)) + rng.normal(size=(60, 1))
        counts = rng.multinomial(60, np.full(60, 1 / 60), size=400)
        rejected += romano_wolf(data.mean(0), counts @ data / 60).min() < 0.05
    assert rejected / 150 <= 0.06 + 3 * monte_carlo_error(0.06, 150)


def test_few_clusters_make_p_values_larger():
    """A family keeps its level over eight clusters, which plain resamples of eight do not."""
    rng, plain, widened = np.random.default_rng(6), 0, 0
    for _ in range(300):
        data = rng.normal(size=(8, 3)) + rng.normal(size=(8, 1))
        counts = rng.multinomial(8, np.full(8, 1 / 8), size=400)
        given = data.mean(0), counts @ data / 8
        plain += romano_wolf(*given).min() < 0.05
        widened += romano_wolf(*given, clusters=8).min() < 0.05
    assert widened / 300 <= 0.06 + 3 * monte_carlo_error(0.06, 300) < plain / 300
    drawn = np.random.default_rng(5).normal(0.0, 0.0115, 10_000)
    assert equivalence(drawn, 0.02) < 0.05 < equivalence(drawn, 0.02, clusters=8)


def test_equivalence_is_the_90_percent_interval():
    rng = np.random.default_rng(5)
    for spread in (0.005, 0.0115, 0.0119, 0.0125, 0.013, 0.03):
        drawn = rng.normal(0.0, spread, 10_000)
        low, high = np.percentile(drawn, [5, 95])
        assert (equivalence(drawn, 0.02) < 0.05) == (-0.02 < low < high < 0.02)
    assert np.isnan(equivalence([np.nan]))


@pytest.mark.parametrize("clusters", [None, 8, 50])
def test_a_margin_out_of_reach(clusters):
    """Below it no difference is equivalent, wherever it lies; beyond it one of zero is."""
    drawn = np.random.default_rng(0).normal(0, 0.05, 4000)
    reach = equivalence_reach(drawn, clusters)
    middle = drawn - np.quantile(drawn, [0.05, 0.95]).mean()
    shifted = middle + np.linspace(-0.1, 0.1, 41)[:, None]
    assert min(equivalence(d, 0.97 * reach, clusters) for d in shifted) >= 0.05
    assert min(equivalence(d, 1.03 * reach, clusters) for d in shifted) < 0.05
    assert equivalence_reach(drawn[:10]) is None
    assert equivalence_reach([np.nan]) is None


@pytest.mark.parametrize(
    ("value", "p_value", "p_equivalent", "outcome"),
    [
        (0.1, 0.01, 0.9, "better"),
        (-0.1, 0.01, 0.9, "worse"),
        (0.01, 0.3, 0.01, "equivalent"),
        (0.01, 0.3, 0.3, "inconclusive"),  # an interval that includes 0 is no equality
        (0.01, float("nan"), float("nan"), None),
    ],
)
def test_outcomes(value, p_value, p_equivalent, outcome):
    assert Comparison(Interval(value, -1, 1), p_value, p_equivalent).outcome == outcome


def test_comparisons_share_their_draws_with_intervals():
    rng = np.random.default_rng(6)
    quality = rng.random(120)
    scores = {name: -quality + s * rng.normal(size=120) for name, s in zip("abc", (0.1, 0.4, 2))}  # noqa: B905
    scores["d"] = scores["a"] * 3
    pairs = [("a", "b"), ("a", "c"), ("a", "d")]
    alone, paired = prr_intervals(
        scores, Labelled(quality=quality, clusters=keys(40, 3), resamples=500), pairs
    )
    found, tested = prr_comparisons(
        scores, Labelled(quality=quality, clusters=keys(40, 3), resamples=500), pairs
    )
    assert found == alone
    assert {pair: c.difference for pair, c in tested.items()} == paired
    assert tested["a", "c"].outcome == "better"
    assert tested["a", "d"].outcome == "equivalent"
    _, other_way = prr_comparisons(
        scores, Labelled(quality=quality, clusters=keys(40, 3), resamples=500), [("c", "a")]
    )
    assert other_way["c", "a"].outcome == "worse"


def test_without_intervals_there_is_no_outcome():
    scores = {"a": np.arange(6.0), "b": np.ones(6)}
    _, tested = prr_comparisons(
        scores, Labelled(quality=np.arange(6) % 2, clusters=["one"] * 6), [("a", "b")]
    )
    assert tested["a", "b"].outcome is None
    assert (
        prr_comparisons(scores, Labelled(quality=np.arange(6) % 2, clusters=keys(3, 2)), [])[1]
        == {}
    )
