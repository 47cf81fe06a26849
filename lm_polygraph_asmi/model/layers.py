"""Modules and sizes of a model, by its structure and public transformers calls.

A model may be split over devices, or part of it offloaded (`device_map`). Then accelerate's hooks
fetch a module's weights and inputs to the device it executes on whenever it is called, so modules
are called, never reached into. The functions that do look at weights (`execution_device`,
`unembedding`, the readout) have them fetched first.
"""

from dataclasses import dataclass

from accelerate.utils import align_module_device
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from lm_polygraph_asmi.model.structure import HeadSite, structure_of
from lm_polygraph_asmi.validation import target_layer as target_layer


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    layers = model.get_submodule(structure_of(model).layers)
    assert isinstance(layers, nn.ModuleList)
    return layers


def head_site(model: PreTrainedModel, layer: int) -> HeadSite:
    """Where the heads of a layer are.

    Raises:
        ValueError: a layer without attention heads.
    """
    found = structure_of(model)
    if layer not in found.sites:
        raise ValueError(
            f"layer {layer} of {type(model).__name__} has no attention heads; layers with heads: "
            f"{', '.join(map(str, found.sites))}"
        )
    return found.sites[layer]


def output_projection(model: PreTrainedModel, layer: int) -> nn.Module:
    """The projection whose input is a layer's concatenated head outputs."""
    return decoder_layers(model)[layer].get_submodule(head_site(model, layer).projection)


def attention_module(model: PreTrainedModel, layer: int) -> nn.Module | None:
    """The module that returns what the output projection returns; None where there is none."""
    path = head_site(model, layer).attention
    return None if path is None else decoder_layers(model)[layer].get_submodule(path)


def query_projection(model: PreTrainedModel, layer: int) -> nn.Module | None:
    """The projection that makes queries alone; None where one projection makes keys as well."""
    return getattr(attention_module(model, layer), "q_proj", None)


def trunk(model: PreTrainedModel) -> nn.Module:
    """The module whose first output is the final states, what logits are made of."""
    return model.get_submodule(structure_of(model).trunk)


def final_norm(model: PreTrainedModel) -> nn.Module:
    """What stands between the last layer and the final states."""
    path = structure_of(model).final_norm
    return nn.Identity() if path is None else model.get_submodule(path)


def num_layers(model: PreTrainedModel) -> int:
    """L, the number of decoder layers, with heads or without."""
    return structure_of(model).num_layers


def num_heads(model: PreTrainedModel, layer: int | None = None) -> int:
    """H, the number of query heads of a layer; under grouped queries these are what is masked.

    Without `layer`, that of the first layer that has heads; most models have one number throughout.
    """
    sites = structure_of(model).sites
    return (next(iter(sites.values())) if layer is None else head_site(model, layer)).heads


def heads_width(model: PreTrainedModel, layer: int | None = None) -> int:
    """Width of the concatenated head outputs of a layer, the largest of all without `layer`."""
    if layer is None:
        return max(site.width for site in structure_of(model).sites.values())
    return head_site(model, layer).width


def context_window(model: PreTrainedModel) -> int | None:
    """Longest sequence in tokens that the model's positions cover; None where it states none."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


@dataclass(frozen=True)
class Depth:
    """The layer that a relative depth means in a model.

    Attributes:
        requested: index (from 0) of the layer at that depth.
        layer: index of the nearest layer that has heads, the lower of two; what is masked.
    """

    requested: int
    layer: int


def layer_at(model: PreTrainedModel, depth: float) -> Depth:
    """The layer to mask at a relative depth: in hybrids the nearest one that has heads.

    Raises:
        ValueError: depth outside (0, 1).
    """
    found = structure_of(model)
    requested = target_layer(depth, found.num_layers)
    nearest = min(found.sites, key=lambda layer: (abs(layer - requested), layer))
    return Depth(requested, nearest)


def unembedding(model: PreTrainedModel) -> Float[Tensor, "V D"]:
    """The output projection W_lm, one row per token, on the device where it computes.

    Raises:
        TypeError: a quantised output projection, whose rows are not plain numbers.
    """
    projection = model.get_output_embeddings()
    with align_module_device(projection):  # fetched weights live on while they are referred to
        weight = getattr(projection, "weight", None)
    # Eight-bit floats come with scales, and some kinds of quantisation have no `weight` at all.
    if weight is None or not weight.is_floating_point() or weight.dtype.itemsize == 1:
        kind = type(projection).__name__ if weight is None else weight.dtype
        raise TypeError(
            f"the output projection is quantised ({kind}); semantic agreement needs its "
            "rows: leave lm_head out of the quantisation (the usual default)"
        )
    return weight.detach()
