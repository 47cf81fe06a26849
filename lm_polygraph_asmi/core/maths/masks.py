"""Random head masks and their seeds."""

import hashlib
from array import array
from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from lm_polygraph_asmi.config import check_setting


def bernoulli(
    num_masks: int, num_heads: int, mask_rate: float, generator: torch.Generator
) -> Float[Tensor, "S H"]:
    """Each head of each mask is masked independently with probability p, as in the paper.

    The first rows do not depend on S, so a larger S extends a smaller one. Source: section
    "Attention subnetwork sampling" of the paper.
    """
    return (_uniform(num_masks, num_heads, generator=generator) >= mask_rate).float()


def balanced(
    num_masks: int, num_heads: int, mask_rate: float, generator: torch.Generator
) -> Float[Tensor, "S H"]:
    """Each head is masked in floor(pS) or ceil(pS) of the S masks, pS on average; at least once.

    Which of both, and in which masks, is random, independently between heads. So S masks cover
    every head for certain; Bernoulli masks do so only with high probability (equation
    "app-coverage"). If S < 1/p, every head is masked exactly once, so at the rate 1/S, above p.
    """
    uniform = _uniform(num_masks, num_heads, generator=generator)
    times, fraction = divmod(mask_rate * num_masks, 1)
    once_more = _uniform(num_heads, generator=generator) < fraction
    rank = uniform.argsort(dim=0).argsort(dim=0)
    return (rank >= (times + once_more).clamp_min(1)).float()


# The dtype is explicit, since another default would give other masks.
_uniform = partial(torch.rand, dtype=torch.float32)
SAMPLERS = {"bernoulli": bernoulli, "balanced": balanced}
"""Value of the setting `mask_sampler` -> how masks are drawn; the paper's first."""


def sample_head_masks(
    num_masks: int,
    num_heads: int,
    mask_rate: float,
    generator: torch.Generator,
    sampler: str = "bernoulli",
) -> Float[Tensor, "S H"]:
    """Random head masks, by a function of `SAMPLERS`: 1 keeps a head, 0 masks it.

    Equal generators (on the CPU) give equal masks on every machine. ValueError: fewer than two
    masks, no heads, a rate p outside (0, 1), or an unknown sampler.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> masks = sample_head_masks(10, 4, 0.2, generator, sampler="balanced")
        >>> masks.sum(0).tolist()  # each of 4 heads is kept by 8 of 10 masks
        [8.0, 8.0, 8.0, 8.0]
    """
    check_setting("num_masks", num_masks)
    check_setting("mask_rate", mask_rate)
    check_setting("mask_sampler", sampler)
    if num_heads < 1:
        raise ValueError(f"num_heads (H) must be at least 1, got {num_heads}")
    return SAMPLERS[sampler](num_masks, num_heads, mask_rate, generator)


def example_seed(base_seed: int, content: Sequence[int]) -> int:
    """Seed of anything random about one example, from its content only; in [0, 2^63).

    For masks, the content is the masked layer and the tokens; for a sampled response, the tokens
    and the sample's number. So neither depends on batch size, order, reruns or K.

    Example:
        >>> example_seed(0, [5, 7]) == example_seed(0, [5, 7]) != example_seed(0, [7, 5])
        True
    """
    digest = hashlib.blake2b(array("q", [base_seed, *content]).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
