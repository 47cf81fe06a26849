"""A learned score: plain numbers, the guarantee whatever it learns, and what it rejects."""

from functools import partial
from itertools import cycle

import numpy as np
from simulate_guarantee import POPULATIONS
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from lm_polygraph_asmi.analysis import Labelled, free_features
from lm_polygraph_asmi.analysis.features import FREE
from lm_polygraph_asmi.decisions.learned import (
    LEARNING_SHARE,
    fit_score,
    learned_threshold,
    out_of_fold,
)
from lm_polygraph_asmi.decisions.risk_control import choosing_rows
from tests.analysis.simulation import keys, monte_carlo_error

OVERFITTED = partial(fit_score, strength=1e6)


def answers(seed, n):
    """Features, a simple signal and errors, which depend on both."""
    signals, wrong = POPULATIONS["learnable"](np.random.default_rng(seed), n, 1)
    return {"free": signals[:, :1], "hidden": signals[:, 1:]}, {"msp": signals[:, 0]}, wrong


def test_score_is_that_of_scikit_learn():
    features, _, wrong = answers(0, 150)
    features["hidden"] = 1e3 + np.column_stack([features["hidden"], np.full(150, 0.1)])
    table = np.hstack(list(features.values()))
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))
    expected = model.fit(table, wrong).decision_function(table)
    score = fit_score(features, wrong)
    np.testing.assert_allclose(score(features), expected, atol=1e-6)
    assert score.weights["hidden"][-1] == 0  # the constant column


def test_free_features_by_hand():
    found = free_features([-1.0, -3.0, -2.0], [0.5, 0.25, 1.5], 40)
    assert found.tolist() == [-6, -2, -3, -1, -2, 0.75, 2.25, 1.5, 0.5, 3, 40]
    assert len(found) == len(FREE)


def test_out_of_fold_scores_never_saw_their_cluster():
    """Labels without any cause, each cluster marked by columns of its own: nothing is learned."""
    names, wrong = keys(60, 3), np.repeat(np.random.default_rng(0).random(60) < 0.5, 3)
    marks = {"hidden": np.repeat(np.eye(60), 3, axis=0)}
    logits = out_of_fold(marks, Labelled(wrong, names), OVERFITTED)
    inside = fit_score(marks, wrong, strength=1e6)(marks)
    assert inside[wrong].min() > inside[~wrong].max()  # a score that saw them knows them all
    assert logits[wrong].mean() < logits[~wrong].mean() + 1  # of columns unseen, only intercepts


def test_the_guarantee_holds_however_it_overfits():
    """At confidence 90 %, one calibration in ten may break it, give or take the count's error."""
    broken, draws = 0, 16
    features, simple, wrong = answers(99, 20_000)
    for seed, fit in zip(range(draws), cycle((fit_score, OVERFITTED)), strict=False):
        some, shown, labels = answers(seed, 300)
        few = Labelled(labels, keys(300, 1), resamples=20, seed=seed)
        found = learned_threshold(some, shown, few, 0.25, 0.9, fit)
        if found.rule.threshold is not None:
            column = found.score(features) if found.score else simple[found.signal]
            broken += wrong[column <= found.rule.threshold].mean() > 0.25
    assert broken / draws <= 0.1 + 3 * monte_carlo_error(0.1, draws)


def test_labels_that_test_do_not_choose():
    """Other labels of the rows that test change neither the score nor the choice."""
    features, simple, wrong = answers(1, 300)
    names = keys(300, 1)
    learning = choosing_rows(Labelled(wrong, names).codes, share=LEARNING_SHARE)
    found, other = (
        learned_threshold(features, simple, Labelled(labels, names), 0.25, 0.9)
        for labels in (wrong, wrong | ~learning)
    )
    assert found.signal == other.signal == "learned"
    assert (found.score, found.learning) == (other.score, other.learning)
    assert found.rule.base_rate != other.rule.base_rate  # the labels did change


def test_what_leaves_the_simple_signal():
    features, simple, wrong = answers(2, 400)
    noise = {"hidden": np.random.default_rng(0).normal(size=(400, 20))}
    found = learned_threshold(noise, simple, Labelled(wrong, keys(400, 1)), 0.3, 0.9)
    assert (found.signal, found.score) == ("msp", None)
    assert found.values.tolist() == simple["msp"].tolist()
    assert found.learning.startswith("AUROC of the learned score minus that of msp: -0.")
    assert "200 of 400 clusters that learn; msp decides." in found.learning
    few = Labelled(np.arange(400) < 12, keys(400, 1))
    found = learned_threshold(features, simple, few, 0.3, 0.9)
    assert found.signal == "msp"
    assert "expected 10 clusters with wrong and 10 with right answers among the 200" in (
        found.learning
    )
