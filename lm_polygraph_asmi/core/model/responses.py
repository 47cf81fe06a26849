"""Embeddings of sampled responses: the model's own hidden state at their final token."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from lm_polygraph_asmi.core.model.check import LONGER
from lm_polygraph_asmi.core.model.devices import execution_device
from lm_polygraph_asmi.core.model.foreign import depends_on_place
from lm_polygraph_asmi.core.model.forwards import replaced_forwards
from lm_polygraph_asmi.core.model.layers import states_name, with_cache
from lm_polygraph_asmi.core.model.masked import MaskedModel
from lm_polygraph_asmi.core.model.rounding import EMBEDDING
from lm_polygraph_asmi.core.model.start import returning
from lm_polygraph_asmi.core.model.unmasked import validate_tokens

log = logging.getLogger("lm_polygraph")


def response_embeddings(
    f: MaskedModel,
    prompt_ids: Int[Tensor, " P"],
    responses: Sequence[Sequence[int]],
) -> Float[Tensor, "N D"]:
    """hidden_states[L // 2] (0 = embeddings) at the final token of each of N >= 1 responses, in
    float32.

    Callers cut a response behind the token that is to be embedded (the setting `gate_token`). An
    empty one is embedded at the prompt's last token. Source: section "Adaptive semantic weighting"
    of the paper. Raises ValueError: an empty prompt, a sequence beyond the context window, or a
    model of one layer.
    """
    layer = f.structure.num_layers // 2
    if layer == 0:
        raise ValueError("response embeddings need at least two layers, got one")
    ids = [torch.tensor(response, dtype=torch.long) for response in responses]
    for response in ids:
        validate_tokens(f.model, torch.cat([prompt_ids.cpu(), response]), len(prompt_ids))
    found, cause = _by_one_prompt_pass(f, layer, prompt_ids, ids)
    if found is not None:
        return found
    if cause:
        one_pass = len(prompt_ids) + len(ids) * max(map(len, ids))
        separate = sum(len(prompt_ids) + len(response) for response in ids)
        log.warning(
            "%s: each of %d responses is embedded by a pass of its own, %.1f times the work "
            "(positions): %s", type(f.model).__name__, len(ids), separate / one_pass, cause,
        )  # fmt: skip
    return torch.stack([_embedding(f, layer, prompt_ids, response) for response in ids])


def _by_one_prompt_pass(
    f: MaskedModel, layer: int, prompt_ids: Tensor, ids: list[Tensor]
) -> tuple[Float[Tensor, "N D"] | None, str | None]:
    """Embeddings from one pass of the prompt for all responses, where the model keeps plain keys
    and values. Else None, and why, if a warning is to tell.

    The longest response is compared with a pass of its own, once for each model, and again for a
    text more than `LONGER` times as long. After a difference, the model is not tried again.
    """
    longest = f.kept.setdefault(("embeddings", f.attention), [0])
    if f.structure.passes.get("response") != "packed" or longest[0] is None:
        return None, None
    if depends_on_place(f):
        longest[0] = None
        return None, "code of others does not act on each position alike"
    found = _after_one_prompt(f, layer, prompt_ids, ids)
    at = max(range(len(ids)), key=lambda i: len(ids[i]))
    length = len(prompt_ids) + len(ids[at])
    if length <= LONGER * longest[0]:
        return found, None
    expected = _embedding(f, layer, prompt_ids, ids[at])
    if (found[at] - expected).norm() <= EMBEDDING.of(f.model) * expected.norm():
        longest[0] = length
        return found, None
    longest[0] = None
    return None, "those after one pass of the prompt are wrong"


def _embedding(
    f: MaskedModel, layer: int, prompt_ids: Tensor, response: Tensor
) -> Float[Tensor, " D"]:
    """Embedding of a response, by a pass of its own."""
    tokens = torch.cat([prompt_ids.cpu(), response])[None]
    return _states_entering(f, layer, tokens)[0, -1].float()


def _after_one_prompt(
    f: MaskedModel, layer: int, prompt_ids: Tensor, ids: list[Tensor]
) -> Float[Tensor, "N D"]:
    """Embeddings by a pass of the prompt, and one of all responses after it."""
    # Right padding needs no mask: with causal attention no token attends to later ones.
    tokens = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    cache = DynamicCache()  # keeps all positions; windows are in the attention mask
    after_prompt = _states_entering(f, layer, prompt_ids[None], cache)
    hidden = after_prompt[:, -1:].expand(len(ids), -1, -1)
    if tokens.shape[1]:
        cache.batch_repeat_interleave(len(ids))
        responses = _states_entering(f, layer, tokens, cache)
        hidden = torch.cat([hidden.to(responses.device), responses], dim=1)
    # The prompt's last token comes first, so a response of n tokens ends at index n.
    return hidden[range(len(ids)), [len(response) for response in ids]].float()


def _states_entering(
    f: MaskedModel, layer: int, input_ids: Int[Tensor, "B N"], cache: Any = None
) -> Tensor:
    """hidden_states[layer] of an ordinary pass: what the layer of that index is given. That layer
    and those above return at once."""
    layers, returns = f.layers, f.structure.returns
    entering: list[Tensor] = []
    base, device = f.base, execution_device(f.model.get_input_embeddings())
    caching = {} if cache is None else with_cache(base, cache)

    def keep(given: dict[str, Any]) -> None:
        entering.append(given[states_name(layers[layer])])

    skipped = [returning(layers[i], returns[i], act=keep) for i in range(layer, len(layers))]
    with replaced_forwards(*skipped):
        base(input_ids=input_ids.to(device), use_cache=cache is not None, **caching)
    if entering[0].ndim != 3 or entering[0].shape[:2] != input_ids.shape:
        raise ValueError(
            f"{type(f.model).__name__} has hidden states of shape {tuple(entering[0].shape)}: a "
            "response has no single embedding, so Adapt-ASMI is not defined"
        )
    return entering[0]
