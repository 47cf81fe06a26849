"""Embeddings of sampled responses: the model's own hidden state at their final token."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from lm_polygraph_asmi.model.layer_call import LayerCall, Reached
from lm_polygraph_asmi.model.layers import decoder_layers, execution_device, num_layers
from lm_polygraph_asmi.model.unmasked import validate_sequence


def states_entering(model: PreTrainedModel, layer: int, **inputs: object) -> Tensor:
    """hidden_states[layer] of an ordinary pass, without running the layers above."""

    def stop(module: nn.Module, args: tuple, kwargs: dict) -> None:
        hidden, _ = LayerCall.split(module, args, kwargs)
        raise Reached(hidden)

    handle = decoder_layers(model)[layer].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        model.base_model(**inputs)
    except Reached as reached:
        (hidden,) = reached.tensors
        return hidden
    finally:
        handle.remove()
    raise AssertionError("a decoder layer was never called")


def response_embeddings(
    model: PreTrainedModel,
    prompt_ids: Int[Tensor, " P"],
    responses: Sequence[Sequence[int]],
) -> Float[Tensor, "N D"]:
    """hidden_states[L // 2] (0 = embeddings) at the final token of each response, in float32.

    Equals a separate pass over prompt and response each. The prompt runs once and is shared by
    all responses through its key-value cache, and the layers above L // 2 are not run. Call it
    inside `scoring_session`. Source: section "Adaptive semantic weighting" of the paper.

    Raises:
        ValueError: an empty response, an empty prompt, a sequence beyond the context window, or a
            model of one layer.
    """
    layer = num_layers(model) // 2
    if layer == 0:
        raise ValueError("response embeddings need a model of at least two layers, got one")
    ids = [torch.tensor(response, dtype=torch.long) for response in responses]
    for response in ids:
        validate_sequence(model, torch.cat([prompt_ids.cpu(), response]), len(prompt_ids))
    lengths = torch.tensor([len(response) for response in ids])
    # Right padding needs no mask: under causal attention no token sees what follows it.
    tokens = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    # A plain cache keeps the whole prompt; sliding windows are then imposed by the mask alone.
    cache = DynamicCache()
    device = execution_device(model.get_input_embeddings())
    states_entering(
        model, layer, input_ids=prompt_ids[None].to(device), past_key_values=cache, use_cache=True
    )
    cache.batch_repeat_interleave(len(responses))
    hidden = states_entering(
        model, layer, input_ids=tokens.to(device), past_key_values=cache, use_cache=True
    )
    rows = torch.arange(len(responses), device=hidden.device)
    return hidden[rows, (lengths - 1).to(hidden.device)].float()
