"""Report items on heads, imported by `lm_polygraph_asmi.report.items`."""

from lm_polygraph_asmi.heads.items.heads import head_coupling
from lm_polygraph_asmi.heads.items.probe import causal_probe

REPORT_ITEMS = (head_coupling, causal_probe)
"""Items on heads, in the order of the report."""
