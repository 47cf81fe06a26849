"""Entropies and mutual information of an ensemble of subnetworks, in nats."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.special import entr

from lm_polygraph_asmi.core.maths.support import UnionSupport, check_log_probs, union_support


@dataclass(frozen=True)
class Disagreement:
    """How far S subnetworks disagree at each response position, in nats.

    Attributes:
        mutual_information: MI_t, entropy of the mean minus mean entropy, in [0, ln S]; higher =
            more uncertain. Equation "mi" of the paper.
        entropy_of_mean: H(p_bar_t), of the averaged distribution.
        mean_entropy: mean over s of H(p_t^(s)).
        divergence_from_mean: KL(p_t^(s) || p_bar_t) per mask; its mean over masks is MI_t
            (equation "mi-kl").
    """

    mutual_information: Float[Tensor, " T"]
    entropy_of_mean: Float[Tensor, " T"]
    mean_entropy: Float[Tensor, " T"]
    divergence_from_mean: Float[Tensor, "S T"]


def mask_weights(counts: Float[Tensor, " S"] | None, num_masks: int) -> Float[Tensor, " S"]:
    """Fraction of the drawn masks that equal each of the S distinct ones, float64; sums to one.

    Example:
        >>> mask_weights(torch.tensor([3.0, 1.0]), num_masks=2).tolist()
        [0.75, 0.25]
    """
    if counts is None:
        return torch.full((num_masks,), 1 / num_masks, dtype=torch.float64)
    return counts.double() / counts.sum()


def disagreement(support: UnionSupport, counts: Float[Tensor, " S"] | None = None) -> Disagreement:
    """Entropies and mutual information on the union of the top-K sets plus one tail bin.

    Example:
        >>> even = torch.full((2, 1, 2), 0.5)  # two subnetworks, each 50:50 between two tokens
        >>> result = disagreement(union_support(even.log(), top_k=2))
        >>> result.mutual_information.item(), round(result.entropy_of_mean.item(), 4)  # 0 of ln 2
        (0.0, 0.6931)
    """
    reduced = torch.cat([support.probs, support.tail.unsqueeze(-1)], dim=-1)
    weights = mask_weights(counts, len(reduced)).to(reduced.device)
    mean = torch.einsum("s,stu->tu", weights, reduced)
    entropy_of_mean = entr(mean).sum(-1)
    mean_entropy = weights @ entr(reduced).sum(-1)
    # p log(p / p_bar) with 0 log 0 = 0; p_bar > 0 wherever p > 0.
    divergence = (torch.xlogy(reduced, reduced) - torch.xlogy(reduced, mean)).sum(-1)
    return Disagreement(
        # At most ln S, and ln of the number of distinct masks: outside only by rounding.
        mutual_information=(entropy_of_mean - mean_entropy).clamp(0, math.log(len(reduced))),
        entropy_of_mean=entropy_of_mean,
        mean_entropy=mean_entropy,
        divergence_from_mean=divergence.clamp_min(0),
    )


def mutual_information(
    log_probs: Float[Tensor, "S T V"], top_k: int, counts: Float[Tensor, " S"] | None = None
) -> Float[Tensor, " T"]:
    """MI_t = H(p_bar_t) - mean over s of H(p_t^(s)), in nats; higher = more uncertain.

    Between 0 and ln S. Full-vocabulary distributions are reduced to the union of the S top-K sets
    plus one tail bin; K = V is exact. Source: equation "mi" of the paper.

    Raises:
        ValueError: K below 1, fewer than two masks, or rows that do not sum to one.
        FloatingPointError: NaN or plus infinity among the log-probabilities.

    Example:
        >>> certain = torch.eye(2)[:, None]  # two subnetworks, each certain of another token
        >>> mutual_information(certain.log(), top_k=1)  # ln 2, the largest possible
        tensor([0.6931], dtype=torch.float64)
    """
    check_log_probs(log_probs, counts)
    return disagreement(union_support(log_probs, top_k), counts).mutual_information
