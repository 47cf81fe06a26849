"""What a run changes in LM-Polygraph, and whether that is still needed."""

import inspect
from contextlib import suppress

import pytest
from lm_polygraph.generation_metrics import alignscore_utils
from lm_polygraph.generation_metrics.alignscore import AlignScore as HostAlignScore
from lm_polygraph.utils.model import WhiteboxModel

from lm_polygraph_asmi.host.align_score import AlignScore
from lm_polygraph_asmi.host.mends import MENDS, mended
from lm_polygraph_asmi.host.quality import METRICS
from lm_polygraph_asmi.host.whitebox import StopsOnceModel


def test_a_script_holds_them_meanwhile():
    theirs = {"AlignScore": HostAlignScore, "WhiteboxModel": WhiteboxModel}
    ours = {"AlignScore": AlignScore, "WhiteboxModel": StopsOnceModel}
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
        (WhiteboxModel.generate, "default_params = asdict(self.generation_parameters)"),
    ],
)
def test_the_lines_that_are_mended_are_there(code, line):
    """If this fails, a release of LM-Polygraph may make a mend needless: see `host/mends.py`."""
    assert line in inspect.getsource(code)
