"""Log-probabilities of subnetworks by the package's masked passes, as `brute_force` has them."""

from lm_polygraph_asmi.core.model import masked_model, plain_model
from lm_polygraph_asmi.core.model.comparison import masked_log_probs


def subnetwork_log_probs(
    model, input_ids, prompt_length, layer, masks, *,
    scope="all", memory_budget=None, **session,
):  # fmt: skip
    """Row t of (S, T, V) predicts input_ids[prompt_length + t]."""
    with masked_model(plain_model(model), **session) as f:
        return masked_log_probs(f, input_ids, prompt_length, layer, masks, scope, memory_budget)


def of_model(function, model, *arguments, **session):
    """What a function of the core finds in a session of its own."""
    with masked_model(plain_model(model), **session) as f:
        return function(f, *arguments)
