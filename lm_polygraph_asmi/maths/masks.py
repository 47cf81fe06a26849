"""Random head masks and their seeds."""

import hashlib
from array import array
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lm_polygraph_asmi.config import check_setting
from lm_polygraph_asmi.maths.samplers import load_sampler


def sample_head_masks(
    num_samples: int,
    num_heads: int,
    mask_rate: float,
    generator: torch.Generator,
    sampler: str = "bernoulli",
) -> Float[Tensor, "S H"]:
    """Random head masks: 1 keeps a head, 0 masks it; p = `mask_rate`.

    Args:
        num_samples: number of masks, S.
        num_heads: query heads of the layer, H.
        mask_rate: probability of masking a head, p, in (0, 1).
        generator: source of the random numbers.
        sampler: name of a file in `maths.samplers`, which says how they are drawn.

    Raises:
        ValueError: fewer than two masks, no heads, a rate outside (0, 1), or an unknown sampler.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> masks = sample_head_masks(10, 4, 0.2, generator, sampler="balanced")
        >>> masks.sum(0).tolist()  # each of 4 heads is kept by 8 of 10 masks
        [8.0, 8.0, 8.0, 8.0]
    """
    check_setting("num_masks", num_samples)
    check_setting("mask_rate", mask_rate)
    if num_heads < 1:
        raise ValueError(f"num_heads (H) must be at least 1, got {num_heads}")
    return load_sampler(sampler)(num_samples, num_heads, mask_rate, generator)


def example_masks(
    num_masks: int,
    num_heads: int,
    mask_rate: float,
    sampler: str,
    base_seed: int,
    layer: int,
    token_ids: Sequence[int],
) -> tuple[int, Float[Tensor, "S H"]]:
    """The seed of one example and its masks; see `sample_head_masks`.

    Args:
        num_masks: number of masks, S.
        num_heads: query heads of the layer, H.
        mask_rate: probability of masking a head, p, in (0, 1).
        sampler: name of a file in `maths.samplers`.
        base_seed, layer, token_ids: what determines the seed; see `mask_seed`.

    Raises:
        ValueError: as `sample_head_masks`.

    Example:
        >>> seed, masks = example_masks(10, 4, 0.2, "balanced", 0, layer=18, token_ids=[5, 7])
        >>> seed == mask_seed(0, 18, [5, 7]), masks.sum(0).tolist()  # kept by 8 of 10
        (True, [8.0, 8.0, 8.0, 8.0])
    """
    seed = mask_seed(base_seed, layer, token_ids)
    generator = torch.Generator().manual_seed(seed)
    return seed, sample_head_masks(num_masks, num_heads, mask_rate, generator, sampler)


def mask_seed(base_seed: int, layer: int, token_ids: Sequence[int]) -> int:
    """Seed of one example's masks, from its content only; in [0, 2^63).

    So batch size, order, reruns and K do not change the masks of an answer.

    Args:
        base_seed: seed of the run.
        layer: index of the masked layer, from 0.
        token_ids: tokens of the prompt and the answer.

    Example:
        >>> mask_seed(0, 18, [5, 7]) == mask_seed(0, 18, [5, 7]) != mask_seed(1, 18, [5, 7])
        True
    """
    return example_seed(base_seed, [layer, *token_ids])


def example_seed(base_seed: int, token_ids: Sequence[int]) -> int:
    """Seed of anything random about one example, from its content only; in [0, 2^63).

    Args:
        base_seed: seed of the run.
        token_ids: tokens of the example.

    Example:
        >>> example_seed(0, [5, 7]) == example_seed(0, [5, 7]) != example_seed(0, [7, 5])
        True
    """
    content = array("q", [base_seed, *token_ids]).tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1
