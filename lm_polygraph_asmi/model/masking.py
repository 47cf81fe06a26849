"""Masks of heads at the target layer: the outputs of masked heads are zero before the projection.

The others are not rescaled. If a gate multiplies head outputs before the projection, the gated
outputs are masked. The layers above the target layer always run in the same way.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from transformers import PreTrainedModel

from lm_polygraph_asmi.model.layer_call import replaced_forward
from lm_polygraph_asmi.model.layers import (
    attention_module,
    decoder_layers,
    head_site,
    output_projection,
)
from lm_polygraph_asmi.model.unmasked import UnmaskedPass


def without_heads(
    heads: Float[Tensor, "_ n W"], masks: Shaped[Tensor, "B H"]
) -> Float[Tensor, "B n W"]:
    """Head outputs (B, n, W), or (1, n, W) for all masks, times each channel's mask of its head."""
    width = heads.shape[-1] // masks.shape[-1]
    return heads * masks.to(heads).repeat_interleave(width, dim=-1)[:, None]


@contextmanager
def masked_heads(
    model: PreTrainedModel,
    layer: int,
    masks: Shaped[Tensor, "B H"],
    places: Int[Tensor, " n"],
    before: int = 0,
    heads: Float[Tensor, "1 n W"] | None = None,
) -> Iterator[None]:
    """Let a layer run with masked heads at some positions; batch row b has mask b.

    A projection that several layers share is masked only inside the target layer.

    Args:
        places: those positions, in the full sequence.
        before: number of cached positions before those that the layer is called on.
        heads: head outputs that replace those at `places`; the layer is then called only on these
            positions.
    """
    module = decoder_layers(model)[layer]
    projection = output_projection(model, layer)  # before the hook: looking it up may run a pass
    forward, inside = module.forward, False

    def masked(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if not inside:
            return None
        values, *others = args
        if heads is not None:
            values = without_heads(heads, masks)
        else:
            rows = values.reshape(len(masks), -1, values.shape[-1]).clone()
            positions = (places - before).to(values.device)
            rows[:, positions] = without_heads(rows[:, positions], masks)
            values = rows.reshape(values.shape)
        return (values.contiguous(), *others)  # some projections need contiguous inputs

    def masked_forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        inside = True
        try:
            return forward(*args, **kwargs)
        finally:
            inside = False

    # Last hook: a mask applies to the final input of the projection.
    handle = projection.register_forward_pre_hook(masked)
    try:
        with replaced_forward(module, masked_forward):
            yield
    finally:
        handle.remove()


def masked_layer(
    model: PreTrainedModel,
    unmasked: UnmaskedPass,
    layer: int,
    masks: Shaped[Tensor, "B H"],
    positions: slice,
) -> Float[Tensor, "B n D"]:
    """Output of the target layer at some positions under each mask.

    Its attention is that of the unmasked pass, and the rest of the layer does not mix positions.
    (With parallel residuals the MLP is the same for all masks, but it still runs for each.)

    Example:
        >>> from lm_polygraph_asmi.model import run_unmasked, scoring_session
        >>> with scoring_session(model):
        ...     unmasked = run_unmasked(model, ids, 6, [2])
        ...     masked_layer(model, unmasked, 2, masks, unmasked.predicting).shape  # (B, n, D)
        torch.Size([3, 2, 16])
    """
    target, module = unmasked.targets[layer], decoder_layers(model)[layer]
    attention, site = attention_module(model, layer), head_site(model, layer)
    places = torch.arange(target.heads.shape[1])[positions]
    call = unmasked.calls[layer]
    if attention is None:
        # No module returns the projection's output, so the layer runs at all positions.
        hidden = target.hidden.expand(len(masks), -1, -1)
        with masked_heads(model, layer, masks, places):
            return call.replay(module, hidden)[:, positions]
    heads = target.heads[:, positions]
    projection = output_projection(model, layer)

    def attend(*_: Any, **__: Any) -> Any:
        projected = projection(heads)
        return (projected, *[None] * (site.returns - 1)) if site.returns else projected

    with (
        masked_heads(model, layer, masks, places, heads=heads),
        replaced_forward(attention, attend),
    ):
        hidden = target.hidden[:, positions].expand(len(masks), -1, -1)
        return call.replay(module, hidden, positions)
