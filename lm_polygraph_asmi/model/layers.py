"""Modules and sizes of a model, by its structure.

A model may be split over devices or partly offloaded (`device_map`). Then accelerate's hooks move a
module's weights and inputs to its device at each call. So modules are only called. Functions that
read weights (`execution_device`, `unembedding`, the readout) have them fetched first.
"""

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from lm_polygraph_asmi.config import target_layer as target_layer
from lm_polygraph_asmi.model.heads import structure_of


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    return list(model.get_submodule(structure_of(model).layers).children())


def output_projection(model: PreTrainedModel, layer: int) -> nn.Module:
    """The projection whose input is a layer's concatenated head outputs; see `num_heads`."""
    num_heads(model, layer)  # raises for a layer without heads
    return decoder_layers(model)[layer].get_submodule(structure_of(model).projections[layer])


def base_model(model: PreTrainedModel) -> nn.Module:
    """The module whose first output is the final states, the input of the unembedding."""
    return model.get_submodule(structure_of(model).base_model)


def num_layers(model: PreTrainedModel) -> int:
    """L, the number of decoder layers, with heads or without."""
    return structure_of(model).num_layers


def num_heads(model: PreTrainedModel, layer: int | None = None) -> int:
    """H, the number of query heads of a layer (with grouped queries, too); by default of the first
    that has heads. Raises ValueError: no such layer, or one without heads."""
    structure = structure_of(model)
    if layer is None:
        return next(iter(structure.heads.values()))
    if not 0 <= layer < structure.num_layers:
        raise ValueError(
            f"layer must be in [0, {structure.num_layers - 1}] for a {structure.num_layers}-layer "
            f"model, got {layer}"
        )
    if layer not in structure.heads:
        raise ValueError(
            f"layer {layer} of {type(model).__name__} has no attention heads; layers with heads: "
            f"{', '.join(map(str, structure.heads))}"
        )
    return structure.heads[layer]


def context_window(model: PreTrainedModel) -> int | None:
    """Longest sequence in tokens that the model's positions cover; None if not configured."""
    return window_of(model.config)


def window_of(config: PretrainedConfig) -> int | None:
    """`context_window` of a model with this configuration."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def layer_at(model: PreTrainedModel, depth: float) -> int:
    """The layer to mask at a relative depth: the nearest one that has heads, of two the lower.
    Raises ValueError: depth outside (0, 1)."""
    structure = structure_of(model)
    requested = target_layer(depth, structure.num_layers)
    return min(structure.heads, key=lambda layer: (abs(layer - requested), layer))
