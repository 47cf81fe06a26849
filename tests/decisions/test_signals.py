"""What is recommended of several signals, in words."""

import numpy as np

from lm_polygraph_asmi.analysis import Labelled
from lm_polygraph_asmi.decisions.fit import best_signal, rank_signals

WRONG = np.arange(60) % 2
NOISE = np.random.default_rng(0).permutation(60) / 60
ANSWERS = Labelled(WRONG, range(60), resamples=200)


def test_the_best_signal():
    columns = {"noise": NOISE, "good": WRONG + 0.01 * NOISE, "bad": -WRONG}
    ranked = rank_signals(columns, ANSWERS)
    assert ranked["good"].prr.value == 1
    assert best_signal(columns, ANSWERS) == "good"
    assert ranked["bad"].prr.high < 0
