"""Which tokens and heads are chosen, and how often predictions flip."""

import numpy as np
import pandas as pd
import pytest

from lm_polygraph_asmi.analysis import Clustered, wilson_interval
from lm_polygraph_asmi.analysis.clusters import percentiles
from lm_polygraph_asmi.heads.analysis import flip_rates
from lm_polygraph_asmi.heads.analysis.probe import COUNT, NUMBERS, extremes
from tests.analysis.simulation import keys


def test_extremes_are_disjoint_and_ties_go_by_order():
    high, low = extremes(pd.Series([0.1, 0.5, 0.5, np.nan, 0.0, 0.9]), 2)
    assert (high.tolist(), low.tolist()) == ([5, 1], [4, 0])
    high, low = extremes(pd.Series([0.2] * 5))
    assert (high.tolist(), low.tolist()) == ([0, 1], [2, 3])
    assert (COUNT, NUMBERS) == (200, (1, 2, 4, 8, 16))  # the paper's


def test_rates_are_means_with_intervals_over_examples():
    flips = (np.random.default_rng(0).random((40, 3)) < [0.2, 0.5, 0.8]).astype(float)
    clustered = Clustered(keys(10, 4), 200)
    rows = [np.repeat(np.arange(40), counts) for counts in np.concatenate([*clustered.draws()])]
    for k, rate in enumerate(flip_rates(flips, clustered)):
        twin = np.percentile([flips[own, k].mean() for own in rows], percentiles(10))
        assert rate == pytest.approx((flips[:, k].mean(), *twin))


def test_one_token_an_example_and_no_flip_at_all_take_wilsons():
    flips = np.array([[1, 0], [0, 0], [1, 0], [0, 0]])
    alone = flip_rates(flips, Clustered(keys(4, 1)))
    assert alone == [wilson_interval(2, 4), wilson_interval(0, 4)]
    pairs = flip_rates(flips, Clustered(keys(2, 2)))
    assert pairs[1] == wilson_interval(0, 2)  # two examples say less than four
    assert pairs[1].high > 0.3
    (equal,) = flip_rates(np.full((4, 1), 0.5), Clustered(keys(2, 2)))  # no spread, no interval
    assert equal.value == 0.5
    assert np.isnan(equal.low)
    with pytest.raises(ValueError, match=r"\(m, K\)"):
        flip_rates([1.0, 0.0], Clustered(["a", "b"]))
