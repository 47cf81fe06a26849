"""What a score has beside it, and the calls of a row.

That a score is that of the formulas is in scoring/test_result, and that runs have it, in
test_manager.
"""

from cProfile import Profile
from itertools import permutations
from pathlib import Path

import pytest

import lm_polygraph_asmi
from lm_polygraph_asmi import Scorer
from lm_polygraph_asmi.stat_calculators import MaskedHeadsCalculator
from tests.tiny_lm import whitebox

PACKAGE = f"{Path(lm_polygraph_asmi.__file__).parent}/"
QUESTION, ANSWER = "Who built it?", [40, 77, 131]


def test_signals_beside_a_score_are_the_scores_of_the_other_methods():
    scores = {
        method: Scorer(whitebox(), method=method, num_masks=8).score(QUESTION, ANSWER)
        for method in ("asmi", "sem")
    }
    for one, other in permutations(scores):
        assert scores[one].signals[other] == pytest.approx(scores[other].score)


def test_a_warm_row_makes_few_calls():
    """With the number of masks of a run, so that a call for each of them is seen."""
    given = {"greedy_tokens": [ANSWER]}, [QUESTION], whitebox()
    MaskedHeadsCalculator()(*given)  # the first is cold
    profile = Profile(builtins=False)
    profile.runcall(MaskedHeadsCalculator(), *given)
    own = [call for call in profile.getstats() if call.code.co_filename.startswith(PACKAGE)]
    assert 50 < sum(call.callcount for call in own) < 1000
