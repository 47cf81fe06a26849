"""Masked passes of transformers models; formulas are in `maths`.

The examples of this subpackage use a tiny model with random weights, two different masks of its
four heads (1 keeps a head), and eight tokens, of which the first six are the prompt:

>>> import torch
>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> config = LlamaConfig(
...     vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=4,
...     num_attention_heads=4, num_key_value_heads=2,
... )
>>> model = LlamaForCausalLM(config)
>>> masks = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1]])
>>> ids = torch.arange(3, 11)
"""

from lm_polygraph_asmi.core.model.check import check_unmasked
from lm_polygraph_asmi.core.model.choice import reads_cache
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
    "masked_model", "model_lock", "model_state", "plain_model", "readout", "reads_cache",
    "response_embeddings", "run_subnetworks", "run_unmasked", "scoring_session", "structure_of",
    "unembedding",
]  # fmt: skip
