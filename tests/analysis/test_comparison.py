import numpy as np
import pytest
from sklearn.metrics import roc_auc_score
from statsmodels.stats.contingency_tables import mcnemar as statsmodels_mcnemar

from lm_polygraph_asmi.analysis import auroc, mcnemar


@pytest.mark.parametrize("levels", [1, 2, 5, 1000])
def test_auroc_is_scikit_learns(levels):
    rng = np.random.default_rng(5)
    score, wrong = rng.integers(levels, size=80), rng.random(80) < 0.3
    assert auroc(score, wrong) == pytest.approx(roc_auc_score(wrong, score), rel=1e-12)


@pytest.mark.parametrize("flagged", [0, 1, 15, 40, 60])
def test_mcnemar_is_statsmodels(flagged):
    rng = np.random.default_rng(9)
    first, second = rng.normal(size=(2, 60))
    wrong = rng.random(60) < 1 / (1 + np.exp(-1.5 * first))
    found = mcnemar(first, second, wrong, flagged)
    a, b = (set(np.argsort(score)[60 - flagged :].tolist()) for score in (first, second))
    errors = set(np.flatnonzero(wrong).tolist())
    both, one, other = len(errors & a & b), len(errors & (a - b)), len(errors & (b - a))
    p_value = statsmodels_mcnemar([[both, one], [other, len(errors - a - b)]], exact=True).pvalue
    assert found == (one, other, both, flagged, pytest.approx(p_value))


def test_mcnemar_shares_flags_among_equal_scores():
    """Two flags for three equal answers: two thirds of one each, whatever the order of the file."""
    assert mcnemar([1, 2, 3], [3, 2, 1], [0, 0, 0], 2) == (0, 0, 0, 2, 1.0)
    found = mcnemar([1, 1, 1, 0], [0, 1, 2, 3], [1, 0, 0, 1], 2)
    assert found[:3] == pytest.approx((2 / 3, 1, 0))
    found = mcnemar([1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0], 2)
    assert found == pytest.approx((2, 2 / 3, 0, 2, 1.0))  # of two and one
