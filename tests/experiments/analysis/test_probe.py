"""Flip rates, and what random heads must flip."""

import numpy as np
import pytest

from lm_polygraph_asmi.analysis import Clustered, wilson_interval
from lm_polygraph_asmi.analysis.clusters import (
    percentile_interval,
    percentiles,
)
from lm_polygraph_asmi.experiments.analysis import flip_contrasts, flip_differences, flip_rates
from tests.analysis.simulation import coverage, keys


def test_rates_are_means_with_intervals_over_examples():
    rng = np.random.default_rng(0)
    flips = (rng.random((40, 3)) < [0.2, 0.5, 0.8]).astype(float)
    found = flip_rates(flips, keys(10, 4), resamples=200)
    rows = [
        np.repeat(np.arange(40), c)
        for c in np.concatenate([*Clustered(keys(10, 4), resamples=200).draws()])
    ]
    for k, rate in enumerate(found):
        assert rate.value == flips[:, k].mean()
        twin = np.percentile([flips[own, k].mean() for own in rows], percentiles(10))
        assert [rate.low, rate.high] == pytest.approx(twin)


def test_one_token_an_example_and_no_flip_at_all_take_wilsons():
    flips = np.array([[1, 0], [0, 0], [1, 0], [0, 0]])
    alone = flip_rates(flips, keys(4, 1))
    assert alone == [wilson_interval(2, 4), wilson_interval(0, 4)]
    pairs = flip_rates(flips, keys(2, 2))
    assert pairs[1] == wilson_interval(0, 2)  # two examples say less than four
    assert pairs[1].high > 0.3


def test_paired_differences_may_be_negative_and_hold_no_wilson():
    difference = np.array([[0.5], [-0.5], [0.5], [0.5]])
    (found,) = flip_differences(difference, keys(4, 1), resamples=200)
    assert found.value == 0.25
    assert found.low < 0 < found.high
    # 0 and 1 are no rate here, and equal differences have no width that is known.
    (found,) = flip_differences([[1], [0], [0], [0]], keys(4, 1), resamples=200)
    assert found.low == 0
    (found,) = flip_differences(np.zeros((4, 1)), keys(4, 1), resamples=20)
    assert found.value == 0
    assert np.isnan([found.low, found.high]).all()


def test_two_groups_are_drawn_with_their_shared_units():
    """The same by a plain loop over resamples, tokens counted one by one."""
    rng = np.random.default_rng(2)
    first, second = rng.integers(0, 2, (9, 2)), rng.integers(0, 2, (6, 2))
    units = [f"e{i}" for i in rng.integers(0, 5, 15)]
    found = flip_contrasts(first, units[:9], second, units[9:], resamples=40)
    table, drawn = np.concatenate([first, second]), []
    for counts in Clustered(units, resamples=40).draws():
        for times in counts:
            groups = []
            for own in (range(9), range(9, 15)):
                rows = [table[token] for token in own for _ in range(times[token])]
                groups.append(np.mean(rows, axis=0) if rows else np.full(2, np.nan))
            drawn.append(groups[0] - groups[1])
    for k, interval in enumerate(found):
        value = first[:, k].mean() - second[:, k].mean()
        assert interval == percentile_interval(value, np.array(drawn)[:, k], len(set(units)))


def test_two_groups_without_spread_have_no_bounds():
    (found,) = flip_contrasts(np.ones((4, 1)), keys(4, 1), np.zeros((3, 1)), keys(3, 1))
    assert found.value == 1
    assert np.isnan(found.low)
    with pytest.raises(ValueError, match=r"\(4, 1\) and \(3, 2\)"):
        flip_contrasts(np.ones((4, 1)), keys(4, 1), np.ones((3, 2)), keys(3, 1))


def test_intervals_hold_the_truth():
    rng = np.random.default_rng(1)
    rates = []
    for _ in range(150):
        chance = np.repeat(rng.beta(2, 2, 60), 3)  # answers differ in how easily they flip
        (rate,) = flip_rates((rng.random(180) < chance)[:, None], keys(60, 3), resamples=200)
        rates.append(rate)
    assert coverage(rates, 0.5) > 0.89


def test_what_is_no_table_of_flips_is_refused():
    with pytest.raises(ValueError, match=r"\(m, K\)"):
        flip_rates([1.0, 0.0], ["a", "b"])
    with pytest.raises(ValueError, match="not finite"):
        flip_rates([[np.nan]], ["a"])
    with pytest.raises(ValueError, match="no row"):
        flip_rates(np.empty((0, 2)), [])
