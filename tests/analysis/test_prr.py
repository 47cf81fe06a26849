from itertools import product

import numpy as np
import pytest
from lm_polygraph.ue_metrics import PredictionRejectionArea
from lm_polygraph.ue_metrics.ue_metric import normalize_metric
from statsmodels.stats.contingency_tables import mcnemar as statsmodels_mcnemar

from lm_polygraph_asmi.analysis import (
    Clustered,
    Labelled,
    mcnemar,
    normalised_prr,
    prr_with_error,
    rank_correlation,
    seed_stability,
)
from lm_polygraph_asmi.analysis.prr import Rejection, prr_draws, weighted_prr
from tests.analysis.simulation import keys

RNG = np.random.default_rng(0)
QUALITY = RNG.random(400)
SORTED = np.sort(QUALITY)  # the worst possible order of the file
UNCERTAINTY = -QUALITY + RNG.normal(scale=0.5, size=400)
FEW = np.array([1.0, 0.2, 0.5, 0.9, 0.0, 0.6])


def host_prr(uncertainty, quality, chance=None) -> float:
    """The host's, with the mean quality as its random baseline if no other is given."""
    host = PredictionRejectionArea()
    if chance is None:
        chance = ((quality - quality.min()) / np.ptp(quality)).mean()
    return normalize_metric(host(uncertainty, quality), host(-quality, quality), chance)


@pytest.mark.parametrize("value", [1, 0.1, 0.7, 1 / 3])
def test_equal_quality_has_no_prr_whatever_its_rounding(value):
    """Sums of 0.1 are not multiples of it: their noise over noise would be a PRR."""
    uncertainty = UNCERTAINTY[:50]
    answers = Labelled(quality=np.full(50, value), clusters=range(50), resamples=50)
    for found in (
        normalised_prr(uncertainty, answers.quality), prr_draws([uncertainty], answers),
        prr_with_error(uncertainty, answers), normalised_prr(range(3), [0.3, 0.1 + 0.2, 0.3]),
    ):  # fmt: skip
        assert np.isnan(found).all()
    one_error = np.arange(100_000) == 77  # whose share is near to rounding
    assert normalised_prr(one_error, ~one_error) == pytest.approx(1)


def test_standard_error_is_the_spread_over_resamples_of_rows():
    """Of single rows, whatever their clusters."""
    score, quality = np.round(UNCERTAINTY[:60], 1), QUALITY[:60]
    draws = Clustered(range(60), resamples=50).draws()
    samples = [np.repeat(np.arange(60), counts) for part in draws for counts in part]
    expected = np.std([normalised_prr(score[rows], quality[rows]) for rows in samples], ddof=1)
    answers = Labelled(quality=quality, clusters=["one"] * 60, resamples=50)
    assert prr_with_error(score, answers).standard_error == pytest.approx(expected)


def test_a_constant_score_is_random_rejection():
    for score, quality in product((np.ones(400), np.full(400, -np.inf)), (QUALITY, SORTED)):
        assert normalised_prr(score, quality) == pytest.approx(0, abs=1e-12)
    few_bits = np.ones((1, 400), dtype=np.int8)  # as draws are: sums of counts need more
    area = Rejection(np.zeros(400), QUALITY).area(few_bits, few_bits @ QUALITY)
    assert area == pytest.approx(QUALITY.mean())
    # To the last bit, else a tiny negative PRR would be written as -0.00.
    counts = np.random.default_rng(5).multinomial(6, np.full(6, 1 / 6), size=50)
    mean = np.add.reduceat(counts * FEW, [0], axis=1)[:, 0] / 6
    assert np.array_equal(Rejection(np.zeros(6), FEW).area(counts, counts @ FEW), mean)


@pytest.mark.parametrize("decimals", [8, 0])
@pytest.mark.parametrize("binary", [False, True])
def test_weights_are_repeated_rows(decimals, binary):
    """Against the naive loop: a row that counts k times stands in the sample k times."""
    uncertainty, quality = np.round(UNCERTAINTY[:60], decimals), QUALITY[:60]
    other = np.random.default_rng(5).integers(3, size=60)
    if binary:
        quality = (quality > 0.3).astype(float)
    counts = np.random.default_rng(6).integers(4, size=(20, 60))
    found = weighted_prr([uncertainty, other], quality, iter([counts[:15], counts[15:]]))
    for scale, shift in ((1e-10, 0), (1e8, 3), (1, -0.7)):  # quality of any metric
        again = weighted_prr([uncertainty, other], scale * quality + shift, iter([counts]))
        np.testing.assert_allclose(again, found, atol=1e-6)
    expected = [
        [normalised_prr(np.repeat(s, c), np.repeat(quality, c)) for s in (uncertainty, other)]
        for c in counts
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    if decimals == 8:  # copies have equal quality, so that their order is nothing to the host
        host = [host_prr(np.repeat(uncertainty, c), np.repeat(quality, c)) for c in counts]
        np.testing.assert_allclose(found[:, 0], host, rtol=1e-9)


def test_draws_are_as_many_as_asked_for():
    """Also after fewer of the same, which are kept."""
    answers = Labelled(quality=QUALITY, clusters=keys(100, 4))
    for number in (4, 9, 5):
        assert prr_draws([UNCERTAINTY], answers, number).shape == (number, 1)


def test_stability_of_seeds():
    quality = QUALITY[:50]
    scores = -quality + np.random.default_rng(0).normal(scale=0.3, size=(5, 50))
    prr = [normalised_prr(row, quality) for row in scores]
    pairs = np.corrcoef(scores.argsort(1).argsort(1))[np.tril_indices(5, -1)]
    expected = np.mean(prr), np.std(prr, ddof=1), min(prr), max(prr), np.mean(pairs)
    assert seed_stability(scores, quality) == pytest.approx(expected)


def test_rank_correlation_of_equal_reversed_tied_and_constant_scores():
    """Spearman with ties is Pearson's of mid-ranks."""
    row, tied = np.arange(10.0), np.corrcoef([1.5, 1.5, 3, 4], [1, 2.5, 2.5, 4])[0, 1]
    for first, second, expected in (
        (row, row**3, 1), (row, -row, -1), ([1, 1, 2, 3], [4, 5, 5, 9], tied),
        (row, np.ones(10), np.nan),
    ):  # fmt: skip
        assert rank_correlation(first, second) == pytest.approx(expected, nan_ok=True)


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
    for first, second, wrong, expected in (
        ([1, 2, 3], [3, 2, 1], [0, 0, 0], (0, 0, 0, 2, 1.0)),
        ([1, 1, 1, 0], [0, 1, 2, 3], [1, 0, 0, 1], (2 / 3, 1, 0, 2, 1.0)),
        # The p-value is of two and one.
        ([1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0], (2, 2 / 3, 0, 2, 1.0)),
    ):
        assert mcnemar(first, second, wrong, 2) == pytest.approx(expected)
