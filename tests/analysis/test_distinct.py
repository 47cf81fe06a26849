import numpy as np
import pytest
from scipy.stats import chi2
from statsmodels.discrete.discrete_model import Logit
from statsmodels.regression.linear_model import OLS
from statsmodels.tools import add_constant

from lm_polygraph_asmi.analysis import Labelled, distinct, labelled
from tests.analysis.simulation import keys, shared

NAMES = keys(50, 3)


def answers(seed, planted=0.0):
    """A signal, its two controls, and errors.

    Two controls know of errors and the signal is a noisy function of both. `planted` is the weight
    in the errors of a part of the signal that is independent of them.
    """
    rng = np.random.default_rng(seed)
    msp, more, own = (shared(rng, 50, 3, 0.2) for _ in range(3))
    entropy = 0.7 * msp + more
    signal = 0.5 * msp + 0.5 * entropy + own
    logit = -0.5 + 0.8 * msp + 0.5 * entropy + planted * own
    wrong = rng.random(150) < 1 / (1 + np.exp(-logit))
    return signal, np.column_stack([msp, entropy]), wrong


def likelihood_ratio(controls, signal, wrong):
    answers = Labelled(wrong, range(len(wrong)), resamples=2)
    found = distinct.distinct_signal(signal, controls, answers)
    return found.likelihood_ratio, found.p_value


def test_folds_keep_clusters_whole_and_errors_even():
    _, _, wrong = answers(0)
    folds = Labelled(wrong, NAMES).folds()
    assert set(np.bincount(folds)) == {150 // labelled.FOLDS}
    by_cluster = folds.reshape(50, 3)
    assert (by_cluster == by_cluster[:, :1]).all()
    # Folds differ by the errors of a cluster at most.
    assert np.ptp([wrong[folds == fold].sum() for fold in range(labelled.FOLDS)]) <= 3
    # Reproducible, and drawn at random.
    np.testing.assert_array_equal(folds, Labelled(wrong, NAMES).folds())
    assert not np.array_equal(folds, Labelled(wrong, NAMES, seed=1).folds())
    # Five clusters of either kind will do.
    five = np.arange(10) < 5
    assert sorted(Labelled(five, range(10)).folds()[five]) == [*range(5)]


def test_fits_are_those_of_statsmodels_per_fold():
    signal, controls, wrong = answers(1, 0.5)
    features, folds = np.column_stack([controls, signal]), Labelled(wrong, NAMES).folds()
    chance, left = np.empty((2, len(wrong)))
    for fold in range(labelled.FOLDS):
        train, test = folds != fold, folds == fold
        fitted = Logit(wrong[train], add_constant(features[train])).fit(disp=0)
        chance[test] = fitted.predict(add_constant(features[test]))
        linear = OLS(signal[train], add_constant(controls[train])).fit()
        left[test] = signal[test] - linear.predict(add_constant(controls[test]))
    # The model is not penalised: entropy may come in nats or in bits, MSP in hundreds.
    for table in (features, features * [1e4, 1e-4, 1] + [1e5, 0, 0]):
        found = distinct.error_probability(table, wrong, folds)
        np.testing.assert_allclose(found, chance, atol=1e-6)
    for scale in (1, 1e-9):  # no scale is taken for 0
        found = distinct.residual(scale * signal, controls, folds)
        np.testing.assert_allclose(found, scale * left, atol=scale * 1e-10)


@pytest.mark.parametrize(("weights", "offset"), [((0, 1), 0), ((2, -1), 3), ((1e-6, 1e-6), 0)])
def test_a_linear_function_of_the_controls_is_never_detected(weights, offset):
    """Rounding errors of its residual would rank answers, too."""
    _, controls, wrong = answers(4)
    signal = controls @ np.array(weights, dtype=float) + offset
    found = distinct.distinct_signal(signal, controls, Labelled(wrong, NAMES, resamples=20))
    assert (found.residual_auroc, found.detected) == ((0.5, 0.5, 0.5), False)
    assert found.errors == wrong.sum()


@pytest.mark.parametrize("mean_mi", [1e-1, 9e-4, 1e-6])
@pytest.mark.parametrize("seed", range(3))
def test_entropies_that_differ_by_a_small_mi_are_both_fitted(seed, mean_mi):
    """H(p-bar) and mean H(p) correlate by .9999 or more; statsmodels gets their difference."""
    rng = np.random.default_rng(seed)
    entropy, mi, agreement = rng.gamma(2, 0.4, 300), rng.exponential(size=300), rng.random(300)
    wrong = rng.random(300) < 1 / (1 + np.exp(1 - entropy - mi * rng.choice([0, 0.5])))
    plain = add_constant(np.column_stack([entropy, mi]))
    tables = plain, np.column_stack([plain, mi * (1 - agreement)])
    ratio = 2 * -np.subtract(*(Logit(wrong, table).fit(disp=0).llf for table in tables))
    controls = np.column_stack([entropy + mean_mi * mi, entropy])
    full, answers = (
        np.column_stack([controls, mean_mi * mi * (1 - agreement)]),
        Labelled(wrong, range(300)),
    )
    found = distinct.likelihood_ratio_test(controls, full, answers)
    assert found == pytest.approx((ratio, chi2.sf(ratio, 1)), abs=1e-6)


def test_answers_that_controls_separate_have_a_finite_fit():
    wrong, noise = np.arange(60) > 40, np.random.default_rng(0).normal(size=60)
    separating = np.arange(60.0)[:, None] ** [1, 2, 3]
    assert likelihood_ratio(separating, noise, wrong) == pytest.approx((0, 1), abs=1e-4)
    alone = -2 * Logit(wrong, add_constant(noise)).fit(disp=0).llf  # then nothing is left
    ratio, _ = likelihood_ratio(noise[:, None], separating[:, 0], wrong)
    assert ratio == pytest.approx(alone, abs=1e-6)


def test_aggregations():
    tokens = np.random.default_rng(15).random(12)
    for number, most in ((12, 3), (9, 3), (8, 2), (1, 1)):
        some = tokens[:number]
        found = {name: aggregate(some) for name, aggregate in distinct.AGGREGATIONS.items()}
        top = sum(sorted(some, reverse=True)[:most]) / most
        assert found == pytest.approx(
            {"mean": sum(some) / number, "top-quartile mean": top, "max": max(some)}
        )
