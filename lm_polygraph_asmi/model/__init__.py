"""Masked-suffix passes over transformers models: no formula lives here."""

from lm_polygraph_asmi.model.families import FAMILIES, Family, family_of
from lm_polygraph_asmi.model.layers import (
    num_heads,
    num_layers,
    readout,
    target_layer,
    unembedding,
)
from lm_polygraph_asmi.model.responses import response_embeddings
from lm_polygraph_asmi.model.session import attention_of, scoring_session
from lm_polygraph_asmi.model.subnetworks import (
    Subnetworks,
    check_replay,
    run_subnetworks,
    subnetwork_log_probs,
)
from lm_polygraph_asmi.model.unmasked import UnmaskedPass, check_scope_runs, run_unmasked

__all__ = [
    "FAMILIES",
    "Family",
    "Subnetworks",
    "UnmaskedPass",
    "attention_of",
    "check_replay",
    "check_scope_runs",
    "family_of",
    "num_heads",
    "num_layers",
    "readout",
    "response_embeddings",
    "run_subnetworks",
    "run_unmasked",
    "scoring_session",
    "subnetwork_log_probs",
    "target_layer",
    "unembedding",
]
