"""Noise on masked groups of inputs of the MLP's down projection."""

import torch
from jaxtyping import Float
from torch import Tensor

from lm_polygraph_asmi.experiments.draws import by_group, generators
from lm_polygraph_asmi.model.perturbation import MLP, Masking, Perturbation


def with_noise(values: Float[Tensor, "B n W"], at: Masking) -> Float[Tensor, "B n W"]:
    """Uniform non-negative noise on masked groups, one draw per mask for all positions.

    Follows arXiv 2502.03799, which perturbs MLP activations. The mean square of the noise equals
    that of the activations at the position.
    """
    draws = [torch.rand(values.shape[-1], generator=generator) for generator in generators(at)]
    noise = torch.stack(draws).to(values)[:, None] * (1 - by_group(values, at))
    size = values.float().square().mean(-1, keepdim=True).sqrt().to(values)
    return values + 3**0.5 * size * noise


PERTURBATION = Perturbation("mlp_noise", with_noise, MLP)
