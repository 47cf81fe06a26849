"""What tests the paper's claims, and no user of a score calls: other perturbations in the place of
heads, the causal probe, claims on heads, scores by source.

It stands on the core's subpackages; the core finds it in two places, `commands` and `report.items`.
"""
