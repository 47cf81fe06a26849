"""Random draws of the controls, and groups of channels."""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lm_polygraph_asmi.maths import example_seed
from lm_polygraph_asmi.model.perturbation import Masking


def generators(at: Masking) -> Iterator[torch.Generator]:
    """One for each mask, seeded by base seed, layer, tokens and mask, so that equal masks get equal
    draws and no draw depends on the batch."""
    example = [at.seed, at.layer, *at.unmasked.input_ids.tolist()]
    for mask in at.masks.long().tolist():
        yield torch.Generator().manual_seed(_seed(example, mask))


def channel_groups(at: Masking, width: int) -> Int[Tensor, " width"]:
    """Group of each of `width` channels: H groups of nearly equal size, drawn by one permutation
    for all examples."""
    order = permutation(width, _seed([at.seed, at.layer], [width]))
    groups = torch.empty(width, dtype=torch.long)
    groups[order] = torch.arange(width) * at.masks.shape[1] // width
    return groups


def by_group(values: Float[Tensor, "_ n W"], at: Masking) -> Float[Tensor, "B 1 W"]:
    """Masks by channel: each channel has the mask of its group."""
    return at.masks.cpu()[:, channel_groups(at, values.shape[-1])].to(values)[:, None]


def without_groups(values: Float[Tensor, "_ n W"], at: Masking) -> Float[Tensor, "B n W"]:
    """Masked groups of channels are zero: as many channels as in a head, drawn from all of them."""
    return values * by_group(values, at)


def permutation(width: int, seed: int) -> Int[Tensor, " width"]:
    return torch.randperm(width, generator=torch.Generator().manual_seed(seed))


def _seed(*numbers: list[int]) -> int:
    """Hash of the lists and their lengths, in [0, 2^63)."""
    first, *others = (number for part in numbers for number in (len(part), *part))
    return example_seed(first, others)
