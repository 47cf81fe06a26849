"""What a run changes in LM-Polygraph. Whether that is still needed is in test_upstream."""

from contextlib import suppress

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
