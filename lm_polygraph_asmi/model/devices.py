"""Where modules compute."""

from itertools import chain

import torch
from accelerate.utils import align_module_device
from torch import nn


def execution_device(module: nn.Module) -> torch.device:
    """Where a module with weights of its own computes, wherever these lie between its calls."""
    with align_module_device(module):
        return next(chain(module.parameters(), module.buffers())).device
