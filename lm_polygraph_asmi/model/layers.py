"""Modules and sizes of a model, found through the family table and public transformers calls.

A model may be split over devices, or part of it offloaded (`device_map`). Then accelerate's hooks
fetch a module's weights and inputs to the device it executes on whenever it is called, so modules
are called, never reached into. The two functions here that do look at weights, `execution_device`
and `unembedding`, have them fetched first.
"""

from itertools import chain

import torch
from accelerate.utils import align_module_device
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from lm_polygraph_asmi.model.families import family_of
from lm_polygraph_asmi.validation import target_layer as target_layer


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    layers = model.get_submodule(family_of(model).layers)
    assert isinstance(layers, nn.ModuleList)
    return layers


def output_projection(model: PreTrainedModel, layer: int) -> nn.Module:
    return decoder_layers(model)[layer].get_submodule(family_of(model).output_projection)


def attention_module(model: PreTrainedModel, layer: int) -> nn.Module:
    """The module that ends in the output projection."""
    path, _, _ = family_of(model).output_projection.rpartition(".")
    return decoder_layers(model)[layer].get_submodule(path)


def query_projection(model: PreTrainedModel, layer: int) -> nn.Module | None:
    """The projection that makes queries alone; None where one projection makes keys as well."""
    return getattr(attention_module(model, layer), "q_proj", None)


def final_norm(model: PreTrainedModel) -> nn.Module:
    return model.get_submodule(family_of(model).final_norm)


def execution_device(module: nn.Module) -> torch.device:
    """Where a module with weights of its own computes, wherever these lie between its calls."""
    with align_module_device(module):
        return next(chain(module.parameters(), module.buffers())).device


def num_layers(model: PreTrainedModel) -> int:
    """L, the number of decoder layers."""
    return len(decoder_layers(model))


def num_heads(model: PreTrainedModel) -> int:
    """H, the number of query heads; under grouped-query attention these are what is masked."""
    return model.config.get_text_config().num_attention_heads


def heads_width(model: PreTrainedModel) -> int:
    """Width of the concatenated head outputs, the input of a layer's output projection."""
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_attention_heads * head_dim


def context_window(model: PreTrainedModel) -> int | None:
    """Longest sequence in tokens that the model's positions cover; None where it states none."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


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


def readout(model: PreTrainedModel, hidden: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch V"]:
    """Natural log-probabilities, in float32, of states that passed the final norm.

    Raises:
        FloatingPointError: NaN or infinite logits.
    """
    logits = model.get_output_embeddings()(hidden).float()
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if not torch.isfinite(logits).all():
        raise FloatingPointError(
            f"{type(model).__name__} ({model.dtype}) returned NaN or infinite logits. float16 "
            "overflows where bfloat16 and float32 do not: load the model in one of these"
        )
    return logits.log_softmax(-1)
