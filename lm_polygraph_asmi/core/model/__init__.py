"""Masked passes of transformers models; formulas are in `maths`.

In the order of reading: `structure` finds the heads, `layers` says what layers take and return,
`forwards` replaces their methods for a while, and `masked` is a model in a session. `unmasked` is
the unmasked pass; `start` lets a masked pass start at a layer, and `passes` are the masked passes.
`choice` and `check` decide which of them to trust, by the limits in `rounding`, `subnetworks` runs
all masks, and `readout` turns states into log-probabilities. `responses` embeds sampled answers.

The rest serves these: `session` and `state` restore the model and notice changes, `memory` and
`devices` say what fits where, `foreign` tries code of others, and `comparison` is a diagnostic.
"""

from lm_polygraph_asmi.core.model.check import check_unmasked
from lm_polygraph_asmi.core.model.choice import reads_keys_and_values
from lm_polygraph_asmi.core.model.masked import MaskedModel, masked_model
from lm_polygraph_asmi.core.model.readout import readout, unembedding
from lm_polygraph_asmi.core.model.responses import response_embeddings
from lm_polygraph_asmi.core.model.session import attention_of, scoring_session
from lm_polygraph_asmi.core.model.state import model_lock, model_state
from lm_polygraph_asmi.core.model.structure import Structure, plain_model, structure_of
from lm_polygraph_asmi.core.model.subnetworks import Subnetworks, run_subnetworks
from lm_polygraph_asmi.core.model.unmasked import UnmaskedPass, run_unmasked

__all__ = [
    "MaskedModel", "Structure", "Subnetworks", "UnmaskedPass", "attention_of", "check_unmasked",
    "masked_model", "model_lock", "model_state", "plain_model", "readout", "reads_keys_and_values",
    "response_embeddings", "run_subnetworks", "run_unmasked", "scoring_session", "structure_of",
    "unembedding",
]  # fmt: skip
