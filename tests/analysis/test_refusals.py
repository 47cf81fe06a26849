"""What statistics refuse, and what the error says; `test_hostile` tries all of them on faults."""

import numpy as np
import pytest

from lm_polygraph_asmi import analysis as a
from lm_polygraph_asmi import decisions as d
from lm_polygraph_asmi.analysis import Labelled
from lm_polygraph_asmi.analysis.calibration import Step
from lm_polygraph_asmi.analysis.clusters import bootstrap_interval
from lm_polygraph_asmi.decisions import learned

NAN, INF = np.nan, np.inf
PAIR = Labelled([0, 1], ["a", "b"])
SIXTY = Labelled([0, 1] * 30, range(60))
NO_ERROR = Labelled([0] * 60, range(60))
SCORE, TABLE = np.arange(60.0), np.arange(120.0).reshape(60, 2) % 7
GUARANTEE = d.RiskThreshold(0.3, 0.8, 0.04, 0.1, 0.9, 0.2, 500, 500, 1)
NO_THRESHOLD = d.RiskThreshold(None, 0.0, None, 0.1, 0.9, 0.4, 100, 100)
MASSES = np.ones((10, 7))


def threshold(scores=(0.1, 0.2), wrong=(0, 1), clusters=("a", "b"), risk=0.1, confidence=0.9):
    return d.risk_threshold(scores, wrong, clusters, risk, confidence)


def of_learned(features, simple):
    return learned.learned_threshold(features, simple, PAIR, 0.1, 0.9)


REFUSALS = [
    # Labels, columns and clusters.
    (lambda: Labelled([0, 1]), "clusters must have a key for every row"),
    (lambda: Labelled([], []), "there is no row"),
    (lambda: Labelled(clusters=["a"]), "expected wrong, quality or both"),
    (lambda: Labelled([0, 1], ["a"]), "wrong has 2 values for 1 cluster keys"),
    (lambda: Labelled(None, ["a", "b"], [0.5]), "quality has 1 values for 2 cluster keys"),
    (lambda: Labelled([0.5], ["a"]), "wrong must contain True and False"),
    (lambda: Labelled([NAN], ["a"]), "wrong has values that are not finite"),
    (lambda: Labelled(None, ["a"], [INF]), "quality has values that are not finite"),
    (lambda: Labelled(quality=[0.2], clusters=["a"]).wrong, "no correctness labels: pass wrong"),
    (lambda: PAIR.columns(score=[1.0]), "score has 1 values for 2 cluster keys"),
    (lambda: PAIR.columns(score=[1.0, NAN]), "score has values that are not finite"),
    (lambda: PAIR.columns(score=["high", "low"]), "score must contain numbers"),
    (lambda: bootstrap_interval(0.5, len, a.Clustered([])), "there is no row"),
    (lambda: a.wilson_interval(0, 0), "at least one answer, got 0 of 0"),
    (lambda: a.wilson_interval(3, 2), "got 3 of 2"),
    # Rankings of errors.
    (lambda: a.auroc([1, NAN, 3], [1, 0, 0]), "score contains NaN"),
    (lambda: a.augrc([1, NAN, 3], [1, 0, 0]), "score contains NaN"),
    (lambda: a.auroc_interval([1, 2, 3], PAIR), "score has 3 values for 2 cluster keys"),
    (lambda: a.auroc_difference([1, 2], [1, 2, 3], PAIR), "second has 3 values"),
    (lambda: a.prr_intervals({"a": [1, 2], "b": [1, INF]}, PAIR), "b has values that are not"),
    (lambda: a.mcnemar([1, 2, 3], [1, 2], [0, 1, 0], 1), "second has 2 values"),
    (lambda: a.mcnemar([1, 2, 3], [1, 2, 3], [0, 1, 0], 4), r"must lie in 0 \.\.\. 3, got 4"),
    (lambda: a.mcnemar([1, 1, 1], [0, 1, 2], [1, 0, 0], 2), "a constant score cannot choose"),
    (lambda: a.seed_stability([[1.0, 2.0]], [0.0, 1.0]), r"\(R >= 2, n\)"),
    # Selection.
    (lambda: a.aurc([1, 2, 3], [0, 1]), "3 scores for 2 answers"),
    (lambda: a.risk_coverage([1, 2, 3], [0, 1, 0, 1]), "3 scores for 4 answers"),
    (lambda: a.aurc([0.1, NAN], [1, 0]), "uncertainty contains NaN"),
    (lambda: a.risk_coverage([0.1, NAN], [1, 0]), "uncertainty contains NaN"),
    (lambda: a.retained_error([0.1, 0.2], [1, NAN], 0.5), "wrong has values that are not finite"),
    (lambda: a.retained_error([0.1, 0.2], [0, 1], 1.5), r"coverage must lie in \[0, 1\], got 1.5"),
    (lambda: a.retained_error([0.1, 0.2], [0, 1], -0.1), r"must lie in \[0, 1\], got -0.1"),
    (lambda: a.retained_error([0.1, 0.2], [0, 1], NAN), r"coverage must lie in \[0, 1\], got nan"),
    (lambda: a.global_selector(SCORE, SCORE, SIXTY), r"shape \(n, c\), got \(60,\)"),
    (lambda: a.global_selector(TABLE, SCORE, NO_ERROR), "5 folds need right and wrong answers"),
    # Probabilities and thresholds.
    (lambda: a.calibrate([0.1, NAN], [True, False]), "scores has values that are not finite"),
    (lambda: a.probability_at([Step(0.0, 30, 10)], NAN), "score has values that are not finite"),
    (lambda: threshold(scores=[0.1, NAN]), "scores has values that are not"),
    (lambda: threshold(wrong=[0, NAN]), "wrong has values that are not"),
    (lambda: threshold(wrong=[0, 0.3]), "wrong must contain True and False"),
    (lambda: threshold(scores=[0.1]), "scores has 1 values for 2 cluster keys"),
    (lambda: threshold([], [], []), "there is no row"),
    (lambda: threshold(clusters=["a"] * 2), "at least two clusters.*at least 22 at this risk"),
    (lambda: threshold(risk=0), "risk must lie strictly between 0 and 1, got 0"),
    (lambda: threshold(confidence=1), "confidence must lie strictly between"),
    (lambda: threshold(risk="x"), "risk must be a number, got 'x'"),
    (lambda: d.risk_gate(GUARANTEE, [1], PAIR), "accepted has 1 values for 2 cluster keys"),
    (lambda: d.risk_gate(GUARANTEE, [1, 0.5], PAIR), "accepted must contain True and False"),
    (lambda: d.risk_gate(GUARANTEE, [1, NAN], PAIR), "accepted has values that are not finite"),
    (lambda: d.risk_gate(NO_THRESHOLD, [1, 1], PAIR), "with a threshold, got none"),
    # Learned scores.
    (lambda: learned.fit_score({"a": [[1.0], [NAN]]}, [0, 1]), "a has values that are not finite"),
    (lambda: learned.fit_score({"a": [[1.0], [2.0]]}, [1, 1]), "the 2 answers have one label"),
    (lambda: learned.fit_score({"a": [1.0, 2.0]}, [0, 1]), "expected a table"),
    (lambda: learned.fit_score({"a": [[2.0]] * 3}, [0, 1, 0]), "got 3 answers with the same"),
    (lambda: learned.fit_score({"a": [[1.0]], "b": [[1.0], [2.0]]}, [0]), "of the same n"),
    (
        lambda: learned.LearnedScore({"a": [1.0]}, 0.0)({"a": [[1.0, 2.0]]}),
        "widths {'a': 1}, got {'a': 2}",
    ),
    (lambda: learned.LearnedScore({"a": [1.0]}, 0.0)({"b": [[1.0]]}), "expected a table"),
    (lambda: learned.LearnedScore({"a": [INF]}, 0.0), "a has values that are not finite"),
    (lambda: learned.LearnedScore({}, 0.0), "at least one group"),
    (lambda: a.free_features([], [], 3), "at least one token"),
    (lambda: of_learned({"a": [[1.0]]}, {"b": [1.0, 2.0]}), "a has 1 values for 2"),
    # Tokens.
    (lambda: a.masking_response([]), "expected at least one token"),
    (lambda: a.masking_response([np.array([])]), "expected at least one token"),
    (lambda: a.coverage_by_band(range(10), MASSES[:, 1:]), r"shape \(10, 7\), got \(10, 6\)"),
    (lambda: a.coverage_by_band(range(9), MASSES), r"shape \(9, 7\), got \(10, 7\)"),
    (lambda: a.coverage_intervals([[1], []], [MASSES] * 2, PAIR), "2, 2 and 2, 1 without a token"),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS, ids=range(len(REFUSALS)))
def test_the_error_says_what_was_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()
