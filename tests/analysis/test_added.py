"""The test of added information: level, power, and the plain twins of its parts."""

import numpy as np
import pytest
from scipy.stats import norm, rankdata
from sklearn.linear_model import LogisticRegression, Ridge

from lm_polygraph_asmi.analysis import (
    Labelled,
    adds_information,
    adds_over_settings,
)
from lm_polygraph_asmi.analysis.added import (
    FOLDS,
    PENALTY,
    SLIGHT,
    _least_squares,
    logistic,
    smooth,
)
from lm_polygraph_asmi.analysis.distinct import distinct_signal
from tests.analysis.simulation import keys, monte_carlo_error, shared

NULLS = {
    "log H + noise": lambda controls, noise: np.log(controls[:, 1]) + 0.5 * noise[0],
    "sqrt(MSP) x noise": lambda controls, noise: np.sqrt(controls[:, 0]) * (1 + 0.3 * noise[0]),
    "H x lognormal": lambda controls, noise: controls[:, 1] * np.exp(0.7 * noise[0]),
}
"""Scores that know of errors what MSP and H know, and no more."""
SIMULATIONS = 48


def fragile(controls, noise):
    """A score that has H, what `world` can plant in the errors, and noise."""
    return controls[:, 1] * np.exp(0.5 * noise[0] + 0.7 * noise[1])


def world(rng, n=300, size=2, planted=0.0):
    """MSP, H and length that read a question's difficulty, errors by MSP and H, and two noises.

    `planted` is the weight of the first noise in the errors.
    """
    difficulty = shared(rng, n // size, size, 0.3)
    msp = np.exp(0.8 * difficulty + 0.5 * rng.normal(size=n))
    entropy = 0.3 * np.exp(0.6 * difficulty + 0.5 * rng.normal(size=n))
    length = rng.integers(1, 20, n).astype(float)
    noise = rng.normal(size=(2, n))
    eta = -0.8 + 0.9 * np.log(msp) + 0.7 * np.log(entropy / 0.3) + planted * noise[0]
    wrong = rng.random(n) < 1 / (1 + np.exp(-eta))
    return np.column_stack([msp, entropy, length]), wrong, noise, keys(n // size, size)


def statistics(score, simulations, planted=0.0, seed=0, **kind):
    """Statistic and p-value of simulations (simulations, 2)."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(simulations):
        controls, wrong, noise, names = world(rng, planted=planted, **kind)
        one = adds_information(score(controls, noise), controls, Labelled(wrong, names))
        found.append((one.statistic, one.p_value))
    return np.array(found)


def test_the_level_is_kept():
    """At 5 %; the paper's criterion calls the same scores distinct nearly always."""
    found = np.concatenate(
        [statistics(null, SIMULATIONS // 3, seed=i) for i, null in enumerate(NULLS.values())]
    )
    rejected = (found[:, 1] < 0.05).mean()
    assert rejected <= 0.05 + 3 * monte_carlo_error(0.05, SIMULATIONS)
    assert abs(found[:, 0].mean()) < 0.35
    assert found[:, 0].std() == pytest.approx(1, abs=3 / (2 * SIMULATIONS) ** 0.5)


def test_the_power_is_worth_having():
    """Half of what a score has beyond H is in the errors."""
    found = statistics(fragile, SIMULATIONS // 2, planted=0.5)
    assert (found[:, 1] < 0.05).mean() > 0.3
    assert found[:, 0].mean() > 1.4


@pytest.mark.slow
@pytest.mark.parametrize(("n", "size"), [(120, 2), (300, 2), (304, 8), (1000, 2), (5000, 4)])
@pytest.mark.parametrize("null", NULLS)
def test_the_level_is_kept_at_all_sizes(null, n, size):
    simulations = 400 if n < 5000 else 100
    found = statistics(NULLS[null], simulations, n=n, size=size, seed=1)
    rejected = (found[:, 1] < 0.05).mean()
    print(null, n, size, "rejected", rejected, "mean", found[:, 0].mean(), "sd", found[:, 0].std())
    assert rejected <= 0.05 + 3 * monte_carlo_error(0.05, simulations)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "least"), [(120, 0.15), (300, 0.45), (1000, 0.9)])
def test_the_power_grows(n, least):
    found = statistics(fragile, 200, planted=0.5, n=n)
    print(n, "power", (found[:, 1] < 0.05).mean())
    assert (found[:, 1] < 0.05).mean() > least


def test_the_papers_criterion_is_no_test():
    """Why there is another: on an exact null, a linear residual is "distinct"."""
    rng, detected = np.random.default_rng(5), 0
    for null in NULLS.values():
        controls, wrong, noise, names = world(rng, n=600)
        answers = Labelled(wrong, names, resamples=50)
        detected += distinct_signal(null(controls, noise), controls[:, :2], answers).detected
    assert detected >= 2


def test_the_statistic_against_a_plain_loop():
    """Folds of one partition at a time, scikit-learn's models, sums over clusters in a loop."""
    controls, wrong, noise, names = world(np.random.default_rng(1), n=120)
    score = controls[:, 1] * np.exp(noise[0])
    found = adds_information(score, controls, Labelled(wrong, names, seed=3))
    features = smooth(controls)[:, 1:]
    rank = (rankdata(score) - 0.5) / 120
    rng, codes = np.random.default_rng(3), np.unique(names, return_inverse=True)[1]
    share, chance = np.zeros((5, 120)), np.zeros((5, 120))
    for part in range(5):
        folds = (rng.permutation(60) % FOLDS)[codes]
        assert all(len(set(folds[codes == c])) == 1 for c in range(60))
        for fold in range(FOLDS):
            train, test = folds != fold, folds == fold
            ridge = Ridge(SLIGHT, solver="cholesky").fit(features[train], rank[train])
            share[part, test] = ridge.predict(features[test])
            selector = LogisticRegression(C=1 / PENALTY, tol=1e-8, max_iter=1000)
            fitted = selector.fit(features[train], wrong[train])
            chance[part, test] = fitted.predict_proba(features[test])[:, 1]
    left = (rank - share.mean(0)) * (wrong - chance.mean(0))
    sums = np.array([left[codes == c].sum() for c in range(60)])
    statistic = sums.mean() / (sums.std(ddof=1) / np.sqrt(60))
    assert found.statistic == pytest.approx(statistic, rel=0.02, abs=0.01)
    assert (found.n, found.clusters, found.errors) == (120, 60, wrong.sum())
    assert found.direction == np.sign(found.statistic)
    assert found.p_value == pytest.approx(2 * norm.sf(abs(statistic)), abs=0.02)


def null_cells(rng, sizes, shared_keys=True):
    """Settings whose scores know nothing beyond their controls."""
    found = []
    for i, n in enumerate(sizes):
        controls, wrong, noise, names = world(rng, n=n)
        keyed = names if shared_keys else [f"{i}: {name}" for name in names]
        found.append(adds_information(fragile(controls, noise), controls, Labelled(wrong, keyed)))
    return found


def test_cells_together_against_a_plain_loop():
    """Statistics added, over the spread of their sum by the correlations of clusters' sums."""
    groups = null_cells(np.random.default_rng(14), (120, 200, 160))
    found = adds_over_settings(groups)
    variance = 0.0
    for one in groups:
        for other in groups:
            means = [np.mean([*own.sums.values()]) for own in (one, other)]
            spreads = [np.std([*own.sums.values()]) * own.clusters**0.5 for own in (one, other)]
            for key in one.sums.keys() & other.sums.keys():
                pair = (one.sums[key] - means[0]) * (other.sums[key] - means[1])
                variance += pair / (spreads[0] * spreads[1])
    statistic = sum(group.statistic for group in groups) / variance**0.5
    assert found.statistic == pytest.approx(statistic)
    assert (found.n, found.clusters) == (480, 100)
    assert found.errors == sum(group.errors for group in groups)
    assert found.direction == np.sign(statistic)


def test_cells_together_at_the_corners():
    groups = null_cells(np.random.default_rng(15), (120, 200), shared_keys=False)
    one, other = groups
    assert adds_over_settings([one]).statistic == pytest.approx(one.statistic)
    assert adds_over_settings([one]).p_value == pytest.approx(one.p_value)
    assert adds_over_settings([one, one]).statistic == pytest.approx(one.statistic)
    stouffer = (one.statistic + other.statistic) / 2**0.5
    assert adds_over_settings(groups).statistic == pytest.approx(stouffer)
    controls, wrong, _, names = world(np.random.default_rng(15), n=120)
    nothing = adds_information(controls[:, 1], controls, Labelled(wrong, names))
    assert nothing.statistic == adds_over_settings([nothing]).statistic == 0.0
    assert adds_over_settings([nothing]).p_value == 1.0


def test_the_level_over_cells_that_share_passages():
    """Three scores of the same answers, each with its own noise and one that all three have."""
    rng, found = np.random.default_rng(16), []
    for _ in range(SIMULATIONS // 2):
        controls, wrong, noise, names = world(rng, n=120)
        scores = [
            controls[:, 1] * np.exp(noise[0] + 0.3 * rng.normal(size=len(wrong))) for _ in range(3)
        ]
        groups = [adds_information(score, controls, Labelled(wrong, names)) for score in scores]
        found.append(
            (sum(c.statistic for c in groups) / 3**0.5, adds_over_settings(groups).statistic)
        )
    apart, together = np.std(found, axis=0)
    assert apart > 1.4  # what adding them as if nothing were shared would do
    assert together == pytest.approx(1.0, abs=3 / SIMULATIONS**0.5)


def test_batches_of_models_are_scikit_learns():
    controls, wrong, _, _ = world(np.random.default_rng(2), n=80)
    features = smooth(controls)
    counts = np.random.default_rng(3).integers(0, 3, size=(4, 80)).astype(float)
    target = np.random.default_rng(4).random(80)
    for found, weights in zip(logistic(features, wrong.astype(float), counts), counts, strict=True):
        fitted = LogisticRegression(C=1 / PENALTY, tol=1e-10, max_iter=5000)
        fitted.fit(features[:, 1:], wrong, weights)
        np.testing.assert_allclose(found, [*fitted.intercept_, *fitted.coef_[0]], atol=1e-3)
    for found, weights in zip(_least_squares(features, target, counts), counts, strict=True):
        ridge = Ridge(SLIGHT, solver="cholesky").fit(features[:, 1:], target, weights)
        np.testing.assert_allclose(found, [ridge.intercept_, *ridge.coef_], atol=1e-8)


def test_training_sets_of_one_kind_have_an_end():
    features = smooth(np.random.default_rng(0).normal(size=(50, 2)))
    for wrong in (np.zeros(50), np.ones(50)):
        (found,) = logistic(features, wrong, np.ones((1, 50)))
        assert np.isfinite(found).all()
    separated = np.arange(50) >= 25
    features = smooth(np.arange(50.0)[:, None])
    (found,) = logistic(features, separated.astype(float), np.ones((1, 50)))
    assert (((features @ found) > 0) == separated).all()


def test_one_outlier_changes_little():
    """The linear residual moves from .545 to .361 by one outlier in 120 rows."""
    controls, wrong, noise, names = world(np.random.default_rng(6), n=120)
    score = controls[:, 1] * np.exp(noise[0])
    found = adds_information(score, controls, Labelled(wrong, names))
    score[7], controls[11] = 1e6, 1e6
    again = adds_information(score, controls, Labelled(wrong, names))
    assert again.statistic == pytest.approx(found.statistic, abs=0.6)


def test_scales_and_monotone_changes_do_not_matter():
    controls, wrong, noise, names = world(np.random.default_rng(7))
    score = controls[:, 1] * np.exp(noise[0])
    found = adds_information(score, controls, Labelled(wrong, names))
    assert adds_information(np.log(score), np.sqrt(controls), Labelled(wrong, names)) == found
    mirrored = adds_information(-score, controls, Labelled(wrong, names))
    assert mirrored.statistic == pytest.approx(-found.statistic)
    assert mirrored.direction == -found.direction != 0
    # A control that is the same for all says nothing.
    constant = np.column_stack([controls, np.ones(300)])
    assert adds_information(score, constant, Labelled(wrong, names)).statistic == pytest.approx(
        found.statistic, rel=1e-6
    )


def test_a_score_that_is_a_control_adds_nothing():
    rng = np.random.default_rng(8)
    for _ in range(5):
        controls, wrong, _, names = world(rng)
        for score in (controls[:, 0], np.log(controls[:, 1]), -controls[:, 1]):
            found = adds_information(score, controls, Labelled(wrong, names))
            assert (found.statistic, found.p_value, found.direction) == (0, 1, 0)


def test_planted_knowledge_is_found_in_its_direction():
    controls, wrong, noise, names = world(np.random.default_rng(9), n=1000, planted=1.5)
    score = controls[:, 1] * np.exp(noise[0])
    found = adds_information(score, controls, Labelled(wrong, names))
    assert found.added
    assert found.direction == 1


def test_the_verdict_follows_the_seed_alone():
    controls, wrong, noise, names = world(np.random.default_rng(13), n=120)
    found = [
        adds_information(noise[0], controls, Labelled(wrong, names, seed=s)) for s in (1, 1, 2)
    ]
    assert found[0] == found[1] != found[2]
    # Averaged over partitions, another seed changes little.
    assert found[2].statistic == pytest.approx(found[0].statistic, abs=0.4)
