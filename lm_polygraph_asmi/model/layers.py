"""Modules and sizes of a model, by its structure and public transformers calls.

A model may be split over devices or partly offloaded (`device_map`). Then accelerate's hooks move a
module's weights and inputs to its device at each call. So modules are only called. Functions that
read weights (`execution_device`, `unembedding`, the readout) have them fetched first.
"""

from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import align_module_device
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from lm_polygraph_asmi.config import target_layer as target_layer
from lm_polygraph_asmi.model.structure import (
    HeadSite,
    layers_of,
    output_embeddings,
    structure_of,
)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    return layers_of(model, structure_of(model))


def head_site(model: PreTrainedModel, layer: int) -> HeadSite:
    """Where the heads of a layer are.

    Raises:
        ValueError: a layer without attention heads.
    """
    sites = structure_of(model).sites
    if layer not in sites:
        raise ValueError(
            f"layer {layer} of {type(model).__name__} has no attention heads; layers with heads: "
            f"{', '.join(map(str, sites))}"
        )
    return sites[layer]


def output_projection(model: PreTrainedModel, layer: int) -> nn.Module:
    """The projection whose input is a layer's concatenated head outputs."""
    return decoder_layers(model)[layer].get_submodule(head_site(model, layer).projection)


def attention_module(model: PreTrainedModel, layer: int) -> nn.Module | None:
    """The module that returns the output of the output projection; None if there is none."""
    path = head_site(model, layer).attention
    return None if path is None else decoder_layers(model)[layer].get_submodule(path)


def query_projection(model: PreTrainedModel, layer: int) -> nn.Module | None:
    """The projection that computes only queries; None if it also computes keys."""
    return getattr(attention_module(model, layer), "q_proj", None)


def base_model(model: PreTrainedModel) -> nn.Module:
    """The module whose first output is the final states, the input of the unembedding."""
    return model.get_submodule(structure_of(model).base_model)


def final_norm(model: PreTrainedModel) -> nn.Module:
    """The module between the last layer and the final states."""
    path = structure_of(model).final_norm
    return nn.Identity() if path is None else model.get_submodule(path)


def num_layers(model: PreTrainedModel) -> int:
    """L, the number of decoder layers, with heads or without.

    Example:
        >>> num_layers(model)
        4
    """
    return structure_of(model).num_layers


def num_heads(model: PreTrainedModel, layer: int | None = None) -> int:
    """H, the number of query heads of a layer; with grouped queries these are the masked heads.

    Without `layer`, that of the first layer that has heads (in most models, of every layer).

    Example:
        >>> num_heads(model)
        4
    """
    sites = structure_of(model).sites
    return (next(iter(sites.values())) if layer is None else head_site(model, layer)).heads


def heads_width(model: PreTrainedModel, layer: int | None = None) -> int:
    """Width of the concatenated head outputs of a layer, the largest of all without `layer`."""
    if layer is None:
        return max(site.width for site in structure_of(model).sites.values())
    return head_site(model, layer).width


def context_window(model: PreTrainedModel) -> int | None:
    """Longest sequence in tokens that the model's positions cover; None if not configured."""
    return window_of(model.config)


def window_of(config: PretrainedConfig) -> int | None:
    """`context_window` of a model with this configuration."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


@dataclass(frozen=True)
class Depth:
    """The layer at a relative depth of a model.

    Attributes:
        requested: index (from 0) of the layer at that depth.
        layer: index of the nearest layer that has heads (of two, the lower); the masked layer.
    """

    requested: int
    layer: int


def layer_at(model: PreTrainedModel, depth: float) -> Depth:
    """The layer to mask at a relative depth; in hybrid models the nearest one that has heads.

    Raises:
        ValueError: depth outside (0, 1).

    Example:
        >>> layer_at(model, 0.6)
        Depth(requested=2, layer=2)
    """
    structure = structure_of(model)
    requested = target_layer(depth, structure.num_layers)
    nearest = min(structure.sites, key=lambda layer: (abs(layer - requested), layer))
    return Depth(requested, nearest)


def unembedding(model: PreTrainedModel) -> Float[Tensor, "V D"]:
    """The output projection W_lm, one row per token, on the device where it computes.

    With a LoRA adapter the rows are W_lm + scaling B A, as if merged.

    Raises:
        TypeError: a quantised output projection, whose rows are not plain numbers, or an adapter
            of another kind.

    Example:
        >>> unembedding(model).shape
        torch.Size([50, 16])
    """
    projection: Any = output_embeddings(model)
    with align_module_device(projection):  # the reference keeps fetched weights alive
        weight = getattr(projection, "weight", None)
    # Eight-bit floats come with scales, and some kinds of quantisation have no `weight` at all.
    if weight is None or not weight.is_floating_point() or weight.dtype.itemsize == 1:
        kind = type(projection).__name__ if weight is None else weight.dtype
        raise TypeError(
            f"the output projection is quantised ({kind}); semantic agreement needs its "
            "rows: leave lm_head out of the quantisation (the usual default)"
        )
    with torch.no_grad():
        for adapter in _acting_adapters(projection):
            weight = weight + _lora_delta(projection, adapter).to(weight)
    return weight.detach()


def _acting_adapters(projection: Any) -> list[str]:
    """Active PEFT adapters that are not merged into `projection.weight`."""
    if not hasattr(type(projection), "_disable_adapters") or projection.disable_adapters:
        return []
    if hasattr(projection, "modules_to_save"):  # a copy, which acts as a whole
        return []
    merged = getattr(projection, "merged_adapters", [])
    return [name for name in projection.active_adapters if name not in merged]


def _lora_delta(layer: Any, adapter: str) -> Float[Tensor, "V D"]:
    down, up = (getattr(layer, part, {}) for part in ("lora_A", "lora_B"))
    is_lora = set(getattr(layer, "adapter_layer_names", ())) <= {
        "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B",
    }  # fmt: skip
    if adapter not in down:
        # A LoRA adapter of other layers. Other methods have attributes of other names.
        if is_lora:
            return torch.zeros(())
    elif adapter not in getattr(layer, "lora_variant", {}):
        with align_module_device(up[adapter]), align_module_device(down[adapter]):
            product = up[adapter].weight.float() @ down[adapter].weight.float()
        return product * layer.scaling[adapter]
    raise TypeError(
        f"adapter {adapter!r} changes the output projection in a way that is not W + B A "
        f"({type(layer).__name__}); semantic agreement needs its rows: merge the adapter first "
        "(merge_and_unload)"
    )
