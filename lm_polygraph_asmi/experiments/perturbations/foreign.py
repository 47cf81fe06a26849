"""Masked heads output what they output at another position; as large as masked heads."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lm_polygraph_asmi.experiments.draws import generators
from lm_polygraph_asmi.model.perturbation import HEADS, Masking, Perturbation, by_head


def foreign_positions(at: Masking) -> Int[Tensor, "B n"]:
    """For each mask and position an earlier position of the prompt, all equally likely.

    Never a later one, which the model could not have attended to. The first position, with none
    before it, is its own replacement.
    """
    earlier = torch.arange(len(at.unmasked.input_ids) - 1).clamp_max(at.unmasked.prompt_length)
    positions = []
    for generator in generators(at):
        drawn = torch.rand(len(earlier), generator=generator, dtype=torch.float64) * earlier
        positions.append(drawn.long()[at.positions])
    return torch.stack(positions)


def from_elsewhere(heads: Float[Tensor, "_ n W"], at: Masking) -> Float[Tensor, "B n W"]:
    """Masked heads return their unmasked output at an earlier position of the prompt."""
    kept = by_head(heads, at.masks)
    elsewhere = at.unmasked.targets[at.layer].heads[0].to(heads.device)[foreign_positions(at)]
    return heads * kept + elsewhere * (1 - kept)


PERTURBATION = Perturbation("foreign", from_elsewhere, HEADS, as_heads=True, reads_heads=True)
