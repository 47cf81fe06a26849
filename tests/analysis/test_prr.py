import numpy as np
import pytest
from lm_polygraph.ue_metrics import PredictionRejectionArea
from lm_polygraph.ue_metrics.ue_metric import get_random_scores, normalize_metric

from lm_polygraph_asmi.analysis import normalised_prr, prr_with_error


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
    assert np.isnan(prr_with_error([1, 2, 3], [1, 1, 1]).standard_error)


def test_standard_error_is_the_spread_over_new_data():
    """Against what it estimates: the spread of PRR over independently drawn samples."""
    rng = np.random.default_rng(2)

    def draw() -> tuple[np.ndarray, np.ndarray]:
        quality = rng.random(150)
        return -quality + rng.normal(scale=0.5, size=150), quality

    true_spread = np.std([normalised_prr(*draw()) for _ in range(400)])
    estimates = [prr_with_error(*draw(), resamples=200).standard_error for _ in range(10)]
    assert np.mean(estimates) == pytest.approx(true_spread, rel=0.2)
