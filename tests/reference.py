"""The slow, obvious truth: full forward passes and plain loops, written from the paper alone.

Nothing here is shared with the package, except the way a test names a module to hook.
"""

import math

import torch
from torch import Tensor, nn


def masked_forward(model: nn.Module, projection: nn.Module, input_ids: Tensor, mask: Tensor):
    """Logits of one full pass with the heads of one layer masked before its output projection."""

    def hook(_, args):
        heads = args[0].clone()
        width = heads.shape[-1] // len(mask)
        for h, keep in enumerate(mask.tolist()):
            if not keep:
                heads[..., h * width : (h + 1) * width] = 0
        return (heads, *args[1:])

    handle = projection.register_forward_pre_hook(hook)
    try:
        with torch.no_grad():
            return model(input_ids=input_ids[None], use_cache=False).logits[0]
    finally:
        handle.remove()


def subnetwork_log_probs(
    model: nn.Module, projection: nn.Module, input_ids: Tensor, prompt_length: int, masks: Tensor
) -> Tensor:
    """S full passes, one mask after the other; (S, T, V)."""
    rows = []
    for mask in masks:
        logits = masked_forward(model, projection, input_ids, mask)
        rows.append(logits[prompt_length - 1 : -1].float().log_softmax(-1))
    return torch.stack(rows)


def entropy(p: list[float]) -> float:
    return -sum(x * math.log(x) for x in p if x > 0)


def top_tokens(p: list[float], top_k: int) -> list[int]:
    return sorted(range(len(p)), key=lambda i: p[i], reverse=True)[:top_k]


def mutual_information(log_probs: Tensor, top_k: int) -> list[float]:
    """Union of the S top-K sets, one tail bin, full-vocabulary normalisation; loops only."""
    out = []
    for t in range(log_probs.shape[1]):
        dists = [row.double().exp().tolist() for row in log_probs[:, t]]
        union = sorted({i for p in dists for i in top_tokens(p, top_k)})
        reduced = [[p[i] for i in union] for p in dists]
        reduced = [[*p, max(0.0, 1 - sum(p))] for p in reduced]
        mean = [sum(column) / len(reduced) for column in zip(*reduced, strict=True)]
        out.append(entropy(mean) - sum(entropy(p) for p in reduced) / len(reduced))
    return out


def semantic_agreement(log_probs: Tensor, unembedding: Tensor, top_k: int) -> list[float]:
    """Double loop over ordered pairs of subnetworks and over pairs of tokens."""
    num_masks, num_positions, _ = log_probs.shape
    out = []
    for t in range(num_positions):
        vectors = []
        for row in log_probs[:, t]:
            p = row.double().exp().tolist()
            kept = top_tokens(p, top_k)
            mass = sum(p[i] for i in kept)
            vectors.append({i: p[i] / mass for i in kept})
        total = 0.0
        for m in range(num_masks):
            for n in range(num_masks):
                if m == n:
                    continue
                for i, p_i in vectors[m].items():
                    for j, p_j in vectors[n].items():
                        if i == j:
                            similarity = 1.0
                        else:
                            a, b = unembedding[i].double(), unembedding[j].double()
                            cosine = (a @ b / (a.norm() * b.norm())).item()
                            similarity = min(1.0, max(0.0, cosine))
                        total += p_i * similarity * p_j
        out.append(total / (num_masks * (num_masks - 1)))
    return out


def response_diversity(embeddings: Tensor) -> float:
    vectors = embeddings.double().tolist()
    cosines = []
    for i in range(len(vectors)):
        for j in range(i + 1, len(vectors)):
            a, b = vectors[i], vectors[j]
            dot = sum(x * y for x, y in zip(a, b, strict=True))
            norms = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(y * y for y in b))
            cosines.append(dot / norms)
    return 1 - sum(cosines) / len(cosines)
