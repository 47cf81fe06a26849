"""What a mask changes at the target layer; all passes above it are the same whatever it is.

An edit gets the input of the output projection, the concatenated head outputs, one batch row per
mask, and the positions they belong to, and returns what the projection is to get instead. Another
arm is another function of that kind.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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

Edit = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(head outputs (B or 1, n, W), masks (B, H), positions (n,)) -> head outputs (B, n, W)."""


def without_heads(
    heads: Float[Tensor, "_ n W"], masks: Shaped[Tensor, "B H"], _: Int[Tensor, " n"]
) -> Float[Tensor, "B n W"]:
    """The method's own: a masked head's outputs are zero, without rescaling the rest.

    Where a gate multiplies head outputs before the projection, what is masked is the gated output,
    a head's whole contribution to the projection.
    """
    mask = masks.to(heads).repeat_interleave(heads.shape[-1] // masks.shape[-1], dim=-1)
    return heads * mask[:, None, :]


@contextmanager
def perturbed(
    model: PreTrainedModel,
    layer: int,
    masks: Shaped[Tensor, "B H"],
    positions: Int[Tensor, " n"],
    edit: Edit = without_heads,
    before: int = 0,
) -> Iterator[None]:
    """Let the model itself run with its heads masked at some positions of a layer.

    Batch row b has mask b. `positions` are places in the sequence as it is called, behind `before`
    others that a cache holds; an edit is told places in the whole. A projection that several layers
    share is edited only inside the target layer.
    """
    inside: list[bool] = []

    def enter(*_: Any) -> None:
        inside.append(True)

    def leave(*_: Any) -> None:
        inside.clear()

    def hook(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if not inside:
            return None
        heads, *others = args
        edited = heads.reshape(len(masks), -1, heads.shape[-1]).clone()
        places = positions.to(heads.device)
        edited[:, places] = edit(edited[:, places], masks, positions + before)
        return (edited.reshape(heads.shape), *others)

    module = decoder_layers(model)[layer]
    with ExitStack() as hooks:
        for handle in (
            module.register_forward_pre_hook(enter),
            module.register_forward_hook(leave, always_call=True),
            # Last in line: a mask applies to what the projection gets in the end.
            output_projection(model, layer).register_forward_pre_hook(hook),
        ):
            hooks.callback(handle.remove)
        yield


def perturbed_layer(
    model: PreTrainedModel,
    unmasked: UnmaskedPass,
    layer: int,
    masks: Shaped[Tensor, "B H"],
    positions: slice,
    edit: Edit = without_heads,
) -> Float[Tensor, "B n D"]:
    """What the target layer returns at some positions under each mask.

    Its attention is that of the unmasked pass, and nothing in the layer that follows mixes
    positions. (Under parallel residuals the layer's MLP is the same for all masks too; it is run
    for each.)
    """
    target, module = unmasked.targets[layer], decoder_layers(model)[layer]
    attention, site = attention_module(model, layer), head_site(model, layer)
    places = torch.arange(target.heads.shape[1])[positions]
    if attention is None:
        # No module returns what the projection does: the attention is run, for all positions.
        hidden = target.hidden.expand(len(masks), -1, -1)
        with perturbed(model, layer, masks, places, edit):
            return unmasked.calls[layer].replay(module, hidden)[:, positions]
    heads = target.heads[:, positions]
    projection = output_projection(model, layer)
    masking = projection.register_forward_pre_hook(lambda *_: (edit(heads, masks, places),))

    def attend(*_: Any, **__: Any) -> Any:
        projected = projection(heads)
        return (projected, *[None] * (site.returns - 1)) if site.returns else projected

    try:
        with replaced_forward(attention, attend):
            hidden = target.hidden[:, positions].expand(len(masks), -1, -1)
            return unmasked.calls[layer].replay(module, hidden, positions)
    finally:
        masking.remove()
