"""The paper's analysis of heads: criticality, coupling, the causal probe.

It imports other subpackages. Of these, only `commands` and `report.items` import it.
"""
