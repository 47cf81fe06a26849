"""Random head masks and the seeds they are drawn from."""

import hashlib
from array import array
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lm_polygraph_asmi.validation import check_mask_rate, check_num_masks


def sample_head_masks(
    num_samples: int, num_heads: int, mask_rate: float, generator: torch.Generator
) -> Float[Tensor, "S H"]:
    """Independent Bernoulli masks: 1 keeps a head, 0 takes it away with probability `mask_rate`.

    The first rows do not depend on `num_samples`, so a larger S extends a smaller one.
    Source: section "Attention subnetwork sampling" of the paper.

    Raises:
        ValueError: fewer than two masks, no heads, or a rate outside (0, 1).
    """
    check_num_masks(num_samples)
    check_mask_rate(mask_rate)
    if num_heads < 1:
        raise ValueError(f"num_heads (H) must be at least 1, got {num_heads}")
    uniform = torch.rand(num_samples, num_heads, generator=generator, device=generator.device)
    return (uniform >= mask_rate).to(uniform.dtype)


def mask_seed(base_seed: int, layer: int, token_ids: Sequence[int]) -> int:
    """Seed of one example's masks, from its content alone; non-negative, below 2^63.

    Batch size, order and reruns therefore change nothing, and the same answer gets the same masks
    whatever K is.
    """
    content = array("q", [base_seed, layer, *token_ids]).tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1
