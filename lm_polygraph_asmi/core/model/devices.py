"""Where modules compute, and how precisely."""

from itertools import chain

import torch
from accelerate.utils import align_module_device
from torch import nn


def dtypes_of(model: nn.Module) -> set[torch.dtype]:
    """Floating-point types of a model's parameters; almost always one."""
    return {p.dtype for p in model.parameters() if p.is_floating_point()}


def lowest_precision(model: nn.Module) -> torch.dtype:
    """The least precise floating-point type of a model's parameters."""
    return max(dtypes_of(model), key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def execution_device(module: nn.Module) -> torch.device:
    """The device where a module with its own weights computes, even if they are offloaded."""
    with align_module_device(module):
        return next(chain(module.parameters(), module.buffers())).device


def check_distributions(model: nn.Module, logits: torch.Tensor) -> None:
    """Raise FloatingPointError for NaN, plus infinity, or a row of minus infinity.

    Minus infinity is probability 0; the largest of a row shows NaN, too.
    """
    if logits.amax(-1).isfinite().all():
        return
    half = lowest_precision(model) == torch.float16
    raise FloatingPointError(
        f"{type(model).__name__} ({lowest_precision(model)}) returned logits that are no "
        "distribution: NaN, plus infinity, or minus infinity for every token. "
        + ("float16 overflows: load the model in bfloat16 or float32" if half
           else "Its passes overflow, or its weights are damaged: check its weights")
    )  # fmt: skip
