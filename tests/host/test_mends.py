"""What a run changes in LM-Polygraph, and whether that is still needed."""

import inspect
from contextlib import suppress

import pytest
from lm_polygraph.generation_metrics import alignscore_utils
from lm_polygraph.utils.model import WhiteboxModel
from rouge_score import tokenize

from lm_polygraph_asmi.host.align_score import AlignScore
from lm_polygraph_asmi.host.mends import MENDS, mended
from lm_polygraph_asmi.host.quality import METRICS, RougeMetric
from lm_polygraph_asmi.host.whitebox import StopsOnceModel


def test_a_script_holds_them_meanwhile():
    theirs = {name: of[0] for name, of in MENDS.items()}
    ours = {
        "AlignScore": AlignScore, "RougeMetric": RougeMetric, "WhiteboxModel": StopsOnceModel
    }  # fmt: skip
    own = dict.fromkeys(MENDS, "another")
    for before, meanwhile in ((theirs, ours), (own, own)):
        script = before | {"TokenF1": "its own"}
        with suppress(KeyboardInterrupt), mended(script):
            assert script == METRICS | meanwhile | {"TokenF1": "its own"}
            raise KeyboardInterrupt
        assert script == before | {"TokenF1": "its own"}


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (alignscore_utils, "load_state_dict(state_dict, strict=False)"),
        (tokenize, 'NON_ALPHANUM_PATTERN = r"[^a-z0-9]+"'),
        (WhiteboxModel.generate, "default_params = asdict(self.generation_parameters)"),
    ],
)
def test_the_lines_that_are_mended_are_there(code, line):
    """If this fails, a release of LM-Polygraph may make a mend needless: see `host/mends.py`."""
    assert line in inspect.getsource(code)
