"""The gate of Adapt-ASMI: the weight of the semantic discount for one input."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from lm_polygraph_asmi.config import ASMIConfig


def response_diversity(embeddings: Float[Tensor, "N D"]) -> float:
    """div(x): one minus the mean cosine over pairs of sampled responses; higher = more diverse.

    Between 0 (all alike) and N / (N - 1) (opposed) for N responses; 1 if unrelated. Computed in
    double precision. Source: equation "diversity" of the paper.

    Raises:
        ValueError: fewer than two responses.
        FloatingPointError: NaN or infinite embeddings (float16 may overflow).

    Example:
        >>> response_diversity(torch.eye(3))  # three unrelated answers
        1.0
    """
    if len(embeddings) < 2:
        raise ValueError(f"response diversity requires at least 2 responses, got {len(embeddings)}")
    if not torch.isfinite(embeddings).all():
        raise FloatingPointError(
            "response embeddings contain NaN or infinity: use bfloat16 or float32 hidden states"
        )
    unit = torch.nn.functional.normalize(embeddings.double(), dim=-1)
    pairs = torch.triu_indices(len(unit), len(unit), offset=1)
    cosines = (unit @ unit.T)[pairs[0], pairs[1]]
    return max(0.0, 1 - cosines.mean().item())


def adaptive_gate(
    diversity: float, tau: float = ASMIConfig.tau, beta: float = ASMIConfig.beta
) -> float:
    """alpha(x) = sigmoid(beta (tau - div(x))), in (0, 1): near 1 for near-paraphrases.

    It is 0.5 where div = tau; beta is its steepness there. The defaults are the paper's, the same
    for all tasks and models. ValueError: a diversity that is NaN or infinite. Source: section
    "Adaptive semantic weighting" of the paper.

    Example:
        >>> round(adaptive_gate(0.3), 2), round(adaptive_gate(1.0), 4)  # half open, closed
        (0.5, 0.0009)
    """
    if not math.isfinite(diversity):
        raise ValueError(f"diversity must be finite, got {diversity}")
    # tanh form of the sigmoid: no overflow for large beta.
    return 0.5 * (1 + math.tanh(beta * (tau - diversity) / 2))
