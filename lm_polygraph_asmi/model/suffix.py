"""The masked passes: the layers from the target layer on, under head masks, in either scope."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from transformers import PreTrainedModel

from lm_polygraph_asmi.model.layer_call import MASKABLE, replaced_forward
from lm_polygraph_asmi.model.layers import (
    attention_module,
    decoder_layers,
    final_norm,
    heads_width,
    num_layers,
    output_projection,
    query_projection,
)
from lm_polygraph_asmi.model.session import attention_of
from lm_polygraph_asmi.model.unmasked import UnmaskedPass


def masked_layer(
    model: PreTrainedModel,
    unmasked: UnmaskedPass,
    layer: int,
    masks: Shaped[Tensor, "B H"],
    positions: slice,
) -> Float[Tensor, "B n D"]:
    """What the target layer returns at some positions under each mask.

    Its attention is that of the unmasked pass: a mask multiplies the head outputs before the
    output projection, without rescaling, and nothing in the layer that follows mixes positions.
    (Under parallel residuals the layer's MLP is the same for all masks too; it is run for each.)
    """
    target, module = unmasked.targets[layer], decoder_layers(model)[layer]
    heads = target.heads[:, positions]
    mask = masks.to(heads).repeat_interleave(heads.shape[-1] // masks.shape[-1], dim=-1)
    projection = output_projection(model, layer)
    masking = projection.register_forward_pre_hook(lambda *_: (heads * mask[:, None, :],))

    def attention(*_: Any, **__: Any) -> tuple[Tensor, None]:
        return projection(heads), None

    try:
        with replaced_forward(attention_module(model, layer), attention):
            hidden = target.hidden[:, positions].expand(len(masks), -1, -1)
            return unmasked.calls[layer].replay(module, hidden)
    finally:
        masking.remove()


@contextmanager
def without_queries(model: PreTrainedModel, layer: int) -> Iterator[None]:
    """Spare the queries where only keys and values are wanted; they are zeros meanwhile."""
    projection = query_projection(model, layer)
    if projection is None:
        yield
        return
    width = heads_width(model)
    with replaced_forward(projection, lambda x: x.new_zeros(()).expand(*x.shape[:-1], width)):
        yield


def masked_everywhere(
    model: PreTrainedModel, unmasked: UnmaskedPass, layer: int, masks: Shaped[Tensor, "B H"]
) -> Float[Tensor, "B T D"]:
    """Last layer's output at the response positions, heads masked at every position.

    The last layer makes keys and values at all positions and does the rest at T of them.
    """
    last = num_layers(model) - 1
    if layer == last:
        return masked_layer(model, unmasked, layer, masks, unmasked.predicting)
    hidden = masked_layer(model, unmasked, layer, masks, slice(None))
    for index in range(layer + 1, last):
        hidden = unmasked.calls[index].replay(decoder_layers(model)[index], hidden)
    call, module = unmasked.calls[last], decoder_layers(model)[last]
    before, predicting = unmasked.before, unmasked.predicting
    if before.stop == 0 or attention_of(model) not in MASKABLE:
        return call.replay(module, hidden)[:, predicting]
    with without_queries(model, last):
        past = call.keys_values(module, hidden[:, before], before)
    return call.replay_after(
        module, hidden[:, predicting], past, predicting, call.allowed(predicting)
    )


def masked_in_response(
    model: PreTrainedModel, unmasked: UnmaskedPass, layer: int, masks: Shaped[Tensor, "B H"]
) -> Float[Tensor, "B T D"]:
    """Last layer's output at the response positions, heads masked at these positions alone.

    Keys and values before them are those of the unmasked pass, so the B subnetworks stand behind
    one another in a single sequence after them, each blind to the others.
    """
    hidden = masked_layer(model, unmasked, layer, masks, unmasked.predicting)
    copies, length, width = hidden.shape
    hidden = hidden.reshape(1, copies * length, width)
    places = torch.arange(unmasked.predicting.start, unmasked.predicting.stop).repeat(copies)
    packed: dict[int, Tensor] = {}
    for index in range(layer + 1, num_layers(model)):
        call = unmasked.calls[index]
        # Layers of one kind (full attention, sliding window) were given one mask between them.
        kind = id(call.arguments.get("attention_mask"))
        if kind not in packed:
            allowed = call.allowed(unmasked.predicting)
            known, own = allowed.split([unmasked.before.stop, length], dim=1)
            packed[kind] = torch.cat(
                [known.repeat(copies, 1), torch.block_diag(*[own] * copies)], dim=1
            )
        hidden = call.replay_after(
            decoder_layers(model)[index], hidden, unmasked.known[index], places, packed[kind]
        )
    return hidden.reshape(copies, length, width)


def run_suffix(
    model: PreTrainedModel, unmasked: UnmaskedPass, layer: int, masks: Shaped[Tensor, "B H"]
) -> Float[Tensor, "B T D"]:
    """States after the final norm at the response positions, all masks in one pass."""
    run = masked_in_response if unmasked.scope == "response" else masked_everywhere
    return final_norm(model)(run(model, unmasked, layer, masks))
