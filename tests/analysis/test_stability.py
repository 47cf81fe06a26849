import numpy as np
import pytest

from lm_polygraph_asmi.analysis import normalised_prr, rank_correlation, seed_stability


def test_stability_of_seeds():
    rng = np.random.default_rng(0)
    quality = rng.random(50)
    scores = -quality + rng.normal(scale=0.3, size=(5, 50))
    prr = [normalised_prr(row, quality) for row in scores]
    ranks = scores.argsort(1).argsort(1)
    pairs = [np.corrcoef(ranks[i], ranks[j])[0, 1] for i in range(5) for j in range(i)]
    expected = np.mean(prr), np.std(prr, ddof=1), min(prr), max(prr), np.mean(pairs)
    assert seed_stability(scores, quality) == pytest.approx(expected)


def test_rank_correlation_of_equal_reversed_tied_and_constant_scores():
    row = np.arange(10.0)
    assert rank_correlation(row, row**3) == pytest.approx(1)
    assert rank_correlation(row, -row) == pytest.approx(-1)
    # Spearman with ties is Pearson's of mid-ranks.
    expected = np.corrcoef([1.5, 1.5, 3, 4], [1, 2.5, 2.5, 4])[0, 1]
    assert rank_correlation([1, 1, 2, 3], [4, 5, 5, 9]) == pytest.approx(expected)
    assert np.isnan(rank_correlation(row, np.ones(10)))
