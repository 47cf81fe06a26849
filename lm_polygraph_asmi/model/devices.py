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
