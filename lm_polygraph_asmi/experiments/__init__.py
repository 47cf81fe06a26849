"""Tests of the paper's claims: perturbation controls, the causal probe, claims on heads, scores by
source.

Uses the core's subpackages; the core imports it only in `commands` and `report.items`.
"""
