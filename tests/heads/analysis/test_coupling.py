"""Rank correlations of tokens with intervals over their examples."""

import numpy as np
import pytest
from scipy.stats import spearmanr

from lm_polygraph_asmi.analysis.clusters import Clustered, percentiles
from lm_polygraph_asmi.heads.analysis import criticality_coupling, high_stratum, sharpening
from tests.analysis.simulation import keys

ROWS = Clustered(keys(8, 5), resamples=200)
NOISE = np.random.default_rng(0)
COLUMNS = [NOISE.normal(size=40), NOISE.integers(0, 4, 40), NOISE.exponential(size=40)]


def test_a_coupling_holds_the_correlations_and_their_intervals():
    information, entropy, z = COLUMNS
    found = criticality_coupling(information, entropy, z, ROWS)
    assert found.information.value == pytest.approx(spearmanr(information, z).statistic)
    assert found.entropy.value == pytest.approx(spearmanr(entropy, z).statistic)
    draws = [np.repeat(np.arange(40), c) for c in np.concatenate([*ROWS.draws()])]
    ours, theirs = (
        np.array([spearmanr(column[rows], z[rows]).statistic for rows in draws])
        for column in (information, entropy)
    )
    for part, drawn in ((found.information, ours), (found.difference, ours - theirs)):
        assert [part.low, part.high] == pytest.approx(np.percentile(drawn, percentiles(8)))


def test_sharpening_is_the_difference_on_the_same_tokens():
    information, _, z = COLUMNS
    deep = information, information + 0.1 * z
    found = sharpening((information, z), deep, ROWS)
    both = [spearmanr(*pair).statistic for pair in (deep, (information, z))]
    assert found.value == pytest.approx(both[0] - both[1])
    assert found.low > 0
    assert sharpening(deep, deep, ROWS) == pytest.approx((0, 0, 0))


def test_the_high_stratum_is_the_top_decile():
    values = np.random.default_rng(5).permutation(25)
    assert sorted(values[high_stratum(values)]) == [22, 23, 24]
    assert high_stratum(np.zeros(10)).tolist() == [True] + [False] * 9
    with pytest.raises(ValueError, match="not finite"):
        high_stratum([1, np.nan])


def test_what_is_constant_or_one_example_has_no_interval():
    information, entropy, z = COLUMNS
    found = criticality_coupling(np.ones(40), entropy, z, ROWS)
    assert np.isnan(found.information).all()
    assert np.isfinite(found.entropy).all()
    with pytest.raises(ValueError, match="information has 39 values"):
        criticality_coupling(information[:-1], entropy, z, ROWS)
    one = criticality_coupling(information, entropy, z, Clustered(["same"] * 40))
    assert np.isfinite(one.information.value)
    assert np.isnan([one.information.low, one.difference.high]).all()
