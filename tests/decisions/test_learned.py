"""A learned score: plain numbers, the guarantee whatever it learns; from labels to decisions."""

import re
import sys
from dataclasses import replace
from functools import partial

import claims
import learning_curves
import numpy as np
import pytest
from simulate_guarantee import POPULATIONS
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from lm_polygraph_asmi.analysis import Labelled
from lm_polygraph_asmi.analysis.risk_control import choosing_rows, seed_of
from lm_polygraph_asmi.decisions import (
    Calibration,
    Decider,
    calibrate_rows,
    calibrate_run,
    learned as learned_scores,
)
from lm_polygraph_asmi.decisions.learned import fit_score, learned_threshold
from lm_polygraph_asmi.decisions.rows import _features
from lm_polygraph_asmi.scoring import Score
from tests.analysis.simulation import keys
from tests.decisions.conftest import WORDS, lines_of, numbered, refused
from tests.scoring.conftest import PROMPT


def read(line):
    """A scored row with its answer."""
    return [(*numbered(line), Score.from_dict(line))]


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
    np.testing.assert_allclose(score(features | {"more": np.ones((150, 2))}), expected, atol=1e-6)
    assert score.weights["hidden"][-1] == 0  # the constant column
    refused(
        (partial(score, {"free": features["free"]}), "widths"),
        (partial(fit_score, {"free": np.ones((150, 3))}, wrong), "vary"),
        (partial(fit_score, features, wrong | True), "the same label"),
    )


def test_todays_form_of_the_learning_curves_is_this_score():
    rows, learn = claims.read_rows()[4], np.arange(0, 300, 5)
    wrong = rows.wrong("contains")[learn]
    features = {"free": rows.free, "hidden": np.hstack(rows.states)}
    expected = fit_score({name: table[learn] for name, table in features.items()}, wrong)(features)
    found = learning_curves.scores(rows, wrong, learn)[learning_curves.TODAY]
    np.testing.assert_allclose(found, expected, atol=1e-2)  # where lbfgs stops


def test_labels_that_test_do_not_choose():
    """Other labels of the rows that test change neither the score nor the choice."""
    (features, simple, wrong), names = answers(1, 300), keys(300, 1)
    learning = choosing_rows(Labelled(wrong, names).codes, seed_of(simple["msp"]), 0.5)
    found, other = (
        learned_threshold(features, simple, Labelled(labels, names), 0.3, 0.9)
        for labels in (wrong, wrong | ~learning)
    )
    assert (found.signal, found.score, found.learning) == ("learned", other.score, other.learning)
    assert found.rule.base_rate != other.rule.base_rate  # the labels did change
    # Nor do labels that chose test: all of those that do are wrong.
    assert (found.rule.tested, other.rule.tested, other.rule.threshold) == (150, 150, None)


def test_what_leaves_the_simple_signal(monkeypatch):
    """A learned score that ranks no better out of fold, and labels of too few errors."""
    features, simple, wrong = answers(2, 400)
    perfect, few = wrong.astype(float), np.arange(400) < 12
    # Of four alike answers in a cluster, it knows those that it saw.
    marks, alike = np.random.default_rng(0).normal(size=(100, 150)), np.repeat(wrong[:100], 4)
    marks = np.repeat(marks, 4, axis=0)
    for columns, by, labels, size, strength, words in (
        (marks, {"msp": alike + marks[:, 0]}, alike, 4, 1e6, r"msp: -0\..*50 of 100 clusters"),
        (perfect[:, None], {"msp": perfect}, wrong, 1, 0.01, "msp"),  # what ranks as well decides
        (features["hidden"], simple, few, 1, 0.01, "10 clusters with wrong .* among the 200"),
    ):
        monkeypatch.setattr(learned_scores, "STRENGTH", strength)
        known = Labelled(labels, keys(400 // size, size))
        found = learned_threshold({"hidden": columns}, by, known, 0.3, 0.9, largest=5)
        assert (found.signal, found.score, found.rule.largest) == ("msp", None, 5)
        assert found.values.tolist() == by["msp"].tolist()
        assert re.search(rf"{words}.*; msp decides\.", found.learning)


@pytest.mark.parametrize("kind", [True, False])
@pytest.mark.parametrize(("number", "learns"), [(9, False), (10, True)])
def test_the_least_number_of_clusters_of_a_kind(kind, number, learns):
    """Among those that learn; they are drawn by the simple signal alone."""
    features, simple, _ = answers(2, 400)
    learning = choosing_rows(np.arange(400), seed_of(simple["msp"]), 0.5)
    labels = np.full(400, not kind)
    labels[np.flatnonzero(learning)[:number]] = kind
    known = Labelled(labels, [f"{row:03}" for row in range(400)])
    found = learned_threshold(features, simple, known, 0.3, 0.9)
    assert found.learning.startswith("Nothing was learned") != learns


@pytest.fixture(scope="module")
def told(scored):
    """Scored rows whose word decides whether they are right."""
    return [row | {"correct": row["answer"].split()[-1] in WORDS[:4]} for row in scored]


@pytest.fixture(scope="module")
def learned(scorer, told):
    return calibrate_rows(told, 0.55, 0.8, signal="learned", scorer=scorer, resamples=50)


@pytest.mark.usefixtures("no_masks")
def test_from_labels_to_decisions(learned, told, scorer):
    """The value of a decision is that of the row when it was labelled."""
    assert (learned.signal, learned.guarantee.share) == ("learned", 0.5)
    assert "on the 19 of 38 clusters that learn; learned decides." in learned.learning
    assert (learned.learning in str(learned), learned.guarantee.coverage > 0.3) == (True, True)
    found = [outcome.result for outcome in Decider(scorer, learned).score_many(told[:10])]
    for one, row in zip(found, told, strict=False):
        expected = pytest.approx(learned.learned(_features(read(row), scorer))[0], abs=1e-3)
        assert one.value == one.signals["learned"] == expected
        assert one.accept == (one.value <= learned.guarantee.threshold)


def test_a_saved_one_needs_no_scikit_learn(learned, tmp_path, monkeypatch):
    learned.save(tmp_path / "c.json")
    for name in [name for name in sys.modules if name.startswith("sklearn")]:
        monkeypatch.setitem(sys.modules, name, None)
    score = Calibration.load(tmp_path / "c.json").learned
    (value,) = score({name: [[1.0] * len(own)] for name, own in score.weights.items()})
    assert value == pytest.approx(sum(map(sum, score.weights.values())) + score.intercept)


def test_features_of_own_answers_are_those_of_their_ids(scorer):
    """As they were scored: this one was cut off, and as text it would get an end, which no decision
    on the model's own answer has."""
    (line,) = lines_of(scorer, [{"prompt": PROMPT}])
    features = _features(read(line), scorer)
    own, score = scorer.read(PROMPT, states=True).features, Score.from_dict(line)
    widths = {name: len(values) for name, values in own.items()}
    assert (len(score.ids), widths) == (3, {"free": 11, "hidden mean": 32, "hidden last": 32})
    ll, h = (np.array([getattr(t, n) for t in score.tokens]) for n in ("log_likelihood", "entropy"))
    expected = own | {"free": [
        ll.sum(), ll.mean(), ll.min(), ll[0], ll[-1], h.mean(), h.sum(), h.max(), h[0], 3,
        score.prompt_tokens,
    ]}  # fmt: skip
    for name in own:
        np.testing.assert_allclose(features[name][0], expected[name], rtol=1e-3, atol=1e-4)


def test_what_has_no_decision_and_what_is_refused(learned, told, scorer, monkeypatch):
    answer = scorer.read(PROMPT, " Brask")  # without hidden states
    known = replace(answer, settings=answer.settings | scorer.fingerprints())
    assert "unknown: use `decide`" in learned.decide(known).reason
    plain = scorer._engine.read
    ask = partial(calibrate_rows, told[:4], 0.2, signal="learned", scorer=scorer, resamples=20)
    spoiled = lambda *a: (s := plain(*a)) | {"hidden": s["hidden"] * np.nan}  # noqa: E731
    monkeypatch.setattr(scorer._engine, "read", spoiled)
    refused(
        (partial(Decider, scorer.model, learned, tokenizer=scorer.tokenizer, depth=0.3), "depth"),
        (
            partial(calibrate_run, "RUN", 0.3, signal="learned"),
            "run has not saved the hidden states",
        ),
        (partial(ask, unlabelled=told[4:]), "unlabelled"),
        (ask, "hidden mean has values that are not finite"),
    )
