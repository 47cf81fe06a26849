"""Each head is masked in floor(pS) or ceil(pS) of the S masks, pS on average.

Count and masks are random, independently between heads. If S >= 1/p, every head is masked at least
once; the paper's coverage bound (equation "app-coverage") reaches this only with high probability
and more masks. If S < 1/p, every head is masked exactly once: a rate 1/S above p.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def sample(
    num_samples: int, num_heads: int, mask_rate: float, generator: torch.Generator
) -> Float[Tensor, "S H"]:
    """See `Sampler`."""
    options: dict[str, Any] = {"generator": generator, "device": generator.device}
    options["dtype"] = torch.float32
    uniform = torch.rand(num_samples, num_heads, **options)
    times, fraction = divmod(mask_rate * num_samples, 1)
    once_more = torch.rand(num_heads, **options) < fraction
    masked_times = (times + once_more).clamp_min(1)
    rank = uniform.argsort(dim=0).argsort(dim=0)
    return (rank >= masked_times).to(uniform.dtype)
