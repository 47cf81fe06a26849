"""Report items of experiments, imported by `lm_polygraph_asmi.report.items`."""

from lm_polygraph_asmi.experiments.items.heads import head_coupling
from lm_polygraph_asmi.experiments.items.probe import causal_probe

REPORT_ITEMS = (head_coupling, causal_probe)
"""In the order of the report."""

__all__ = ["REPORT_ITEMS"]
