"""Classes of LM-Polygraph 0.7.0 that a run replaces until its end, since no setting would do.

Its script, `polygraph_eval`, finds them by their names among its globals. A test of
`tests/host/test_upstream` fails when a release of LM-Polygraph makes one needless.
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
"""Name -> LM-Polygraph's class, and the one in its place. A script's own classes stay."""


@contextmanager
def mended(script: dict[str, Any]) -> Iterator[None]:
    """Inside the block, the globals of LM-Polygraph's script have the mends and our metrics.

    The script finds a metric that a config names by `globals()[metric_name]`.
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
