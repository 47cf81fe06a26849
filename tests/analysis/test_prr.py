from itertools import permutations

import numpy as np
import pytest
from lm_polygraph.ue_metrics import PredictionRejectionArea
from lm_polygraph.ue_metrics.ue_metric import get_random_scores, normalize_metric

from lm_polygraph_asmi.analysis import Clustered, Labelled, normalised_prr, prr_with_error
from lm_polygraph_asmi.analysis.prr import Rejection, prr_draws, weighted_prr
from tests.analysis.simulation import keys


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    quality = rng.random(400)
    return -quality + rng.normal(scale=0.5, size=400), quality


@pytest.mark.parametrize("binary", [False, True])
def test_equals_the_hosts_prr(data, binary):
    uncertainty, quality = data
    if binary:
        quality = (quality > 0.6).astype(float)
    host = PredictionRejectionArea()
    expected = normalize_metric(
        host(uncertainty, quality), host(-quality, quality), get_random_scores(host, quality)
    )
    # The host's random baseline is itself an average of 1000 shuffles.
    assert normalised_prr(uncertainty, quality) == pytest.approx(expected, abs=0.01)


def test_oracle_and_its_reverse(data):
    _, quality = data
    assert normalised_prr(-quality, quality) == pytest.approx(1)
    assert normalised_prr(quality, quality) < -0.9


def test_random_scores_are_uninformative():
    rng = np.random.default_rng(1)
    quality = rng.random(500)
    values = [normalised_prr(rng.random(500), quality) for _ in range(200)]
    assert abs(np.mean(values)) < 4 * np.std(values) / np.sqrt(200)


def test_scale_of_quality_does_not_matter(data):
    uncertainty, quality = data
    assert normalised_prr(uncertainty, 7 * quality + 2) == pytest.approx(
        normalised_prr(uncertainty, quality)
    )


def test_equal_quality_has_no_prr():
    assert np.isnan(normalised_prr([1, 2, 3], [1, 1, 1]))
    assert np.isnan(prr_with_error([1, 2, 3], Labelled([0, 0, 0], "abc")).standard_error)


@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3])
def test_rounding_of_equal_quality_is_no_difference(value):
    """Sums of 0.1 are not multiples of it: their noise over noise would be a PRR."""
    uncertainty = np.random.default_rng(8).random(50)
    assert np.isnan(normalised_prr(uncertainty, np.full(50, value)))
    rows = [str(i) for i in range(50)]
    assert np.isnan(
        prr_draws([uncertainty], Labelled(quality=np.full(50, value), clusters=rows, resamples=50))
    ).all()


def test_standard_error_is_the_spread_over_new_data():
    """Against what it estimates: the spread of PRR over independently drawn samples."""
    rng = np.random.default_rng(2)

    def draw() -> tuple[np.ndarray, np.ndarray]:
        quality = rng.random(150)
        return -quality + rng.normal(scale=0.5, size=150), quality

    def estimate() -> float:
        uncertainty, quality = draw()
        answers = Labelled(quality=quality, clusters=["one"] * 150, resamples=200)
        return prr_with_error(uncertainty, answers).standard_error

    true_spread = np.std([normalised_prr(*draw()) for _ in range(400)])
    estimates = [estimate() for _ in range(10)]
    assert np.mean(estimates) == pytest.approx(true_spread, rel=0.2)


TIED = np.array([0.3, 0.3, 0.3, 0.1, 0.9, 0.9])
QUALITY = np.array([1.0, 0.2, 0.5, 0.9, 0.0, 0.6])


def host_prr(uncertainty, quality) -> float:
    """The host's, with the mean quality as its random baseline."""
    host = PredictionRejectionArea()
    scaled = (quality - quality.min()) / np.ptp(quality)
    return normalize_metric(host(uncertainty, quality), host(-quality, quality), scaled.mean())


def test_ties_count_as_the_hosts_mean_over_all_orders_of_the_file():
    orders = [list(order) for order in permutations(range(6))]
    over_orders = [host_prr(TIED[order], QUALITY[order]) for order in orders]
    assert np.std(over_orders) > 0.1  # the host's value is one of these
    assert normalised_prr(TIED, QUALITY) == pytest.approx(np.mean(over_orders), rel=1e-12)
    # And so for quality that is right or wrong, where the oracle has ties too.
    binary = (QUALITY > 0.4).astype(float)
    expected = np.mean([host_prr(TIED[order], binary[order]) for order in orders])
    assert normalised_prr(TIED, binary) == pytest.approx(expected, rel=1e-12)


def test_ties_in_many_rows_against_the_host():
    rng = np.random.default_rng(3)
    quality = rng.random(300)
    tied = np.round(-quality + rng.normal(scale=0.5, size=300), 1)
    over_orders = []
    for _ in range(300):
        order = rng.permutation(300)
        over_orders.append(host_prr(tied[order], quality[order]))
    error = np.std(over_orders) / np.sqrt(300)
    assert normalised_prr(tied, quality) == pytest.approx(np.mean(over_orders), abs=4 * error)


def test_the_order_of_the_file_does_not_matter(data):
    uncertainty, quality = data
    tied = np.round(uncertainty)
    order = np.random.default_rng(4).permutation(len(quality))
    assert normalised_prr(tied[order], quality[order]) == pytest.approx(
        normalised_prr(tied, quality), rel=1e-10
    )


def test_a_constant_score_is_random_rejection(data):
    _, quality = data
    for score in (np.ones(400), np.full(400, -np.inf)):
        assert normalised_prr(score, quality) == pytest.approx(0, abs=1e-12)
        # The worst possible order of the file changes nothing.
        assert normalised_prr(score, np.sort(quality)) == pytest.approx(0, abs=1e-12)
    found = prr_with_error(np.ones(400), Labelled(quality=quality, clusters=range(400)))
    assert found == pytest.approx((0, 0), abs=1e-12)


@pytest.mark.parametrize("decimals", [8, 0])
@pytest.mark.parametrize("binary", [False, True])
def test_weights_are_repeated_rows(data, decimals, binary):
    """Against the naive loop: a row that counts k times stands in the sample k times."""
    uncertainty, quality = (column[:60] for column in data)
    uncertainty = np.round(uncertainty, decimals)
    other = np.random.default_rng(5).integers(3, size=60)
    if binary:
        quality = (quality > 0.3).astype(float)
    counts = np.random.default_rng(6).integers(4, size=(20, 60))
    found = weighted_prr([uncertainty, other], quality, iter([counts[:15], counts[15:]]))
    expected = [
        [normalised_prr(np.repeat(s, c), np.repeat(quality, c)) for s in (uncertainty, other)]
        for c in counts
    ]
    assert found.shape == (20, 2)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    if decimals == 8:  # copies have equal quality, so that their order is nothing to the host
        host = [host_prr(np.repeat(uncertainty, c), np.repeat(quality, c)) for c in counts]
        np.testing.assert_allclose(found[:, 0], host, rtol=1e-9)


def test_draws_are_a_naive_loop_over_resamples_of_clusters(data):
    uncertainty, quality = (column[:60] for column in data)
    names = keys(15, 4)
    found = prr_draws(
        [uncertainty, -uncertainty], Labelled(quality=quality, clusters=names, resamples=40, seed=7)
    )
    rows = [
        np.repeat(np.arange(60), c)
        for d in Clustered(names, resamples=40, seed=7).draws()
        for c in d
    ]
    expected = [
        [normalised_prr(sign * uncertainty[r], quality[r]) for sign in (1, -1)] for r in rows
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_a_sample_of_equally_good_answers_has_no_prr():
    counts = np.array([[1, 1, 1], [2, 0, 1], [0, 3, 0]])
    found = weighted_prr([[1.0, 2.0, 3.0]], [1, 0, 1], iter([counts]))[:, 0]
    np.testing.assert_array_equal(np.isnan(found), [False, True, True])


def test_one_row_has_no_prr():
    assert np.isnan(prr_with_error([0.4], Labelled([0], "a"))).all()


def test_prr_does_not_depend_on_the_scale_of_quality(data):
    uncertainty, quality = data
    expected = normalised_prr(uncertainty, quality)
    for scale, shift in ((1e-10, 0), (1e8, 3), (1, -0.7)):
        found = normalised_prr(uncertainty, scale * quality + shift)
        assert found == pytest.approx(expected, abs=1e-6)


def test_one_error_among_very_many_can_be_ranked():
    quality = np.ones(100_000)
    quality[77] = 0
    score = np.zeros(100_000)
    score[77] = 1
    assert normalised_prr(score, quality) == pytest.approx(1)
    assert normalised_prr(-score, quality) < -0.05
    # Rounding errors are no contrast.
    assert np.isnan(normalised_prr(np.arange(3), [0.3, 0.1 + 0.2, 0.3]))


def test_area_against_a_loop():
    """Mean of the mean of the kept rows, the most uncertain rejected one by one."""
    quality = QUALITY.tolist()
    kept = [3, 0, 1, 2, 5, 4]
    distinct = np.argsort(kept).astype(float)
    levels = [np.mean([quality[i] for i in kept[:k]]) for k in range(1, 7)]
    found = Rejection(distinct).area(QUALITY, np.ones((1, 6), dtype=int))
    assert found == pytest.approx([np.mean(levels)])


def test_a_constant_score_has_the_area_of_chance_to_the_last_bit():
    """Else a tiny negative PRR would be written as -0.00."""
    counts = np.random.default_rng(5).multinomial(6, np.full(6, 1 / 6), size=50)
    mean = np.add.reduceat(counts * QUALITY, [0], axis=1)[:, 0] / 6
    assert np.array_equal(Rejection(np.zeros(6)).area(QUALITY, counts), mean)
