"""Embeddings of sampled responses: the model's own hidden state at their final token."""

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from lm_polygraph_asmi.model.check import Extent, checks_of, own_bug, regimes, specials
from lm_polygraph_asmi.model.devices import execution_device, lowest_precision
from lm_polygraph_asmi.model.layer_call import LayerCall, Reached, with_cache
from lm_polygraph_asmi.model.layers import base_model, decoder_layers, num_layers
from lm_polygraph_asmi.model.model_cache import has_foreign_code
from lm_polygraph_asmi.model.unmasked import validate_tokens


def states_entering(model: PreTrainedModel, layer: int, **inputs: object) -> Tensor:
    """hidden_states[layer] of an ordinary pass; the layers above are not run."""

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

    At the prompt's last token for an empty response. Equals one pass per prompt and response. The
    prompt runs once, all responses share its key-value cache, a response that begins another one is
    not run, and neither are the layers above L // 2. This is first compared with separate passes,
    and again for clearly longer or otherwise placed texts. If it differs (recurrent states; angles
    that depend on the length), each response gets a pass. Call it inside `scoring_session`. Source:
    section "Adaptive semantic weighting" of the paper.

    Raises:
        ValueError: an empty prompt, a sequence beyond the context window, or a model of one layer.

    Example:
        >>> from lm_polygraph_asmi.model import scoring_session
        >>> with scoring_session(model):
        ...     response_embeddings(model, ids[:6], [[7, 8], [9]]).shape
        torch.Size([2, 16])
    """
    layer = num_layers(model) // 2
    if layer == 0:
        raise ValueError("response embeddings need at least two layers, got one")
    if not responses:
        raise ValueError("expected at least one response to embed, got none")
    ids, places = _without_prefixes(responses)
    for response in ids:
        validate_tokens(model, torch.cat([prompt_ids.cpu(), response]), len(prompt_ids))
    prompt, lengths = len(prompt_ids), [len(response) for response in ids]
    shortest, longest = prompt + min(lengths), prompt + max(lengths)
    extent = Extent(
        prompt=prompt,
        response=max(lengths),
        keys=longest,
        rows=min(2, len(ids)),  # the check compares up to two
        regime=regimes(model, prompt, shortest, longest),
        special=specials(model, prompt_ids, *ids),
    )
    shared = partial(_shared_prompt_failure, model, layer, prompt_ids, ids)
    right, _ = checks_of(model, "embeddings").select(
        [("shared prompt", extent, shared), ("separate", extent, lambda: None)], extent.kind
    )
    embeddings = _shared_prompt_embeddings if right == "shared prompt" else _separate_embeddings
    return embeddings(model, layer, prompt_ids, ids, places)


def _without_prefixes(
    responses: Sequence[Sequence[int]],
) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """The responses that begin no other one; row there and length of each response."""
    listed = [tuple(response) for response in responses]
    kept: list[tuple[int, ...]] = []
    for ids in sorted(set(listed), key=len, reverse=True):
        if not any(longer[: len(ids)] == ids for longer in kept):
            kept.append(ids)
    rows = [next(i for i, k in enumerate(kept) if k[: len(ids)] == ids) for ids in listed]
    places = [(row, len(ids)) for row, ids in zip(rows, listed, strict=True)]
    return [torch.tensor(ids, dtype=torch.long) for ids in kept], places


def _shared_prompt_failure(
    model: PreTrainedModel, layer: int, prompt_ids: Tensor, responses: list[Tensor]
) -> str | None:
    """How embeddings after a shared prompt differ from those of separate passes; None if not."""
    if has_foreign_code(model):
        return "foreign hooks or forward methods may act differently after a cached prompt"
    compared = sorted(responses, key=len)[:: max(1, len(responses) - 1)]  # shortest and longest
    places = [(row, len(response)) for row, response in enumerate(compared)]
    separate = _separate_embeddings(model, layer, prompt_ids, compared, places)
    try:
        shared = _shared_prompt_embeddings(model, layer, prompt_ids, compared, places)
    except (
        RuntimeError, ValueError, TypeError, AttributeError, IndexError, NotImplementedError
    ) as error:  # fmt: skip
        if own_bug(error):
            raise
        return f"{type(error).__name__}: {error}"
    rounding = 1e-4 if lowest_precision(model).itemsize >= 4 else 0.05
    norms = separate.norm(dim=-1)
    distances = (shared - separate).norm(dim=-1)
    if bool((distances <= rounding * norms).all()):
        return None
    return f"embeddings of norm {norms.max():.2g} differ by {distances.max():.2g}"


def _separate_embeddings(
    model: PreTrainedModel,
    layer: int,
    prompt_ids: Tensor,
    responses: list[Tensor],
    places: Sequence[tuple[int, int]],
) -> Float[Tensor, "N D"]:
    device = execution_device(model.get_input_embeddings())
    rows = []
    for row, length in places:
        tokens = torch.cat([prompt_ids.cpu(), responses[row][:length]])[None].to(device)
        hidden = states_entering(model, layer, input_ids=tokens, use_cache=False)
        if hidden.shape[:2] != tokens.shape:
            raise ValueError(
                f"{type(model).__name__} has hidden states of shape {tuple(hidden.shape)}: a "
                "response has no single embedding, so Adapt-ASMI is not defined"
            )
        rows.append(hidden[0, -1].float())
    return torch.stack(rows)


def _shared_prompt_embeddings(
    model: PreTrainedModel,
    layer: int,
    prompt_ids: Tensor,
    ids: list[Tensor],
    places: Sequence[tuple[int, int]],
) -> Float[Tensor, "N D"]:
    # Right padding needs no mask: with causal attention no token attends to later ones.
    tokens = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    # This cache keeps all prompt positions; only the attention mask imposes sliding windows.
    cache = DynamicCache()
    device = execution_device(model.get_input_embeddings())
    caching = {**with_cache(base_model(model), cache), "use_cache": True}
    after_prompt = states_entering(model, layer, input_ids=prompt_ids[None].to(device), **caching)
    hidden = after_prompt[:, -1:].expand(len(ids), -1, -1)
    if tokens.shape[1]:
        cache.batch_repeat_interleave(len(ids))
        responses = states_entering(model, layer, input_ids=tokens.to(device), **caching)
        if responses.shape[:2] != tokens.shape:
            raise ValueError(
                f"expected states of {tuple(tokens.shape)} tokens behind a cached prompt, got "
                f"{tuple(responses.shape)}"
            )
        hidden = torch.cat([hidden.to(responses.device), responses], dim=1)
    rows, lengths = torch.tensor(places, device=hidden.device).unbind(1)
    return hidden[rows, lengths].float()
