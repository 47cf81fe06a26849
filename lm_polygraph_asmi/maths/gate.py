"""The gate of Adapt-ASMI: how far the semantic discount is trusted for one input."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from lm_polygraph_asmi.config import ASMIConfig


def response_diversity(embeddings: Float[Tensor, "N D"]) -> float:
    """div(x): one minus the mean cosine over pairs of sampled responses; higher = more diverse.

    Between 0 (all alike) and, for N responses, N / (N - 1) (opposed); 1 when unrelated. Computed
    in double precision. Source: equation "diversity" of the paper.

    Raises:
        ValueError: fewer than two responses, for which no pair exists.
        FloatingPointError: NaN or infinite embeddings (float16 overflows where bfloat16 does not).

    Example:
        >>> response_diversity(torch.eye(3))  # three unrelated answers
        1.0
    """
    if len(embeddings) < 2:
        raise ValueError(f"response diversity needs at least 2 responses, got {len(embeddings)}")
    if not torch.isfinite(embeddings).all():
        raise FloatingPointError(
            "response embeddings hold NaN or infinity: keep hidden states in bfloat16 or float32"
        )
    unit = torch.nn.functional.normalize(embeddings.double(), dim=-1)
    pairs = torch.triu_indices(len(unit), len(unit), offset=1)
    cosines = (unit @ unit.T)[pairs[0], pairs[1]]
    return max(0.0, 1 - cosines.mean().item())


def adaptive_gate(
    diversity: float, tau: float = ASMIConfig.tau, beta: float = ASMIConfig.beta
) -> float:
    """alpha(x) = sigmoid(beta (tau - div(x))), in (0, 1): near 1 for near-paraphrases.

    Defaults are the paper's, fixed across tasks and models. Source: section "Adaptive semantic
    weighting".

    Raises:
        ValueError: a diversity that is not a finite number.

    Example:
        >>> round(adaptive_gate(0.3), 2), round(adaptive_gate(1.0), 4)  # half open, shut
        (0.5, 0.0009)
    """
    if not math.isfinite(diversity):
        raise ValueError(f"diversity must be finite, got {diversity}")
    # tanh form of the logistic: no overflow for large beta.
    return 0.5 * (1 + math.tanh(beta * (tau - diversity) / 2))
