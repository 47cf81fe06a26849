"""What is recommended of several signals, in words."""

import numpy as np

from lm_polygraph_asmi.analysis import Labelled
from lm_polygraph_asmi.decisions import rank_signals, recommendation

CLUSTERS = [str(n) for n in range(60)]
WRONG = np.arange(60) % 2
NOISE = np.random.default_rng(0).permutation(60) / 60


def said(own: str, /, **scores: np.ndarray) -> str:
    answers = Labelled(WRONG, CLUSTERS, resamples=200)
    return recommendation(rank_signals(scores, answers), scores, answers, own)


def test_ones_own_signal_beside_the_best():
    best = WRONG + 0.01 * NOISE
    assert said("own", own=best).startswith("On all these answers, own ranks errors best")
    reversed_ = said("own", best=best, own=-best)
    assert "better than own" in reversed_
    assert reversed_.endswith("which has negative PRR.")
    assert said("own", best=best, own=NOISE).endswith("which is inconclusive.")
    assert "not significantly different from own" in said("own", best=best, own=2 * best)


def test_where_none_ranks_those_that_mislead_are_named():
    found = said("own", own=-(WRONG + 0.01 * NOISE), noise=NOISE)
    assert found.startswith("No evidence that any of these signals ranks errors here")
    assert "Negative PRR: own. Do not sort" in found
    assert "Negative PRR" not in said("noise", noise=NOISE)


def test_too_few_answers_recommend_nothing():
    scores = {"own": WRONG + 0.01 * NOISE}
    for few in (slice(49), slice(0, 60, 2)):  # clusters, and answers of one kind
        here = {"own": scores["own"][few]}
        found = recommendation({}, here, Labelled(WRONG[few], CLUSTERS[few]), "own")
        assert found.startswith(
            f"Too few answers to recommend a signal: {len(WRONG[few])} clusters"
        )
