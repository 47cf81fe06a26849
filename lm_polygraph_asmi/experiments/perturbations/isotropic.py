"""A random direction in the output of the layer; as large as masked heads."""

import torch
from jaxtyping import Float
from torch import Tensor

from lm_polygraph_asmi.experiments.draws import generators
from lm_polygraph_asmi.model.perturbation import OUTPUT, Masking, Perturbation


def in_random_direction(output: Float[Tensor, "B n D"], at: Masking) -> Float[Tensor, "B n D"]:
    """Adds a random direction for each mask and position, all directions equally likely."""
    shape = len(at.unmasked.input_ids) - 1, output.shape[-1]  # drawn for all positions
    draws = [torch.randn(shape, generator=generator)[at.positions] for generator in generators(at)]
    return output + torch.stack(draws).to(output)


PERTURBATION = Perturbation("isotropic", in_random_direction, OUTPUT, as_heads=True)
