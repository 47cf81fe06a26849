"""What a run changes in LM-Polygraph 0.7.0, for which it leaves no other way; undone at its end.

All are names that its script, `polygraph_eval`, looks up among its globals. `tests/host/test_mends`
says when a release of LM-Polygraph makes one needless.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lm_polygraph.generation_metrics.alignscore import AlignScore as HostAlignScore
from lm_polygraph.generation_metrics.rouge import RougeMetric as HostRouge
from lm_polygraph.utils.model import WhiteboxModel

from lm_polygraph_asmi.host.align_score import AlignScore
from lm_polygraph_asmi.host.quality import METRICS, RougeMetric
from lm_polygraph_asmi.host.whitebox import StopsOnceModel

MENDS = {
    # alignscore_utils.py: `load_state_dict(state_dict, strict=False)` takes any checkpoint.
    "AlignScore": (HostAlignScore, AlignScore),
    # rouge_score's tokenizer drops letters: "Huế" and "Huệ" are the same.
    "RougeMetric": (HostRouge, RougeMetric),
    # utils/model.py: `generate` prepares stop strings anew for each answer, and follows the
    # processors of a model's own generation config.
    "WhiteboxModel": (WhiteboxModel, StopsOnceModel),
}
"""Name -> the host's, and what stands in its place meanwhile. A script's own are left alone."""


@contextmanager
def mended(script: dict[str, Any]) -> Iterator[None]:
    """Meanwhile, the global names of LM-Polygraph's script hold the mends and our metrics.

    `metric_class = globals()[metric_name]` is how the script finds a metric that a config names.
    """
    changed = {name: metric for name, metric in METRICS.items() if name not in script}
    changed |= {name: ours for name, (theirs, ours) in MENDS.items() if script.get(name) is theirs}
    before = {name: script[name] for name in changed if name in script}
    script.update(changed)
    try:
        yield
    finally:
        for name in changed:
            del script[name]
        script.update(before)
