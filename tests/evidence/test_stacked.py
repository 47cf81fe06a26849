"""The gain of a score in a model of errors, against a plain loop and on simulations."""

import numpy as np
import pytest
from scipy.stats import rankdata
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score
from stacked import _out_of_fold, stacked_gain

from lm_polygraph_asmi.analysis import Clustered, Labelled, normalised_prr
from lm_polygraph_asmi.analysis.added import FOLDS, PENALTY, smooth
from tests.analysis.simulation import coverage, ends, monte_carlo_error
from tests.analysis.test_added import fragile, world


def test_planted_knowledge_makes_a_better_model():
    controls, wrong, noise, names = world(np.random.default_rng(9), n=1000, planted=1.5)
    score = controls[:, 1] * np.exp(noise[0])
    gain = stacked_gain(score, controls, wrong, names, resamples=60)
    assert gain.log_loss.high < 0 < gain.auroc.low < gain.auroc.high
    assert gain.prr.low > 0
    nothing = stacked_gain(noise[1], controls, wrong, names, resamples=60)
    assert not nothing.auroc.low > 0
    assert not nothing.log_loss.high < 0


def test_the_gain_against_a_plain_loop():
    """Every resample fitted anew, fold by fold, on rows that are repeated."""
    controls, wrong, noise, names = world(np.random.default_rng(10), n=120, planted=1.0)
    score, quality = noise[0], 1 - wrong + 0.1 * np.random.default_rng(0).random(120)
    found = stacked_gain(score, controls, wrong, names, quality, resamples=6)
    base = smooth(controls)
    rank = (rankdata(score) - 0.5) / 120
    full = np.column_stack([base, (rank - rank.mean()) / rank.std()])
    folds = Labelled(wrong, names).folds()

    def measured(features, rows):
        chance = np.empty(len(rows))
        for fold in range(FOLDS):
            train, test = folds[rows] != fold, folds[rows] == fold
            fitted = LogisticRegression(C=1 / PENALTY, tol=1e-10, max_iter=5000)
            fitted.fit(features[rows][train, 1:], wrong[rows][train])
            chance[test] = fitted.predict_proba(features[rows][test, 1:])[:, 1]
        return np.array(
            [
                log_loss(wrong[rows], chance),
                roc_auc_score(wrong[rows], chance),
                normalised_prr(chance, quality[rows]),
            ]
        )

    drawn = []
    for counts in np.concatenate(list(Clustered(names, resamples=6).draws())):
        rows = np.repeat(np.arange(120), counts)
        drawn.append(measured(full, rows) - measured(base, rows))
    value = measured(full, np.arange(120)) - measured(base, np.arange(120))
    for i, interval in enumerate((found.log_loss, found.auroc, found.prr)):
        expected = (value[i], *ends(np.array(drawn)[:, i], len(set(names))))
        assert interval == pytest.approx(expected, abs=4e-3)


def gains(simulations, resamples, seed, **kind):
    """Estimates (simulations, 3) of what a fragile score adds, and their intervals."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(simulations):
        controls, wrong, noise, names = world(rng, **kind)
        gain = stacked_gain(fragile(controls, noise), controls, wrong, names, resamples=resamples)
        found.append((gain.log_loss, gain.auroc, gain.prr))
    return np.array([[one.value for one in row] for row in found]), found


def gain_covered(simulations, resamples, **kind):
    """Share of intervals that hold the mean of the estimate over fresh data of that size."""
    truth = gains(simulations, 2, 1, **kind)[0].mean(0)
    intervals = gains(simulations, resamples, 2, **kind)[1]
    return [coverage([row[i] for row in intervals], truth[i]) for i in range(3)]


@pytest.mark.slow
def test_intervals_of_the_gain_cover_it():
    """40 simulations: no measure far below 0.95; 0.93 to 0.97 in the long run below."""
    covered = gain_covered(40, 40, n=150, planted=0.5)
    assert min(covered) >= 0.95 - 3 * monte_carlo_error(0.95, 40)


@pytest.mark.slow
@pytest.mark.parametrize("planted", [0.0, 0.5])
def test_intervals_of_the_gain_cover_it_in_the_long_run(planted):
    covered = gain_covered(200, 200, n=300, planted=planted)
    print("planted", planted, "log-loss, AUROC, PRR covered", covered)
    error = 3 * monte_carlo_error(0.95, 200)
    assert min(covered) >= 0.95 - error
    if planted:  # where nothing is added they are too wide: 0.99 and more
        assert max(covered) <= 0.95 + error


def test_out_of_fold_chances_never_saw_their_fold():
    controls, wrong, _, names = world(np.random.default_rng(11), n=100)
    folds = Labelled(wrong, names).folds()
    counts = np.ones((1, 100))
    before = _out_of_fold(smooth(controls), wrong.astype(float), counts, folds)
    changed = np.where(folds == 0, ~wrong, wrong)
    after = _out_of_fold(smooth(controls), changed.astype(float), counts, folds)
    np.testing.assert_allclose(before[0, folds == 0], after[0, folds == 0])
    assert np.abs(before - after)[0, folds != 0].max() > 0.01
