"""Classes of LM-Polygraph 0.7.0 that are replaced during a run, where no setting would help.

LM-Polygraph's script, `polygraph_eval`, looks them up by name in its globals. A test of
`tests/host/test_upstream` fails if a release of LM-Polygraph makes a replacement unnecessary.
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
    # rouge_score's tokenizer drops letters, so that "Huế" and "Huệ" are the same.
    "RougeMetric": (HostRouge, RougeMetric),
    # utils/model.py: `generate` prepares stop strings again for each answer, and applies the
    # processors of a model's own generation config.
    "WhiteboxModel": (WhiteboxModel, StopsOnceModel),
}
"""Name -> LM-Polygraph's class, and its replacement. Classes of a user's script are kept."""


@contextmanager
def mended(script: dict[str, Any]) -> Iterator[None]:
    """Inside the block, a script's globals hold the replacements and our metrics.

    LM-Polygraph's script finds a metric that a config names by `globals()[metric_name]`.
    """
    changed = {
        **{name: metric for name, metric in METRICS.items() if name not in script},
        **{name: ours for name, (theirs, ours) in MENDS.items() if script.get(name) is theirs},
    }
    before = {name: script[name] for name in changed if name in script}
    script.update(changed)
    try:
        yield
    finally:
        for name in changed:
            del script[name]
        script.update(before)
