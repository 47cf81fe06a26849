"""Each head of each mask is masked independently with probability p, as in the paper.

The first rows do not depend on S, so a larger S extends a smaller one. Source: section "Attention
subnetwork sampling" of the paper.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def sample(
    num_samples: int, num_heads: int, mask_rate: float, generator: torch.Generator
) -> Float[Tensor, "S H"]:
    """See `Sampler`."""
    # The dtype is explicit, since another default would give other masks.
    uniform = torch.rand(
        num_samples, num_heads, generator=generator, device=generator.device, dtype=torch.float32
    )
    return (uniform >= mask_rate).to(uniform.dtype)
