"""How alike are the tokens that subnetworks choose, and the responses to one input: by cosines.

Semantic agreement discounts disagreement among near-synonyms. The diversity of sampled responses
weighs that discount in Adapt-ASMI.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from lm_polygraph_asmi.core.maths.information import mask_weights
from lm_polygraph_asmi.core.maths.support import UnionSupport, check_log_probs, union_support


def cosine_blocks(rows: Float[Tensor, "*batch U D"]) -> Callable[[slice], Tensor]:
    """Function from a slice of rows to their cosines with all rows, (*batch, u, U), in float32.

    A zero row gives 0. 16-bit rows are multiplied as they are, summed in 32 bits and then divided
    by their norms, so no rounded copy is made.
    """
    if rows.dtype.itemsize > 2:
        unit = normalize(rows.float(), dim=-1)
        return lambda part: unit[..., part, :] @ unit.transpose(-1, -2)
    norms = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32).clamp_min(1e-12)

    def block(part: slice) -> Tensor:
        left, right = rows[..., part, :], rows.transpose(-1, -2)
        if rows.is_cuda and rows.ndim == 3:
            products = torch.bmm(left, right, out_dtype=torch.float32)
        else:
            products = left.float() @ right.float()
        return products / norms[..., part, None] / norms[..., None, :]

    return block


def cosines(rows: Float[Tensor, "*batch U D"]) -> Float[Tensor, "*batch U U"]:
    """Cosines between tokens' rows of the output projection, in float32; a zero row gives 0.

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
    """A_t of distributions that are already reduced to their top K.

    q_m is the top K of subnetwork m, renormalised to one, and G holds the cosines of the tokens'
    rows of W_lm, clipped to [0, 1]; A_t is the mean of q_m' G q_n over ordered pairs m != n, see
    `semantic_agreement`. The sum over all pairs equals (sum_m q_m)' G (sum_m q_m) minus sum_m
    q_m' G q_m, so the pairs are not enumerated. Raises ValueError: fewer than two drawn masks.

    Args:
        unembedding: the output projection W_lm, one row per token.
        rows_at_once: rows of G in memory at once, 16 U bytes per row and position; by default all.

    Example:
        >>> certain = torch.eye(2)[:, None]  # two masks, each certain of another token
        >>> support, unrelated = union_support(certain.log(), top_k=1), torch.eye(2)
        >>> drawn = torch.tensor([3.0, 1.0])  # in 6 of 12 pairs both are certain of one
        >>> agreement_on_support(support, unrelated, drawn).item()
        0.5
    """
    rows = unembedding[support.token_ids]
    union, block = rows.shape[1], cosine_blocks(rows)
    q = support.top_probs
    num_drawn = float(len(q) if counts is None else counts.sum())
    if num_drawn < 2:
        raise ValueError(f"agreement is of pairs of masks: expected two or more, got {num_drawn:g}")
    # Equals `counts` up to rounding. Computed in this way because saved statistics were.
    drawn = num_drawn * mask_weights(counts, len(q)).to(q.device)
    total = torch.einsum("s,stu->tu", drawn, q)
    per_position = q.transpose(0, 1)
    all_pairs = self_pairs = torch.zeros(len(rows), dtype=q.dtype, device=q.device)
    for start in range(0, union, rows_at_once or union):
        part = slice(start, start + (rows_at_once or union))
        kernel = block(part).clamp(0, 1).double()
        # A token agrees fully with itself, whatever the rounding.
        kernel.diagonal(start, dim1=-2, dim2=-1).fill_(1)
        all_pairs = all_pairs + torch.einsum("tu,tuv,tv->t", total[:, part], kernel, total)
        # (T, S, u) @ (T, u, U): a batched product that never holds S x U x U.
        self_pairs = (
            self_pairs + ((per_position[..., part] @ kernel) * per_position).sum(-1) @ drawn
        )
        del kernel  # before the next block is computed
    return ((all_pairs - self_pairs) / (num_drawn * (num_drawn - 1))).clamp(0, 1)


def semantic_agreement(
    log_probs: Float[Tensor, "S T V"],
    unembedding: Float[Tensor, "V D"],
    top_k: int,
    counts: Float[Tensor, " S"] | None = None,
) -> Float[Tensor, " T"]:
    """A_t: mean of q_m' G q_n over ordered pairs of subnetworks, in [0, 1]; higher = more similar.

    q is a subnetwork's top K, renormalised to one, without tail. G is the cosine of rows of the
    output projection W_lm, clipped to [0, 1], and 1 for identical tokens. Source: equations
    "pair-agreement" and "agreement" of the paper. Line 8 of the paper's Algorithm 1 reads as if
    A_t used the tail bin as well; its method section, which is followed here, leaves it out.

    Raises:
        ValueError: K below 1, fewer than two masks, or rows that do not sum to one.
        FloatingPointError: NaN or plus infinity among the log-probabilities.

    Example:
        >>> certain = torch.eye(2)[:, None]  # two subnetworks, each certain of another token
        >>> unrelated, alike = torch.eye(2), torch.tensor([[1.0, 0.0], [2.0, 0.0]])
        >>> [semantic_agreement(certain.log(), rows, top_k=1).item() for rows in (unrelated, alike)]
        [0.0, 1.0]
    """
    check_log_probs(log_probs, counts)
    return agreement_on_support(union_support(log_probs, top_k), unembedding, counts)


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
    unit = normalize(embeddings.double(), dim=-1)
    pairs = torch.triu_indices(len(unit), len(unit), offset=1)
    alike = (unit @ unit.T)[pairs[0], pairs[1]]
    return max(0.0, 1 - alike.mean().item())
