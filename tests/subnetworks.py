"""Log-probabilities of subnetworks by the package's masked passes, as `brute_force` has them."""

from functools import partial

import torch

from lm_polygraph_asmi.model import plain_model, readout, run_subnetworks, scoring_session
from lm_polygraph_asmi.model.check import keeps_cache
from lm_polygraph_asmi.model.devices import execution_device
from lm_polygraph_asmi.model.heads import output_embeddings
from lm_polygraph_asmi.model.memory import distributions_at_once, in_chunks
from lm_polygraph_asmi.model.passes import run_unmasked


def subnetwork_log_probs(
    model, input_ids, prompt_length, layer, masks, *,
    scope="all", attention=None, memory_budget=None,
):  # fmt: skip
    """Row t of (S, T, V) predicts input_ids[prompt_length + t]."""
    decoder = plain_model(model)
    with scoring_session(decoder, attention):
        keep = scope == "response" and keeps_cache(decoder, [layer], scope)
        unmasked = run_unmasked(decoder, input_ids, prompt_length, [layer], scope, keep)
        subnetworks = run_subnetworks(decoder, unmasked, layer, masks, memory_budget)
        hidden, device = subnetworks.hidden, execution_device(output_embeddings(decoder))
        chunk = distributions_at_once(decoder, device, memory_budget) // hidden.shape[1]
        log_probs = torch.cat(in_chunks(partial(readout, decoder), hidden, chunk))
    return log_probs[subnetworks.index.to(log_probs.device)]
