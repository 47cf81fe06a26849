"""Which tokens and heads are chosen, and how often predictions flip."""

import numpy as np
import pandas as pd
import pytest

from lm_polygraph_asmi.analysis import Clustered, wilson_interval
from lm_polygraph_asmi.analysis.clusters import percentiles
from lm_polygraph_asmi.heads.analysis import flip_rates, probe
from tests.analysis.simulation import keys


@pytest.mark.parametrize("asked", [(2,), (4,), (40,), (probe.COUNT,), ()])
@pytest.mark.parametrize("values", [1, 2, 6])
def test_extremes_are_the_ends_of_the_order(asked, values):
    """Of equal ones the first are taken; with too few tokens, each group is half of them."""
    mi = pd.Series(np.random.default_rng(1).integers(0, values, 21) / 10)
    mi[[3, 11]] = np.nan
    known = [at for at in mi.index if not np.isnan(mi[at])]
    most = min([*asked, len(known) // 2])
    high = sorted(known, key=lambda at: -mi[at])[:most]
    low = sorted(set(known) - set(high), key=lambda at: (mi[at], at))[:most]
    assert [list(part) for part in probe.extremes(mi, *asked)] == [high, low]


def test_the_numbers_are_the_papers():
    assert (probe.COUNT, probe.NUMBERS) == (200, (1, 2, 4, 8, 16))


def test_rates_are_means_with_intervals_over_examples():
    flips = (np.random.default_rng(0).random((40, 3)) < [0.2, 0.5, 0.8]).astype(float)
    clustered = Clustered([*keys(9, 4), *"aabc"], 200)  # of different sizes
    rows = [np.repeat(np.arange(40), counts) for counts in np.concatenate([*clustered.draws()])]
    for k, rate in enumerate(flip_rates(flips, clustered)):
        twin = np.percentile([flips[own, k].mean() for own in rows], percentiles(12))
        assert rate == pytest.approx((flips[:, k].mean(), *twin))


def test_one_token_an_example_and_no_flip_at_all_take_wilsons():
    flips = np.array([[1, 0], [0, 0], [1, 0], [0, 0]])
    alone = flip_rates(flips, Clustered(keys(4, 1)))
    assert alone == [wilson_interval(2, 4), wilson_interval(0, 4)]
    pairs = flip_rates(flips, Clustered(keys(2, 2)))
    assert pairs[1] == wilson_interval(0, 2)  # two examples say less than four
    (equal,) = flip_rates(np.full((4, 1), 0.5), Clustered(keys(2, 2)))  # no spread, no interval
    np.testing.assert_equal([*equal], [0.5, np.nan, np.nan])
    with pytest.raises(ValueError, match="shape"):
        flip_rates([1.0, 0.0], Clustered(["a", "b"]))
