"""Where modules compute, and how precisely."""

from itertools import chain

import torch
from accelerate.utils import align_module_device
from torch import nn


def dtypes_of(model: nn.Module) -> set[torch.dtype]:
    """Floating-point types of a model's parameters; almost always one."""
    return {p.dtype for p in model.parameters() if p.is_floating_point()}


def lowest_precision(model: nn.Module) -> torch.dtype:
    """The floating-point type that a model's results are rounded to, where it has several."""
    return max(dtypes_of(model), key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def execution_device(module: nn.Module) -> torch.device:
    """Where a module with weights of its own computes, wherever these lie between its calls."""
    with align_module_device(module):
        return next(chain(module.parameters(), module.buffers())).device


def quick_rows(rows: int, device: torch.device) -> int:
    """So many rows, or a few more where their product with a matrix then takes less time.

    On a processor 9 to 15 rows take up to twice as long as 16: fewer are multiplied one by one.
    """
    return 16 if device.type == "cpu" and 8 < rows < 16 else rows
