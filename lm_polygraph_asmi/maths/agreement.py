"""Semantic agreement between subnetworks: disagreement among near-synonyms is discounted."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from lm_polygraph_asmi.maths.information import mask_weights
from lm_polygraph_asmi.maths.support import UnionSupport, check_log_probs, union_support


def cosine_blocks(rows: Float[Tensor, "*batch U D"]) -> Callable[[slice], Tensor]:
    """Cosines of some rows with all of them, (*batch, u, U), in float32; a zero row gives 0.

    Rows of 16 bits are multiplied as they are, added up in 32 bits, and divided by norms after, so
    that no rounded copy of them is made.
    """
    if rows.dtype.itemsize > 2:
        unit = normalize(rows.float(), dim=-1)
        return lambda part: unit[..., part, :] @ unit.transpose(-1, -2)
    norms = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32).clamp_min(1e-12)

    def block(part: slice) -> Tensor:
        some, every = rows[..., part, :], rows.transpose(-1, -2)
        if rows.is_cuda and rows.ndim == 3:
            products = torch.bmm(some, every, out_dtype=torch.float32)
        else:
            products = some.float() @ every.float()
        return products / norms[..., part, None] / norms[..., None, :]

    return block


def cosines(rows: Float[Tensor, "*batch U D"]) -> Float[Tensor, "*batch U U"]:
    """Cosines between output-projection rows, in float32; a zero row gives 0.

    Example:
        >>> cosines(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]])).tolist()  # at any length
        [[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    return cosine_blocks(rows)(slice(None))


def agreement_on_support(
    support: UnionSupport,
    unembedding: Float[Tensor, "V D"],
    counts: Float[Tensor, " S"] | None = None,
    rows_at_once: int | None = None,
) -> Float[Tensor, " T"]:
    """A_t on distributions that were reduced already; see `semantic_agreement`.

    Summing q_m' G q_n over all ordered pairs m != n equals (sum_m q_m)' G (sum_m q_m) minus
    sum_m q_m' G q_m, so no pair is visited.

    Args:
        rows_at_once: rows of G in memory together, at 16 U bytes each and position; by default all.

    Example:
        >>> certain = torch.eye(2)[:, None]  # two masks, after each of which another token is sure
        >>> support, unrelated = union_support(certain.log(), top_k=1), torch.eye(2)
        >>> drawn = torch.tensor([3.0, 1.0])  # the first thrice: 6 of 12 pairs are of the same mask
        >>> agreement_on_support(support, unrelated, drawn).item()
        0.5
    """
    rows = unembedding[support.token_ids]
    union, block = rows.shape[1], cosine_blocks(rows)
    q = support.top_probs
    num_drawn = float(len(q) if counts is None else counts.sum())
    weights = num_drawn * mask_weights(counts, len(q)).to(q.device)
    total = torch.einsum("s,stu->tu", weights, q)
    per_position = q.transpose(0, 1)
    all_pairs = own = torch.zeros(len(rows), dtype=q.dtype, device=q.device)
    for start in range(0, union, rows_at_once or union):
        part = slice(start, start + (rows_at_once or union))
        kernel = block(part).clamp(0, 1).double()
        # A token agrees with itself, rounding or not.
        kernel.diagonal(start, dim1=-2, dim2=-1).fill_(1)
        all_pairs = all_pairs + torch.einsum("tu,tuv,tv->t", total[:, part], kernel, total)
        # (T, S, u) @ (T, u, U): a plain batched product, never S x U x U.
        own = own + ((per_position[..., part] @ kernel) * per_position).sum(-1) @ weights
        del kernel  # before the next one is made
    return ((all_pairs - own) / (num_drawn * (num_drawn - 1))).clamp(0, 1)


def semantic_agreement(
    log_probs: Float[Tensor, "S T V"],
    unembedding: Float[Tensor, "V D"],
    top_k: int,
    counts: Float[Tensor, " S"] | None = None,
) -> Float[Tensor, " T"]:
    """A_t: mean over ordered pairs of subnetworks of q_m' G q_n; in [0, 1], higher = they agree.

    q is a subnetwork's own top K, renormalised to one, without tail, and G the clipped cosine of
    the L2-normalised rows of the output projection, 1 for identical tokens. Source: equations
    "pair-agreement" and "agreement" of the paper. Line 8 of its Algorithm 1 reads as if A_t used
    the union with the tail bin; the method text, followed here, does not.

    Args:
        log_probs: full-vocabulary natural logarithms, one row per (distinct) mask.
        unembedding: the output projection W_lm, one row per token.
        top_k: K.
        counts: how often each mask was drawn; by default once each.

    Raises:
        ValueError: K below 1, fewer than two masks, or rows that do not sum to one.
        FloatingPointError: NaN or infinite log-probabilities.

    Example:
        >>> certain = torch.eye(2)[:, None]  # two subnetworks, each sure of another token
        >>> unrelated, alike = torch.eye(2), torch.tensor([[1.0, 0.0], [2.0, 0.0]])
        >>> [semantic_agreement(certain.log(), rows, top_k=1).item() for rows in (unrelated, alike)]
        [0.0, 1.0]
    """
    check_log_probs(log_probs, counts)
    return agreement_on_support(union_support(log_probs, top_k), unembedding, counts)
