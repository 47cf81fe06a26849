"""The fit that both doors share: which signal decides, and on which clusters it is tested."""

import numpy as np
import pytest

from lm_polygraph_asmi.analysis import Labelled
from lm_polygraph_asmi.decisions import risk_threshold
from lm_polygraph_asmi.decisions.fit import best_signal, fit, rank_signals
from tests.analysis.simulation import keys

ASKED = {"risk": 0.4, "confidence": 0.8, "method": "sem", "label_source": "", "model": "m",
         "settings": {}, "prompt_tokens": [], "answer_digests": []}  # fmt: skip
WRONG, NOISE = np.arange(60) % 2, np.random.default_rng(0).permutation(60) / 60
ANSWERS = Labelled(WRONG, keys(60, 1), resamples=200)
COLUMNS = {"sem": NOISE, "msp": WRONG + 0.01 * NOISE, "entropy": -WRONG, "asmi": WRONG + NOISE}


@pytest.mark.parametrize(
    ("signal", "expected", "share"),
    [("best", "msp", 0.2), ("score", "sem", 0.0), ("asmi", "asmi", 0.0)],
)
def test_the_signal_that_decides(signal, expected, share):
    for unlabelled in (None, {name: column[::2] for name, column in COLUMNS.items()}):
        found = fit(COLUMNS, ANSWERS, unlabelled=unlabelled, signal=signal, **ASKED)
        assert (found.signal, found.n, found.errors) == (expected, 60, 30)
        assert found.guarantee == risk_threshold(
            COLUMNS[expected], WRONG, keys(60, 1), 0.4, 0.8, share=share,
            unlabelled=unlabelled and unlabelled[expected],
        )  # fmt: skip


def test_signals_are_ranked_and_the_first_of_equal_ones_is_the_best():
    ranked = rank_signals(COLUMNS, ANSWERS)
    assert (ranked["msp"].prr.value, ranked["entropy"].prr.high < 0) == (1, True)
    assert best_signal({"bad": -WRONG, "one": WRONG, "two": 2 * WRONG}, ANSWERS) == "one"
    assert fit({"asmi": WRONG, "sem": WRONG}, ANSWERS, signal="best", **ASKED).signal == "sem"
