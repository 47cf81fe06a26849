"""How far two computations of the same values may be apart before it is more than rounding."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lm_polygraph_asmi.core.model.devices import lowest_precision


class Limits(NamedTuple):
    """The largest difference that rounding explains."""

    wide: float  # in 32 bits and more
    narrow: float  # in 16 bits and fewer

    def of(self, model: nn.Module) -> float:
        """The limit for the precision of a model."""
        return self.wide if lowest_precision(model).itemsize >= 4 else self.narrow


RERUN = Limits(1e-3, 0.1)
"""Largest sum of |p - q| over the vocabulary, when a model runs the same text again."""
MODULE = Limits(1e-3, 0.05)
"""Largest relative distance of what a module returns for a position when it stands elsewhere."""
EMBEDDING = Limits(1e-4, 0.05)
"""Largest relative distance of a response's embedding after a kept prompt."""
MIXES = 1e-3
"""A module mixes tokens if its inputs at a token differ, relatively, by more than this when another
token changes."""
LIMITS = {torch.float64: 1e-5, torch.float32: 2e-4}
"""Largest `variation` between masked and full passes, by type."""
LIMIT_16_BITS = 2e-2
"""The same in 16 bits and fewer.

Correct passes differed by 2e-6 in 32 bits, and in bfloat16 by 6e-3 to 2e-2 (packed sequences of
SmolLM2-135M-Instruct). Wrong passes differed by 3e-3 to 0.6: the smallest of these are caught in 32
bits, and not in 16.
"""
READOUT = Limits(2e-4, 2e-3)
"""Largest `variation` between the readout of the final states and the model's own logits."""
OUTSTANDING = 10.0
"""A single position may differ by this many times what is allowed of the mean."""


def limit(dtype: torch.dtype) -> float:
    """Largest `variation` between two computations of the same distributions."""
    return LIMITS.get(dtype, LIMIT_16_BITS)


def variation(p: Float[Tensor, "T V"], q: Float[Tensor, "T V"]) -> float:
    """Mean total variation over the response of log-probabilities, or more if single positions are
    outliers."""
    by_position = (p.exp() - q.to(p.device).exp()).abs().sum(-1) / 2
    return max(by_position.mean().item(), by_position.max().item() / OUTSTANDING)
