import numpy as np
import pytest

from lm_polygraph_asmi.analysis import (
    normalised_prr,
    rank_correlations,
    seed_stability,
)


def test_stability_of_seeds():
    rng = np.random.default_rng(0)
    quality = rng.random(50)
    scores = -quality + rng.normal(scale=0.3, size=(5, 50))
    found = seed_stability(scores, quality)
    prr = [normalised_prr(row, quality) for row in scores]
    assert found.mean == pytest.approx(np.mean(prr))
    assert found.sd == pytest.approx(np.std(prr, ddof=1))
    assert (found.low, found.high) == (min(prr), max(prr))
    ranks = scores.argsort(1).argsort(1)
    pairs = [np.corrcoef(ranks[i], ranks[j])[0, 1] for i in range(5) for j in range(i)]
    assert found.rank_correlation == pytest.approx(np.mean(pairs))


def test_rank_correlation_of_equal_and_reversed_seeds():
    row = np.arange(10.0)
    found = rank_correlations([row, row**3, -row])
    np.testing.assert_allclose(found, [1, -1, -1])


@pytest.mark.filterwarnings("ignore::scipy.stats.ConstantInputWarning")
def test_a_constant_seed_ranks_nothing():
    row = np.arange(10.0)
    assert np.isnan(rank_correlations([row, np.ones(10)])).all()
    found = seed_stability([row, np.ones(10)], row % 3)
    assert np.isnan(found.rank_correlation)
    assert found.high == pytest.approx(max(0, normalised_prr(row, row % 3)), abs=1e-12)


def test_stability_without_wrong_answers_is_undefined():
    scores = np.random.default_rng(1).random((3, 10))
    found = seed_stability(scores, np.ones(10))
    assert np.isnan(found[:4]).all()
    assert np.isfinite(found.rank_correlation)


def test_ties_share_their_rank():
    """Spearman with ties is Pearson's of mid-ranks."""
    first, second = [1, 1, 2, 3], [4, 5, 5, 9]
    found = rank_correlations([first, second])
    expected = np.corrcoef([1.5, 1.5, 3, 4], [1, 2.5, 2.5, 4])[0, 1]
    assert found == pytest.approx([expected])
