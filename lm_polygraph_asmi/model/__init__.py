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

from lm_polygraph_asmi.config import target_layer
from lm_polygraph_asmi.model.check import (
    Subnetworks,
    check_unmasked,
    run_subnetworks,
)
from lm_polygraph_asmi.model.heads import (
    Structure,
    layer_at,
    name_modules,
    num_heads,
    num_layers,
    plain_model,
    structure_of,
)
from lm_polygraph_asmi.model.passes import UnmaskedPass, run_unmasked
from lm_polygraph_asmi.model.readout import readout, unembedding
from lm_polygraph_asmi.model.responses import response_embeddings
from lm_polygraph_asmi.model.session import attention_of, scoring_session
from lm_polygraph_asmi.model.state import model_lock, model_state

__all__ = [
    "Structure", "Subnetworks", "UnmaskedPass", "attention_of", "check_unmasked", "layer_at",
    "model_lock", "model_state", "name_modules", "num_heads", "num_layers", "plain_model",
    "readout", "response_embeddings", "run_subnetworks", "run_unmasked", "scoring_session",
    "structure_of", "target_layer", "unembedding",
]  # fmt: skip
