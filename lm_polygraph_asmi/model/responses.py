"""Embeddings of sampled responses: the model's own hidden state at their final token."""

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from lm_polygraph_asmi.model.check import Extent, record_of, regimes, specials
from lm_polygraph_asmi.model.devices import execution_device, lowest_precision
from lm_polygraph_asmi.model.layer_call import LayerCall, Reached, with_cache
from lm_polygraph_asmi.model.layers import base_model, decoder_layers, num_layers
from lm_polygraph_asmi.model.model_cache import has_foreign_code
from lm_polygraph_asmi.model.unmasked import validate_sequence


def states_entering(model: PreTrainedModel, layer: int, **inputs: object) -> Tensor:
    """hidden_states[layer] of an ordinary pass, without running the layers above."""

    def stop(module: nn.Module, args: tuple, kwargs: dict) -> None:
        hidden, _ = LayerCall.split(module, args, kwargs)
        raise Reached(hidden)

    handle = decoder_layers(model)[layer].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        base_model(model)(**inputs)
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
    all responses through its key-value cache, and the layers above L // 2 are not run. The model is
    asked first whether that is so for it (a recurrent state is not shared like keys and values;
    angles may depend on the length), and again for clearly longer or otherwise placed prompts and
    responses; where it is not, there is a pass for each response. Call it inside
    `scoring_session`. Source: section "Adaptive semantic weighting" of the paper.

    Raises:
        ValueError: an empty response, an empty prompt, a sequence beyond the context window, or a
            model of one layer.

    Example:
        >>> from lm_polygraph_asmi.model import scoring_session
        >>> with scoring_session(model):
        ...     response_embeddings(model, ids[:6], [[7, 8], [9]]).shape
        torch.Size([2, 16])
    """
    layer = num_layers(model) // 2
    if layer == 0:
        raise ValueError("response embeddings need at least two layers, got one")
    ids = [torch.tensor(response, dtype=torch.long) for response in responses]
    for response in ids:
        validate_sequence(model, torch.cat([prompt_ids.cpu(), response]), len(prompt_ids))
    if not ids:
        raise ValueError("expected at least one response to embed, got none")
    prompt, lengths = len(prompt_ids), [len(response) for response in ids]
    shortest, longest = prompt + min(lengths), prompt + max(lengths)
    extent = Extent(
        prompt=prompt,
        response=max(lengths),
        keys=longest,
        rows=min(2, len(ids)),  # two are tried
        regime=regimes(model, prompt, shortest, longest),
        special=specials(model, prompt_ids, *ids),
    )
    separate = record_of(model, "shared prompt").ask(
        extent, partial(_not_shared, model, layer, prompt_ids, ids)
    )
    return (_one_by_one if separate else _behind_one_prompt)(model, layer, prompt_ids, ids)


def _not_shared(
    model: PreTrainedModel, layer: int, prompt_ids: Tensor, responses: list[Tensor]
) -> str | None:
    """How embeddings behind a shared prompt differ from those of separate passes; None if not."""
    if has_foreign_code(model):
        return "hooks or forward methods of others may do another thing behind a cache"
    # Two of other lengths, behind more of a prompt than any response is long.
    tried = sorted(responses, key=len)[:: max(1, len(responses) - 1)]
    expected = _one_by_one(model, layer, prompt_ids, tried)
    try:
        found = _behind_one_prompt(model, layer, prompt_ids, tried)
    except (
        RuntimeError, ValueError, TypeError, AttributeError, IndexError, NotImplementedError
    ) as error:  # fmt: skip
        return f"{type(error).__name__}: {error}"
    rounding = 1e-4 if lowest_precision(model).itemsize >= 4 else 0.05
    lengths = expected.norm(dim=-1)
    apart = (found - expected).norm(dim=-1)
    if bool((apart <= rounding * lengths).all()):
        return None
    return f"embeddings of length {lengths.max():.2g} are {apart.max():.2g} apart"


def _one_by_one(
    model: PreTrainedModel, layer: int, prompt_ids: Tensor, responses: list[Tensor]
) -> Float[Tensor, "N D"]:
    device = execution_device(model.get_input_embeddings())
    rows = []
    for response in responses:
        tokens = torch.cat([prompt_ids.cpu(), response])[None].to(device)
        hidden = states_entering(model, layer, input_ids=tokens, use_cache=False)
        if hidden.shape[:2] != tokens.shape:
            raise ValueError(
                f"{type(model).__name__} keeps hidden states of shape {tuple(hidden.shape)}: a "
                "response has no single embedding there, and Adapt-ASMI is not defined"
            )
        rows.append(hidden[0, -1].float())
    return torch.stack(rows)


def _behind_one_prompt(
    model: PreTrainedModel, layer: int, prompt_ids: Tensor, ids: list[Tensor]
) -> Float[Tensor, "N D"]:
    lengths = torch.tensor([len(response) for response in ids])
    # Right padding needs no mask: under causal attention no token sees what follows it.
    tokens = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    # A plain cache keeps the whole prompt; sliding windows are then imposed by the mask alone.
    cache = DynamicCache()
    device = execution_device(model.get_input_embeddings())
    given = {**with_cache(base_model(model), cache), "use_cache": True}
    states_entering(model, layer, input_ids=prompt_ids[None].to(device), **given)
    cache.batch_repeat_interleave(len(ids))
    hidden = states_entering(model, layer, input_ids=tokens.to(device), **given)
    rows = torch.arange(len(ids), device=hidden.device)
    return hidden[rows, (lengths - 1).to(hidden.device)].float()
