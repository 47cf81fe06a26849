"""The calls of a row; what its score must be is in scoring/test_result and test_manager."""

from cProfile import Profile
from pathlib import Path

import lm_polygraph_asmi
from lm_polygraph_asmi.stat_calculators import MaskedHeadsCalculator
from tests.tiny_lm import whitebox

PACKAGE = f"{Path(lm_polygraph_asmi.__file__).parent}/"


def test_a_warm_row_makes_few_calls():
    """With the number of masks of a run, so that a call for each of them is seen."""
    given = {"greedy_tokens": [[40, 77, 131]]}, ["Who built it?"], whitebox()
    MaskedHeadsCalculator()(*given)  # the first is cold
    profile = Profile(builtins=False)
    profile.runcall(MaskedHeadsCalculator(), *given)
    own = [call for call in profile.getstats() if call.code.co_filename.startswith(PACKAGE)]
    assert 50 < sum(call.callcount for call in own) < 1000
