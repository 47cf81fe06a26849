"""The fit that both doors share: which signal decides, and on which clusters it is tested."""

from dataclasses import replace

import numpy as np
import pytest

from lm_polygraph_asmi.analysis import Labelled
from lm_polygraph_asmi.decisions import risk_threshold
from lm_polygraph_asmi.decisions.fit import CalibrationOptions, fit, rank_signals
from tests.analysis.simulation import keys
from tests.decisions.conftest import ABOUT

ASKED = CalibrationOptions(0.4, 0.8)
WRONG, NOISE = np.arange(60) % 2, np.random.default_rng(0).permutation(60) / 60
ANSWERS = Labelled(WRONG, keys(60, 1), resamples=200)
COLUMNS = {"asmi": WRONG + NOISE, "sem": NOISE, "msp": WRONG + 0.01 * NOISE, "entropy": -WRONG}


@pytest.mark.parametrize(
    ("signal", "expected", "signals"), [("best", "msp", 2), ("sem", "sem", 1), ("asmi", "asmi", 1)]
)
def test_the_signal_that_decides(signal, expected, signals):
    """The best of two unmasked ones has half of the level; one that needs masks is to be named."""
    for unlabelled in (None, {name: column[::2] for name, column in COLUMNS.items()}):
        asked = replace(ASKED, signal=signal, largest=1)
        found = fit(COLUMNS, ANSWERS, asked, unlabelled=unlabelled or {}, **ABOUT)
        assert (found.signal, found.n, found.errors) == (expected, 60, 30)
        rule = risk_threshold(
            COLUMNS[expected], ANSWERS, 0.4, 1 - 0.2 / signals,
            unlabelled=unlabelled and unlabelled[expected],
        )  # fmt: skip
        assert found.guarantee == replace(rule, confidence=0.8, signals=signals)
    with pytest.raises(ValueError, match=r"expected a signal of asmi, .*; got 'perplexity'"):
        fit(COLUMNS, ANSWERS, replace(ASKED, signal="perplexity"), **ABOUT)


def test_a_learned_score_that_ranks_worse_leaves_it_to_an_unmasked_signal():
    asked, useless = replace(ASKED, signal="learned"), {"hidden": NOISE[:, None]}
    assert fit(COLUMNS, ANSWERS, asked, features=useless.copy, **ABOUT).signal == "msp"


def test_signals_are_ranked_and_the_best_accepts_most():
    ranked = rank_signals(COLUMNS, ANSWERS)
    assert (ranked["msp"].prr.value, ranked["entropy"].prr.high < 0) == (1, True)
    masked = {"asmi": NOISE, "sem": WRONG}  # a run may have no others
    assert fit(masked, ANSWERS, ASKED, **ABOUT).signal == "sem"
    equal = {"msp": 1.0 * WRONG, "entropy": 2.0 * WRONG, "sem": 1.0 * WRONG}
    assert fit(equal, ANSWERS, ASKED, **ABOUT).signal == "msp"


def test_what_is_needed_of_several_signals():
    few = Labelled(WRONG[:9], keys(9, 1), resamples=50)
    columns = {name: column[:9] for name, column in COLUMNS.items()}
    found = fit(columns, few, CalibrationOptions(0.2, 0.9), **ABOUT).guarantee
    assert "at least 14 answers, one a cluster, must test; 9 do." in found.limits  # .8**14 < .05
