"""The masked passes: the layers from the target layer on, under head masks, in either scope.

Several strategies give the same numbers, from the cheapest to the most general. `check` compares
them with full forward passes and selects one for a model, scope and attention implementation.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from transformers import PreTrainedModel

from lm_polygraph_asmi.model.devices import execution_device
from lm_polygraph_asmi.model.layer_call import MASKABLE, cache_of, replaced_forward, with_cache
from lm_polygraph_asmi.model.layers import (
    base_model,
    decoder_layers,
    final_norm,
    heads_width,
    num_layers,
    query_projection,
)
from lm_polygraph_asmi.model.masking import masked_heads, masked_layer
from lm_polygraph_asmi.model.memory import batch_bytes, packed_bytes, rows_bytes
from lm_polygraph_asmi.model.model_cache import has_foreign_code
from lm_polygraph_asmi.model.session import attention_of
from lm_polygraph_asmi.model.structure import states_of, structure_of
from lm_polygraph_asmi.model.unmasked import UnmaskedPass


@contextmanager
def without_queries(model: PreTrainedModel, layer: int) -> Iterator[None]:
    """Skip the query projection where only keys and values are needed; queries are zeros."""
    projection = query_projection(model, layer)
    if projection is None:
        yield
        return
    width = getattr(projection, "out_features", heads_width(model, layer))
    with replaced_forward(projection, lambda x, *_: x.new_zeros(()).expand(*x.shape[:-1], width)):
        yield


def masked_everywhere(
    model: PreTrainedModel,
    unmasked: UnmaskedPass,
    layer: int,
    masks: Shaped[Tensor, "B H"],
) -> Float[Tensor, "B T D"]:
    """Final states, heads masked at every position; the layers above are called again one by one.

    The last layer computes keys and values at all positions, and the rest only at the T predicting
    positions. If it keeps no keys and values, it runs at all positions.
    """
    last = num_layers(model) - 1
    if layer == last:
        hidden = masked_layer(model, unmasked, layer, masks, unmasked.predicting)
        return final_norm(model)(hidden)
    hidden = masked_layer(model, unmasked, layer, masks, slice(None))
    for index in range(layer + 1, last):
        hidden = unmasked.calls[index].replay(decoder_layers(model)[index], hidden)
    call, module = unmasked.calls[last], decoder_layers(model)[last]
    before, predicting = unmasked.before, unmasked.predicting
    keeps_keys = last in structure_of(model).sites and call.keeps_keys
    if before.stop == 0 or not keeps_keys or attention_of(model) not in MASKABLE:
        return final_norm(model)(call.replay(module, hidden)[:, predicting])
    with without_queries(model, last):
        past = call.keys_values(module, hidden[:, before], before)
    hidden = call.replay_after(
        module, hidden[:, predicting], past, predicting, call.allowed(predicting)
    )
    return final_norm(model)(hidden)


def masked_layer_by_layer(
    model: PreTrainedModel,
    unmasked: UnmaskedPass,
    layer: int,
    masks: Shaped[Tensor, "B H"],
) -> Float[Tensor, "B T D"]:
    """As `masked_everywhere`, but every layer runs at all positions, with arguments for each row.

    For layers that need a mask or angles for every row of a batch, or that keep more than keys and
    values.
    """
    hidden = masked_layer(model, unmasked, layer, masks, slice(None))
    for index in range(layer + 1, num_layers(model)):
        module = decoder_layers(model)[index]
        hidden = unmasked.calls[index].replay(module, hidden, per_row=True)
    return final_norm(model)(hidden[:, unmasked.predicting])


def masked_in_response(
    model: PreTrainedModel,
    unmasked: UnmaskedPass,
    layer: int,
    masks: Shaped[Tensor, "B H"],
) -> Float[Tensor, "B T D"]:
    """Final states, heads masked only at the response positions, all masks in one sequence.

    Earlier keys and values are those of the unmasked pass. The B subnetworks follow them one after
    another in a single sequence and do not attend to each other.
    """
    hidden = masked_layer(model, unmasked, layer, masks, unmasked.predicting)
    copies, length, width = hidden.shape
    hidden = hidden.reshape(1, copies * length, width)
    predicting = unmasked.predicting
    places = torch.arange(predicting.start, predicting.stop).repeat(copies)
    packed: dict[int, Tensor] = {}
    for index in range(layer + 1, num_layers(model)):
        call = unmasked.calls[index]
        # Layers of one kind (full attention, sliding window) share one mask.
        kind = id(call.arguments.get("attention_mask"))
        if kind not in packed:
            allowed = call.allowed(predicting)
            prompt, response = allowed.split([unmasked.before.stop, length], dim=1)
            packed[kind] = torch.cat(
                [prompt.repeat(copies, 1), torch.block_diag(*[response] * copies)], dim=1
            )
        hidden = call.replay_after(
            decoder_layers(model)[index], hidden, unmasked.keys_values[index], places, packed[kind]
        )
    return final_norm(model)(hidden.reshape(copies, length, width))


def full_forward_passes(
    model: PreTrainedModel,
    unmasked: UnmaskedPass,
    layer: int,
    masks: Shaped[Tensor, "B H"],
) -> Float[Tensor, "B T D"]:
    """Final states of full forward passes, masks as rows of a batch, through the model's own
    forward.

    The simplest strategy; all others are compared with it.
    """
    places = torch.arange(unmasked.predicting.stop)
    if unmasked.scope == "response":
        places = places[unmasked.predicting]
    device = execution_device(model.get_input_embeddings())
    tokens = unmasked.input_ids[None, :-1].expand(len(masks), -1).to(device)
    with masked_heads(model, layer, masks, places):
        output = base_model(model)(input_ids=tokens, use_cache=False)
    return states_of(output)[:, unmasked.predicting]


def _cache_of_rows(cache: Any, rows: int, device: torch.device) -> Any:
    """A copy of a single sequence's cache for each row of a batch.

    Raises:
        NotImplementedError: the model keeps no cache.
    """
    if cache is None:
        raise NotImplementedError("the model keeps no cache")
    copied = copy.deepcopy(cache)
    copied.reorder_cache(torch.zeros(rows, dtype=torch.long, device=device))
    return copied


def rows_after_prompt(
    model: PreTrainedModel,
    unmasked: UnmaskedPass,
    layer: int,
    masks: Shaped[Tensor, "B H"],
) -> Float[Tensor, "B T D"]:
    """Final states of a pass over the response positions, with the model's cache of the prompt.

    The model's own cache (keys and values, recurrent states) is copied for every mask, as in
    generation, and the masks are rows of a batch.
    """
    device = execution_device(model.get_input_embeddings())
    tokens, predicting = unmasked.input_ids[None].to(device), unmasked.predicting
    if predicting.start and not unmasked.prompt_caches:
        output = base_model(model)(input_ids=tokens[:, unmasked.before], use_cache=True)
        unmasked.prompt_caches.append(cache_of(output))
    cache = None
    if predicting.start:
        cache = _cache_of_rows(unmasked.prompt_caches[0], len(masks), device)
    rows = tokens[:, predicting].expand(len(masks), -1)
    places = torch.arange(predicting.start, predicting.stop)
    with masked_heads(model, layer, masks, places, before=predicting.start):
        base = base_model(model)
        return states_of(base(input_ids=rows, **with_cache(base, cache), use_cache=True))


Run = Callable[[PreTrainedModel, UnmaskedPass, int, Tensor], Tensor]


@dataclass(frozen=True)
class Strategy:
    """One way to run subnetworks.

    Attributes:
        name: what it does, for messages.
        scope: the scope it supports.
        run: final states (B, T, D) of the subnetworks of masks (B, H).
        bytes_of: peak memory in bytes for a number of masks.
        packed: whether all masks are in a single sequence.
        replays: whether it calls layers again one by one.
        full_forward: whether it runs full forward passes of the model.
        one_mask: whether masks are run one at a time, so that rows cannot affect each other.
    """

    name: str
    scope: str
    run: Run
    bytes_of: Callable[[PreTrainedModel, UnmaskedPass, int], int]
    packed: bool = False
    replays: bool = False
    full_forward: bool = False
    one_mask: bool = False


def _bytes_of_batch(model: PreTrainedModel, unmasked: UnmaskedPass, masks: int) -> int:
    return batch_bytes(model, masks, unmasked.predicting.stop)


def _bytes_of_packed(model: PreTrainedModel, unmasked: UnmaskedPass, masks: int) -> int:
    return packed_bytes(model, masks, len(unmasked.final_hidden), unmasked.before.stop)


def _bytes_of_rows(model: PreTrainedModel, unmasked: UnmaskedPass, masks: int) -> int:
    return rows_bytes(model, masks, len(unmasked.final_hidden), unmasked.before.stop)


def _full_forward(scope: str, one_mask: bool = False) -> Strategy:
    name = "full forward passes" + ", one mask at a time" * one_mask
    return Strategy(
        name, scope, full_forward_passes, _bytes_of_batch, full_forward=True, one_mask=one_mask
    )


STRATEGIES = (
    Strategy("suffix replay", "all", masked_everywhere, _bytes_of_batch, replays=True),
    Strategy("suffix replay at all positions", "all", masked_layer_by_layer, _bytes_of_batch,
             replays=True),
    _full_forward("all"),
    _full_forward("all", one_mask=True),
    Strategy("packed sequence", "response", masked_in_response, _bytes_of_packed, packed=True,
             replays=True),
    Strategy("batch on the prompt cache", "response", rows_after_prompt, _bytes_of_rows),
    _full_forward("response"),
    _full_forward("response", one_mask=True),
)  # fmt: skip
"""Cheapest first in each scope."""


def strategies(model: PreTrainedModel, unmasked: UnmaskedPass, layer: int) -> Iterator[Strategy]:
    """Strategies that can run from an unmasked pass, cheapest first."""
    above = range(layer + 1, num_layers(model))
    for strategy in STRATEGIES:
        if strategy.scope != unmasked.scope or (
            strategy.replays and not structure_of(model).chained
        ):
            continue
        if not strategy.full_forward and has_foreign_code(model):
            continue
        if strategy.packed and (
            unmasked.by_length or not all(index in unmasked.keys_values for index in above)
        ):
            continue
        yield strategy


def run_suffix(
    model: PreTrainedModel,
    unmasked: UnmaskedPass,
    layer: int,
    masks: Shaped[Tensor, "B H"],
    strategy: Strategy | None = None,
) -> Float[Tensor, "B T D"]:
    """Final states at the response positions, all masks in one pass, by default the cheapest."""
    strategy = strategy or next(strategies(model, unmasked, layer))
    return strategy.run(model, unmasked, layer, masks)
