"""The paper's analysis of heads: criticality, coupling, the causal probe.

Uses the core's subpackages; the core imports it only in `commands` and `report.items`.
"""
