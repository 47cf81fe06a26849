import numpy as np
import pytest
from scipy.stats import kstest
from sklearn.metrics import roc_auc_score
from statsmodels.discrete.discrete_model import Logit
from statsmodels.regression.linear_model import OLS

from lm_polygraph_asmi.analysis import Interval, Labelled, distinct
from lm_polygraph_asmi.analysis.distinct import (
    AGGREGATIONS,
    DistinctSignal,
    distinct_signal,
    error_probability,
    likelihood_ratio_test,
    residual,
)
from lm_polygraph_asmi.analysis.labelled import FOLDS
from tests.analysis.paper import RESIDUAL_AUROC
from tests.analysis.simulation import keys, monte_carlo_error, shared

CLUSTERS, SIZE = 50, 3
NAMES = keys(CLUSTERS, SIZE)


def answers(rng, planted=0.0, clusters=CLUSTERS, size=SIZE):
    """A signal, its two controls, and errors.

    Two controls know of errors and the signal is a noisy function of both. `planted` is the weight
    in the errors of a part of the signal that is independent of them.
    """
    msp = shared(rng, clusters, size, 0.2)
    entropy = 0.7 * msp + shared(rng, clusters, size, 0.2)
    own = shared(rng, clusters, size, 0.2)
    signal = 0.5 * msp + 0.5 * entropy + own
    logit = -0.5 + 0.8 * msp + 0.5 * entropy + planted * own
    wrong = rng.random(clusters * size) < 1 / (1 + np.exp(-logit))
    return signal, np.column_stack([msp, entropy]), wrong


def with_constant(features: np.ndarray) -> np.ndarray:
    return np.column_stack([np.ones(len(features)), features])


def test_folds_keep_clusters_whole_and_errors_even():
    _, _, wrong = answers(np.random.default_rng(0))
    folds = Labelled(wrong, NAMES).folds()
    assert sorted(set(folds.tolist())) == list(range(FOLDS))
    for name in set(NAMES):
        assert len({fold for fold, key in zip(folds, NAMES, strict=True) if key == name}) == 1
    rates = [wrong[folds == fold].mean() for fold in range(FOLDS)]
    assert np.ptp(rates) < 0.1
    assert set(np.bincount(folds)) == {CLUSTERS * SIZE // FOLDS}
    # Reproducible, and drawn at random.
    np.testing.assert_array_equal(folds, Labelled(wrong, NAMES).folds())
    assert not np.array_equal(folds, Labelled(wrong, NAMES, seed=1).folds())


@pytest.mark.parametrize(
    ("wrong", "names", "fewest"),
    [
        ([0] * 20, keys(20, 1), 0),  # no wrong answers
        ([1] * 20, keys(20, 1), 0),  # no right ones
        ([1] * 4 + [0] * 16, keys(20, 1), 4),
        ([1] * 8 + [0] * 12, ["one"] * 20, 1),
        # Many errors, in few clusters.
        ([1] * 8 + [0] * 12, keys(4, 2) + [f"r{i}" for i in range(12)], 4),
    ],
)
def test_too_few_for_folds(wrong, names, fewest):
    with pytest.raises(ValueError, match=f"at least 5 clusters each, got {fewest}: use more rows"):
        Labelled(wrong, names).folds()


def test_probabilities_are_those_of_a_model_per_fold():
    signal, controls, wrong = answers(np.random.default_rng(1), 0.5)
    features = np.column_stack([controls, signal])
    folds = Labelled(wrong, NAMES).folds()
    expected = np.empty(len(wrong))
    for fold in range(FOLDS):
        train, test = folds != fold, folds == fold
        fitted = Logit(wrong[train], with_constant(features[train])).fit(disp=0)
        expected[test] = fitted.predict(with_constant(features[test]))
    np.testing.assert_allclose(error_probability(features, wrong, folds), expected, atol=1e-3)


def test_scale_of_a_feature_does_not_matter():
    """The model is not penalised: entropy may come in nats or in bits, MSP in hundreds."""
    _, controls, wrong = answers(np.random.default_rng(2))
    folds = Labelled(wrong, NAMES).folds()
    np.testing.assert_allclose(
        error_probability(controls * [1e4, 1e-4] + [1e5, 0], wrong, folds),
        error_probability(controls, wrong, folds),
        atol=1e-3,
    )


def test_residuals_are_those_of_a_regression_per_fold():
    signal, controls, wrong = answers(np.random.default_rng(3))
    folds = Labelled(wrong, NAMES).folds()
    expected = np.empty(len(wrong))
    for fold in range(FOLDS):
        train, test = folds != fold, folds == fold
        fitted = OLS(signal[train], with_constant(controls[train])).fit()
        expected[test] = signal[test] - fitted.predict(with_constant(controls[test]))
    np.testing.assert_allclose(residual(signal, controls, folds), expected, atol=1e-10)


@pytest.mark.usefixtures("residual_alone")
@pytest.mark.parametrize(("weights", "offset"), [((0, 1), 0), ((2, -1), 3), ((1e-6, 1e-6), 0)])
def test_a_linear_function_of_the_controls_is_never_detected(weights, offset):
    """Rounding errors of its residual would rank answers, too."""
    _, controls, wrong = answers(np.random.default_rng(4))
    signal = controls @ np.array(weights, dtype=float) + offset
    assert not residual(signal, controls, Labelled(wrong, NAMES).folds()).any()
    found = distinct_signal(signal, controls, Labelled(wrong, NAMES, resamples=20))
    assert found.residual_auroc == (0.5, 0.5, 0.5)
    assert not found.detected


def test_likelihood_ratio_is_statsmodels():
    signal, controls, wrong = answers(np.random.default_rng(5), 0.3)
    full = Logit(wrong, with_constant(np.column_stack([controls, signal]))).fit(disp=0)
    base = Logit(wrong, with_constant(controls)).fit(disp=0)
    ratio, _ = likelihood_ratio_test(controls, signal, wrong)
    assert ratio == pytest.approx(2 * (full.llf - base.llf), abs=1e-3)
    # statsmodels' own p-value of the ratio, here of the signal over the constant alone.
    alone = Logit(wrong, with_constant(signal[:, None])).fit(disp=0)
    ratio, p_value = likelihood_ratio_test(np.zeros((len(wrong), 1)), signal, wrong)
    assert ratio == pytest.approx(alone.llr, abs=1e-3)
    assert p_value == pytest.approx(alone.llr_pvalue, rel=0.01)


@pytest.mark.slow
def test_p_values_of_a_redundant_signal_are_uniform_over_independent_rows():
    rng, found = np.random.default_rng(6), []
    for _ in range(150):
        signal, controls, wrong = answers(rng, clusters=200, size=1)
        found.append(likelihood_ratio_test(controls, signal, wrong)[1])
    assert kstest(found, "uniform").pvalue > 0.01


def test_a_planted_independent_signal_is_detected():
    rng, found = np.random.default_rng(7), []
    for _ in range(3):
        signal, controls, wrong = answers(rng, 1.2)
        found.append(distinct_signal(signal, controls, Labelled(wrong, NAMES, resamples=100)))
    assert sum(result.detected for result in found) >= 2
    assert all(result.residual_auroc.value > 0.5 for result in found)
    assert np.mean([result.incremental_auroc.value for result in found]) > 0.03
    assert sum(result.incremental_auroc.low > 0 for result in found) >= 2
    assert sum(result.p_value < 0.05 for result in found) >= 2


@pytest.fixture
def residual_alone(monkeypatch):
    """`detected` reads the residual only: the rest of the test is not computed."""
    undefined = Interval(0.0, np.nan, np.nan)
    monkeypatch.setattr(distinct, "auroc_difference", lambda *_: undefined)
    monkeypatch.setattr(distinct, "error_probability", lambda *_: np.zeros(len(NAMES)))
    monkeypatch.setattr(distinct, "likelihood_ratio_test", lambda *_: (0.0, 1.0))


@pytest.mark.usefixtures("residual_alone")
@pytest.mark.slow
def test_a_redundant_signal_is_detected_in_one_case_of_twenty():
    """200 simulations: 0.05 within three Monte Carlo errors of 0.015.

    Errors and the signal's noise both correlate within clusters, but are independent given the
    controls.
    """
    rng, found = np.random.default_rng(8), []
    for _ in range(200):
        signal, controls, wrong = answers(rng)
        found.append(distinct_signal(signal, controls, Labelled(wrong, NAMES, resamples=100)))
    rate = np.mean([result.detected for result in found])
    assert rate == pytest.approx(0.05, abs=3 * monte_carlo_error(0.05, 200))
    values = [result.residual_auroc.value for result in found]
    assert np.mean(values) == pytest.approx(0.5, abs=3 * np.std(values) / np.sqrt(200))


def test_all_parts_against_their_definition():
    signal, controls, wrong = answers(np.random.default_rng(9), 0.5)
    found = distinct_signal(signal, controls, Labelled(wrong, NAMES, resamples=50, seed=11))
    folds = Labelled(wrong, NAMES, seed=11).folds()
    left = residual(signal, controls, folds)
    assert found.residual_auroc.value == pytest.approx(roc_auc_score(wrong, left))
    base, full = (
        roc_auc_score(wrong, error_probability(features, wrong, folds))
        for features in (controls, np.column_stack([controls, signal]))
    )
    assert found.incremental_auroc.value == pytest.approx(full - base)
    assert found.incremental_auroc.low < full - base < found.incremental_auroc.high
    ratio = likelihood_ratio_test(controls, signal, wrong)
    assert (found.likelihood_ratio, found.p_value) == ratio
    assert (found.n, found.clusters, found.errors) == (150, 50, wrong.sum())


def test_no_row_scores_itself():
    """Another label for one cluster changes no probability and no residual of that cluster."""
    signal, controls, wrong = answers(np.random.default_rng(10))
    folds = Labelled(wrong, NAMES).folds()
    own = np.array(NAMES) == "7"
    flipped, shifted = np.where(own, ~wrong, wrong), np.where(own, signal + 5, signal)
    np.testing.assert_array_equal(
        error_probability(controls, flipped, folds)[own],
        error_probability(controls, wrong, folds)[own],
    )
    np.testing.assert_allclose(
        residual(shifted, controls, folds)[own], residual(signal, controls, folds)[own] + 5
    )


def test_the_papers_criterion():
    """Five of six grounded settings, and neither setting of TriviaQA."""
    found = {
        group
        for group, printed in RESIDUAL_AUROC.items()
        if DistinctSignal(Interval(*printed), Interval(0, 0, 0), 0, 1, 0, 0, 0).detected
    }
    assert {group for group in RESIDUAL_AUROC if group[1] != "TriviaQA"} - found == {
        ("Qwen3-8B", "CoQA")
    }
    assert not any(dataset == "TriviaQA" for _, dataset in found)


def test_aggregations():
    tokens = np.random.default_rng(15).random(12)
    found = {name: aggregate(tokens) for name, aggregate in AGGREGATIONS.items()}
    expected = {
        "mean": sum(tokens) / 12,
        "top-quartile mean": sum(sorted(tokens, reverse=True)[:3]) / 3,
        "max": max(tokens),
    }
    assert found == pytest.approx(expected)
    # An answer of one token is that token.
    assert {aggregate(tokens[:1]) for aggregate in AGGREGATIONS.values()} == {tokens[0]}
