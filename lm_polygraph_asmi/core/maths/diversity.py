"""What the gate of Adapt-ASMI reads: the diversity of the answers to one input."""

import torch
from jaxtyping import Float
from torch import Tensor


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
