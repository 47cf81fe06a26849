"""Log-probabilities of subnetworks by the package's masked passes, as `brute_force` has them."""

from functools import partial

import torch

from lm_polygraph_asmi.core.model import (
    keeps_cache,
    masked_model,
    plain_model,
    readout,
    run_subnetworks,
)
from lm_polygraph_asmi.core.model.devices import execution_device
from lm_polygraph_asmi.core.model.memory import distributions_at_once, in_chunks
from lm_polygraph_asmi.core.model.passes import run_unmasked


def subnetwork_log_probs(
    model, input_ids, prompt_length, layer, masks, *,
    scope="all", memory_budget=None, **session,
):  # fmt: skip
    """Row t of (S, T, V) predicts input_ids[prompt_length + t]."""
    decoder = plain_model(model)
    with masked_model(decoder, **session) as f:
        keep = keeps_cache(f, [layer], scope)
        unmasked = run_unmasked(f, input_ids, prompt_length, [layer], scope, keep)
        subnetworks = run_subnetworks(f, unmasked, layer, masks, memory_budget)
        hidden, device = subnetworks.hidden, execution_device(f.lm_head)
        chunk = distributions_at_once(decoder, device, memory_budget) // hidden.shape[1]
        log_probs = torch.cat(in_chunks(partial(readout, f), hidden, chunk))
    return log_probs[subnetworks.index.to(log_probs.device)]


def of_model(function, model, *arguments, **session):
    """What a function of the core finds in a session of its own."""
    with masked_model(plain_model(model), **session) as f:
        return function(f, *arguments)
