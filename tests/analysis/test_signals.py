"""What is recommended of several signals, in words."""

import numpy as np

from lm_polygraph_asmi.analysis import rank_signals, recommendation

CLUSTERS = [str(n) for n in range(40)]
WRONG = np.arange(40) % 2
NOISE = np.random.default_rng(0).permutation(40) / 40


def said(own: str, /, **scores: np.ndarray) -> str:
    signals = rank_signals(scores, WRONG, CLUSTERS, resamples=200)
    return recommendation(signals, scores, WRONG, CLUSTERS, own, resamples=200)


def test_ones_own_signal_beside_the_best():
    best = WRONG + 0.01 * NOISE
    assert said("own", own=best).startswith("own ranks errors best here")
    reversed_ = said("own", best=best, own=-best)
    assert "ahead of own" in reversed_
    assert reversed_.endswith("which ranks them the wrong way.")
    assert said("own", best=best, own=NOISE).endswith("which is not known to rank them.")
    assert "not distinguishable from own" in said("own", best=best, own=2 * best)


def test_where_none_ranks_those_that_mislead_are_named():
    found = said("own", own=-(WRONG + 0.01 * NOISE), noise=NOISE)
    assert found.startswith("None of these signals is known to rank errors here")
    assert "The wrong way round: own. Do not sort" in found
    assert "wrong way" not in said("noise", noise=NOISE)
