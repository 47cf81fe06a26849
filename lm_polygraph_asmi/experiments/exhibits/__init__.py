"""What experiments add to the report; `lm_polygraph_asmi.report.exhibits` takes it from here."""

from lm_polygraph_asmi.experiments.exhibits.claims import head_claims
from lm_polygraph_asmi.experiments.exhibits.falsifier import (
    dissociation,
    falsifier,
    falsifier_added,
    falsifier_verdicts,
    findings,
)
from lm_polygraph_asmi.experiments.exhibits.heads import (
    head_concentration,
    head_coupling,
    head_errors,
)
from lm_polygraph_asmi.experiments.exhibits.probe import causal_differences, causal_probe
from lm_polygraph_asmi.experiments.exhibits.sources import sources

EXHIBITS = (
    sources, head_claims, head_concentration, head_coupling, head_errors, causal_probe,
    causal_differences, falsifier_verdicts, falsifier, falsifier_added, dissociation,
)  # fmt: skip
"""In the order of the report."""

__all__ = ["EXHIBITS", "findings"]
