"""Masked passes of transformers models; formulas are in `maths`.

In the order of reading: `structure` finds the heads, `masked` is a model in a session, `passes` are
the unmasked and the masked passes, `choice` and `check` decide which of them to trust,
`subnetworks` runs all masks, and `readout` turns states into log-probabilities. `responses` embeds
sampled answers. The rest serves these: `forwards` replaces methods of modules, `session` and
`state` restore the model and notice changes, `memory` and `devices` say what fits where, `rounding`
has the limits, `foreign` tries code of others, and `comparison` is a diagnostic.
"""

from lm_polygraph_asmi.core.model.check import check_unmasked
from lm_polygraph_asmi.core.model.choice import reads_keys_and_values
from lm_polygraph_asmi.core.model.masked import MaskedModel, masked_model
from lm_polygraph_asmi.core.model.passes import UnmaskedPass, run_unmasked
from lm_polygraph_asmi.core.model.readout import readout, unembedding
from lm_polygraph_asmi.core.model.responses import response_embeddings
from lm_polygraph_asmi.core.model.session import attention_of, scoring_session
from lm_polygraph_asmi.core.model.state import model_lock, model_state
from lm_polygraph_asmi.core.model.structure import Structure, plain_model, structure_of
from lm_polygraph_asmi.core.model.subnetworks import Subnetworks, run_subnetworks

__all__ = [
    "MaskedModel", "Structure", "Subnetworks", "UnmaskedPass", "attention_of", "check_unmasked",
    "masked_model", "model_lock", "model_state", "plain_model", "readout", "reads_keys_and_values",
    "response_embeddings", "run_subnetworks", "run_unmasked", "scoring_session", "structure_of",
    "unembedding",
]  # fmt: skip
