"""The paper's analysis of heads: criticality, coupling, and the causal probe.

This subpackage imports others. Only `commands` and `report.items` import it.
"""
