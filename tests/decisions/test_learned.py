"""A learned score in a calibration: from labels to decisions, without a masked pass."""

import json
import sys
from dataclasses import replace
from importlib import import_module
from multiprocessing import get_context

import numpy as np
import pytest

from lm_polygraph_asmi import algorithm
from lm_polygraph_asmi.decisions import Calibration, Decider, calibrate_rows, calibrate_run
from lm_polygraph_asmi.decisions import rows as first_door
from lm_polygraph_asmi.scoring import Score
from lm_polygraph_asmi.scoring.rows import Row
from lm_polygraph_asmi.scoring.scorer import Scorer
from lm_polygraph_asmi.scoring.unmasked import fingerprints, read
from tests.decisions.conftest import SETTINGS, WORDS, labelled, lines_of
from tests.scoring.conftest import PROMPT, ending_model

RIGHT = WORDS[:4]


@pytest.fixture(autouse=True, scope="module")
def features_once():
    """What a learned score reads of the same answers is computed once."""
    known, compute = {}, first_door._features

    def once(rows, answers, scorer):
        key = scorer, *((one.prompt, *one.ids) for one in answers)
        return known.get(key) or known.setdefault(key, compute(rows, answers, scorer))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_door, "_features", once)
        yield


@pytest.fixture(scope="module")
def told(scorer):
    """Scored rows whose word decides whether they are right; a prompt and a cluster each."""
    rows = [
        row
        | {
            "prompt": f"Question {i // 2}{'.:'[i % 2]} {PROMPT}",
            "correct": row["answer"].split()[-1] in RIGHT,
            "cluster": i,
        }
        for i, row in enumerate(labelled(60))
    ]
    return lines_of(scorer, rows)


@pytest.fixture(scope="module")
def learned(scorer, told):
    return calibrate_rows(told, 0.4, 0.8, signal="learned", scorer=scorer, resamples=50)


@pytest.fixture
def no_masks(monkeypatch):
    """Masked passes fail."""
    monkeypatch.setattr(
        algorithm, "run_subnetworks", lambda *_: pytest.fail("a masked pass was run")
    )


def test_an_answer_that_was_cut_off_is_read_as_it_was_scored(scorer):
    """As text it would get an end, which no decision on the model's own answer has."""
    short = Scorer(scorer.model, scorer.config.replace(max_new_tokens=3),
                   tokenizer=scorer.tokenizer)  # fmt: skip
    (line,) = lines_of(short, [{"prompt": PROMPT}])
    score = Score.from_dict(line)
    assert len(score.ids) == 3
    features = first_door._features([Row(1, line)], [score], short)
    np.testing.assert_allclose(-features["free"][0, 0], score.signals["msp"], rtol=1e-4)
    own = read(short, PROMPT, states=True).features
    np.testing.assert_allclose(features["hidden last"][0], own["hidden last"], rtol=1e-3, atol=1e-5)


@pytest.mark.usefixtures("no_masks")
def test_from_labels_to_decisions(learned, told, scorer):
    """Which clusters learned is unknown here; the others have the value of their decision."""
    assert learned.signal == "learned"
    assert learned.guarantee.share == 0.5
    assert learned.learning in " ".join(str(learned).split())
    assert "out of fold on the 30 of 60 clusters that learn; learned decides." in learned.learning
    assert learned.guarantee.coverage > 0.3
    outcomes = list(Decider(scorer, learned).score_many(told[:10]))
    values = np.array([outcome.result.value for outcome in outcomes])
    known = np.array(learned.values)
    nearest = np.abs(values[:, None] - known).min(1)
    # Three fifths of all; rounding of shared prefixes.
    assert (nearest < 1e-4 * np.abs(values).max()).sum() >= 4
    accepted = [outcome.result.accept for outcome in outcomes]
    assert accepted == [bool(value <= learned.guarantee.threshold) for value in values]
    assert outcomes[0].result.signals["learned"] == values[0]
    assert outcomes[0].result.reason.startswith(("Accept: learned", "Abstain: learned"))


def without_scikit_learn(path):
    """Value, in a fork in which the package is imported anew."""
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("lm_polygraph_asmi", "sklearn"):
            del sys.modules[name]
    sys.modules["sklearn"] = None
    saved = import_module("lm_polygraph_asmi.decisions").Calibration.load(path)
    features = {name: [[1.0] * len(own)] for name, own in saved.learned.weights.items()}
    return float(saved.learned(features)[0])


def test_a_saved_one_needs_no_scikit_learn(learned, tmp_path):
    learned.save(tmp_path / "c.json")
    assert Calibration.load(tmp_path / "c.json") == learned
    with get_context("fork").Pool(1) as pool:
        value = pool.apply(without_scikit_learn, [tmp_path / "c.json"])
    expected = sum(map(sum, learned.learned.weights.values())) + learned.learned.intercept
    assert value == pytest.approx(expected)
    damaged = json.loads((tmp_path / "c.json").read_text())
    damaged["learned"]["weights"]["free"][0] = None
    (tmp_path / "d.json").write_text(json.dumps(damaged))
    with pytest.raises(ValueError, match=r"not a saved calibration: .*learned\.weights\.free\.0"):
        Calibration.load(tmp_path / "d.json")
    with pytest.raises(ValueError, match="weights of a learned score exactly if it is the signal"):
        replace(learned, learned=None)


def test_features_of_own_answers_are_those_of_their_ids(monkeypatch):
    """One unmasked pass an answer reads them."""
    scorer, runs = Scorer(ending_model(["\n"]), max_new_tokens=4, **SETTINGS), []
    plain = algorithm.run_unmasked
    monkeypatch.setattr(algorithm, "run_unmasked", lambda *a: runs.append(1) or plain(*a))
    answers = [read(scorer, prompt, states=True) for prompt in (PROMPT, "Where?", "When was it?")]
    assert len(runs) == len(answers)
    for own in answers:
        given = read(scorer, own.prompt, list(own.ids), states=True)
        for name, values in own.features.items():
            np.testing.assert_allclose(values, given.features[name], rtol=1e-3, atol=1e-4)
    assert {name: len(values) for name, values in own.features.items()} == {
        "free": 11, "hidden mean": 32, "hidden last": 32,
    }  # fmt: skip


def test_what_has_no_decision_and_what_is_refused(learned, told, scorer, monkeypatch):
    answer = read(scorer, PROMPT, " Brask")  # without hidden states
    known = replace(answer, settings=answer.settings | fingerprints(scorer))
    assert "is unknown: use `decide`" in learned.decide(known).reason
    with pytest.raises(ValueError, match=r"settings differ .* \(depth 0.6 there, 0.3 here\)"):
        Decider(scorer.model, learned, tokenizer=scorer.tokenizer, depth=0.3)
    with pytest.raises(ValueError, match="a finished run has no hidden states to learn from"):
        calibrate_run("RUN", 0.3, signal="learned")
    with pytest.raises(ValueError, match="a learned score takes no unlabelled rows"):
        calibrate_rows(told, 0.3, signal="learned", unlabelled=told, scorer=scorer)
    plain = scorer._engine.read
    monkeypatch.setattr(
        scorer._engine, "read", lambda *a: (s := plain(*a)) | {"hidden": s["hidden"] * np.nan}
    )
    with pytest.raises(ValueError, match="hidden mean has values that are not finite"):
        calibrate_rows(told[:4], 0.2, signal="learned", scorer=scorer, resamples=20)


def test_a_simple_signal_that_ranks_as_well_decides(scorer, told):
    likely = [Score.from_dict(line).signals["perplexity"] for line in told]
    pairs = zip(told, likely, strict=True)
    rows = [line | {"correct": value < np.quantile(likely, 0.4)} for line, value in pairs]
    found = calibrate_rows(rows, 0.4, 0.8, signal="learned", scorer=scorer, resamples=50)
    assert found.learned is None
    assert found.learning.endswith(f"30 of 60 clusters that learn; {found.signal} decides.")
    few = calibrate_rows(rows[:6], 0.4, 0.8, signal="learned", scorer=scorer, resamples=50)
    assert few.learning.startswith("Nothing was learned: expected 10 clusters with wrong and 10")
    best = calibrate_rows(told, 0.2, 0.8, resamples=50)
    assert (best.learned, best.learning) == (None, "")
