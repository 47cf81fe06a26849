"""The rows of the output projection, adapters included."""

from typing import Any

import torch
from accelerate.utils import align_module_device
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from lm_polygraph_asmi.model.heads import output_embeddings


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
