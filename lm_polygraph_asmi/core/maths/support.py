"""Truncation to the top K tokens of each subnetwork, and the union of these sets."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lm_polygraph_asmi.config import check_setting

BLOCK = 64
"""Number of neighbouring tokens per block in the search for the most likely tokens."""
NORMALISED, NORMALISED_HALF = 1e-3, 0.1
"""Largest |log of the total mass| explained by rounding, in 32 and in 16 bits."""


def check_log_probs(
    log_probs: Float[Tensor, "S T V"], counts: Float[Tensor, " S"] | None = None
) -> None:
    """Raise unless `log_probs` are log-probabilities of at least two subnetworks.

    Raises:
        ValueError: fewer than two sampled masks, or rows that do not sum to one (such as logits).
        FloatingPointError: NaN or plus infinity.
    """
    check_setting("num_masks", len(log_probs) if counts is None else int(counts.sum()))
    total = log_probs.float().logsumexp(-1)
    tolerance = NORMALISED if log_probs.dtype.itemsize >= 4 else NORMALISED_HALF
    if total.isnan().any() or total.isposinf().any():
        raise FloatingPointError(
            "log-probabilities contain NaN or infinity: the masked model overflowed. Load it in "
            "bfloat16 or float32 instead of float16"
        )
    if (total.abs() > tolerance).any():
        raise ValueError(
            f"expected natural log-probabilities whose rows sum to one, got a row with log mass "
            f"{total.flatten()[total.abs().argmax()].item():.3g}: apply log_softmax first"
        )


@dataclass(frozen=True)
class UnionSupport:
    """S distributions per position, on the union of their top-K tokens.

    The size of the union differs between positions, so the last axis is padded to the largest, with
    token id 0 and probability 0. Double precision.

    Attributes:
        token_ids: the tokens of the union.
        probs: probabilities, normalised over the full vocabulary.
        tail: mass outside the union, >= 0.
        top_probs: each subnetwork's top K, renormalised to one, 0 elsewhere (no tail).
    """

    token_ids: Int[Tensor, "T U"]
    probs: Float[Tensor, "S T U"]
    tail: Float[Tensor, "S T"]
    top_probs: Float[Tensor, "S T U"]


Ranked = tuple[Float[Tensor, "S T K"], Int[Tensor, "S T K"]]
"""Log-probabilities and ids of the most likely tokens of each distribution, descending."""


def ranked(log_probs: Float[Tensor, "S T V"], size: int) -> Ranked:
    """The `size` most likely tokens of each distribution, descending; at most V.

    Example:
        >>> values, ids = ranked(torch.tensor([[[0.2, 0.5, 0.3]]]).log(), size=2)
        >>> ids.tolist(), values.exp()
        ([[[1, 2]]], tensor([[[0.5000, 0.3000]]]))
    """
    num_blocks = log_probs.shape[-1] // BLOCK
    if num_blocks < 2 * size:
        return log_probs.topk(min(size, log_probs.shape[-1]), dim=-1)
    # The `size` blocks with the largest maxima contain the `size` largest values.
    blocks = log_probs[..., : num_blocks * BLOCK].unflatten(-1, (num_blocks, BLOCK))
    chosen = blocks.amax(-1).topk(size, dim=-1, sorted=False).indices[..., None]
    ids = (chosen * BLOCK + torch.arange(BLOCK, device=log_probs.device)).flatten(-2)
    rest = torch.arange(num_blocks * BLOCK, log_probs.shape[-1], device=log_probs.device)
    ids = torch.cat([ids, rest.expand(*ids.shape[:-1], -1)], dim=-1)
    values, order = log_probs.gather(-1, ids).topk(size, dim=-1)
    return values, ids.gather(-1, order)


def most_likely(by_rank: Ranked) -> Int[Tensor, "S T"]:
    """The most likely token of each distribution; ties among the ranked go to the smallest id.

    Example:
        >>> most_likely(ranked(torch.tensor([[[0.4, 0.4, 0.2]]]).log(), size=2)).tolist()
        [[0]]
    """
    values, ids = by_rank
    below_top = values < values[..., :1]
    return ids.masked_fill(below_top, torch.iinfo(ids.dtype).max).amin(-1)


def union_support(
    log_probs: Float[Tensor, "S T V"], top_k: int, by_rank: Ranked | None = None
) -> UnionSupport:
    """Union of the S top-K sets at each position, and the two reductions based on it.

    Source: section "Mutual-information uncertainty" of the paper (top-K union with one tail
    bucket) and "Semantic agreement weighting" (renormalised top-K vectors).

    Args:
        log_probs: over the full vocabulary; minus infinity is probability 0.
        top_k: K, tokens kept per subnetwork and position; a K above V means V.
        by_rank: `ranked` of at least K tokens, if already computed.

    Raises:
        ValueError: K below 1.

    Example:
        >>> probs = torch.tensor([[[0.7, 0.2, 0.1]], [[0.2, 0.7, 0.1]]])  # two masks, one position
        >>> union = union_support(probs.log(), top_k=1)
        >>> union.token_ids.tolist(), union.tail[:, 0]  # the third token is in no top 1
        ([[0, 1]], tensor([0.1000, 0.1000], dtype=torch.float64))
    """
    check_setting("top_k", top_k)
    num_masks, num_positions, _ = log_probs.shape
    by_rank = by_rank or ranked(log_probs, top_k)
    kept, kept_ids = (part[..., :top_k] for part in by_rank)

    # Sorting the S*K kept ids of a position puts duplicates side by side; the running count of
    # first occurrences is then each token's index in the union.
    flat_ids = kept_ids.permute(1, 0, 2).reshape(num_positions, -1)
    sorted_ids, order = flat_ids.sort(dim=-1)
    first = torch.ones_like(sorted_ids, dtype=torch.bool)
    first[:, 1:] = sorted_ids[:, 1:] != sorted_ids[:, :-1]
    union_index = first.long().cumsum(dim=-1) - 1
    union_size = int(union_index[:, -1].max()) + 1

    token_ids = sorted_ids.new_zeros(num_positions, union_size).scatter(-1, union_index, sorted_ids)
    sizes = union_index[:, -1:] + 1
    valid = torch.arange(union_size, device=log_probs.device) < sizes

    probs = log_probs.gather(-1, token_ids.expand(num_masks, -1, -1)).double().exp() * valid
    tail = (1 - probs.sum(dim=-1)).clamp_min(0)

    # Back in the order before sorting: the index in the union of each kept token.
    kept_index = torch.empty_like(union_index).scatter(-1, order, union_index)
    kept_index = kept_index.reshape(num_positions, num_masks, -1).permute(1, 0, 2)
    top_probs = torch.zeros_like(probs).scatter(-1, kept_index, kept.double().softmax(dim=-1))
    return UnionSupport(token_ids, probs, tail, top_probs)


def top_k_coverage(
    log_probs: Float[Tensor, "S T V"], sizes: Sequence[int], by_rank: Ranked | None = None
) -> Float[Tensor, "S T sizes"]:
    """Probability of each subnetwork's top K tokens for every K in `sizes`; K above V means V.

    In [0, 1]. Source: appendix "Top-K Coverage Analysis" of the paper.

    Args:
        sizes: values of K, each at least 1.
        by_rank: `ranked` of at least the largest size, if already computed.

    Example:
        >>> top_k_coverage(torch.tensor([[[0.2, 0.5, 0.3]]]).log(), sizes=[1, 2])
        tensor([[[0.5000, 0.8000]]], dtype=torch.float64)
    """
    vocabulary = log_probs.shape[-1]
    kept = (by_rank or ranked(log_probs, max(sizes)))[0].double()
    last = torch.tensor([min(k, vocabulary) - 1 for k in sizes], device=log_probs.device)
    return kept.exp().cumsum(-1)[..., last].clamp_max(1)
