"""Rank correlations of tokens with intervals over their examples."""

import numpy as np
import pytest
from scipy.stats import spearmanr

from lm_polygraph_asmi.analysis.clusters import Clustered, percentiles
from lm_polygraph_asmi.heads.analysis import criticality_coupling, high_stratum, sharpening
from tests.analysis.simulation import keys

ROWS = Clustered(keys(8, 5), resamples=60)
NOISE = np.random.default_rng(0)
COLUMNS = [NOISE.normal(size=40), NOISE.integers(0, 4, 40), NOISE.exponential(size=40)]


def rho(one, other):
    return spearmanr(one, other).statistic


def difference(one, other, z):
    return rho(one, z) - rho(other, z)


def interval(statistic, *columns):
    """A statistic of columns, and its interval over resamples of their rows."""
    rows = [np.repeat(np.arange(40), counts) for counts in np.concatenate([*ROWS.draws()])]
    drawn = [statistic(*(column[own] for column in columns)) for own in rows]
    low, high = np.percentile(drawn, percentiles(8))
    return pytest.approx((statistic(*columns), low, high))


def test_a_coupling_holds_the_correlations_and_their_intervals():
    information, entropy, z = COLUMNS
    assert criticality_coupling(*COLUMNS, ROWS) == (
        interval(rho, information, z), interval(rho, entropy, z), interval(difference, *COLUMNS)
    )  # fmt: skip


def test_sharpening_is_the_difference_on_the_same_tokens():
    information, _, z = COLUMNS
    deep = information + 0.1 * z
    assert sharpening((information, z), (deep, z), ROWS) == interval(
        difference, deep, information, z
    )


def test_the_high_stratum_is_the_top_decile():
    values = np.random.default_rng(5).permutation(25)
    assert sorted(values[high_stratum(values)]) == [22, 23, 24]
    assert high_stratum(np.zeros(10)).tolist() == [True] + [False] * 9
    with pytest.raises(ValueError, match="not finite"):
        high_stratum([1, np.nan])


def test_what_is_constant_or_one_example_has_no_interval():
    information, *others = COLUMNS
    found = criticality_coupling(np.ones(40), *others, ROWS)
    assert np.isnan(found.information).all()
    assert np.isfinite(found.entropy).all()
    with pytest.raises(ValueError, match="information has 39"):
        criticality_coupling(information[:-1], *others, ROWS)
    one = criticality_coupling(*COLUMNS, Clustered(["same"] * 40, 2))
    assert np.isfinite(one.information.value)
    assert np.isnan([one.information.low, one.difference.high]).all()
