"""Report items of experiments, imported by `lm_polygraph_asmi.report.items`."""

from lm_polygraph_asmi.experiments.items.claims import head_claims
from lm_polygraph_asmi.experiments.items.controls import (
    control_verdicts,
    controls,
    controls_added,
    dissociation,
    findings,
)
from lm_polygraph_asmi.experiments.items.heads import (
    head_concentration,
    head_coupling,
    head_errors,
)
from lm_polygraph_asmi.experiments.items.measured import MEASURES
from lm_polygraph_asmi.experiments.items.probe import causal_differences, causal_probe

REPORT_ITEMS = (
    head_claims, head_concentration, head_coupling, head_errors, causal_probe,
    causal_differences, control_verdicts, controls, controls_added, dissociation,
)  # fmt: skip
"""In the order of the report."""

__all__ = ["MEASURES", "REPORT_ITEMS", "findings"]
