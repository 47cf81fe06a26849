"""The slow, obvious truth: full forward passes and plain loops, written from the paper alone.

Nothing here is shared with the package.
"""

import copy
import math
from itertools import combinations, permutations, product

import torch
from torch import Tensor, nn


class ByPosition(nn.Module):
    """One projection at some positions of a sequence, another at the rest."""

    def __init__(self, inside: nn.Module, outside: nn.Module, positions: slice) -> None:
        super().__init__()
        self.inside, self.outside, self.positions = inside, outside, positions
        self.weight = outside.weight  # some models read its type

    def forward(self, heads: Tensor) -> Tensor:
        projected = self.outside(heads).clone()  # some models drop the batch axis
        projected[..., self.positions, :] = self.inside(heads)[..., self.positions, :]
        return projected


def without_heads(projection: nn.Module, axis: int, mask: Tensor) -> nn.Module:
    """A copy of an output projection in which masked heads have no weight.

    A head output multiplied by zero and a head whose rows of W_O are zero are the same thing; no
    hook is involved.
    """
    masked = copy.deepcopy(projection)
    with torch.no_grad():
        for head, keep in zip(masked.weight.chunk(len(mask), axis), mask, strict=True):
            head.mul_(keep)
    return masked


def subnetwork_log_probs(
    model: nn.Module, projection: str, axis: int, input_ids: Tensor, prompt_length: int,
    masks: Tensor, scope: str = "all",
) -> Tensor:  # fmt: skip
    """S full passes, one mask after the other; (S, T, V)."""
    predicting = slice(prompt_length - 1, len(input_ids) - 1)
    positions = predicting if scope == "response" else slice(None)
    whole = model.get_submodule(projection)

    def run(mask: Tensor) -> Tensor:
        masked = ByPosition(without_heads(whole, axis, mask), whole, positions)
        model.set_submodule(projection, masked)
        logits = model(input_ids=input_ids[None, :-1], use_cache=False).logits
        return logits[0, predicting].float().log_softmax(-1)

    try:
        with torch.no_grad():
            return torch.stack([run(mask) for mask in masks])
    finally:  # the model is left as found
        model.set_submodule(projection, whole)


def by_position(log_probs: Tensor) -> list[list[list[float]]]:
    """(T, S, V) probabilities as plain numbers."""
    return log_probs.double().exp().transpose(0, 1).tolist()


def entropy(p: list[float]) -> float:
    return -sum(x * math.log(x) for x in p if x > 0)


def top_tokens(p: list[float], top_k: int) -> list[int]:
    return sorted(range(len(p)), key=lambda i: p[i], reverse=True)[:top_k]


def mutual_information(log_probs: Tensor, top_k: int) -> list[float]:
    """Union of the S top-K sets, one tail bin, full-vocabulary normalisation; loops only."""
    out = []
    for dists in by_position(log_probs):
        union = sorted({i for p in dists for i in top_tokens(p, top_k)})
        kept = [[p[i] for i in union] for p in dists]
        reduced = [[*p, max(0.0, 1 - sum(p))] for p in kept]
        mean = [sum(column) / len(reduced) for column in zip(*reduced, strict=True)]
        out.append(entropy(mean) - sum(map(entropy, reduced)) / len(reduced))
    return out


def cosine(a: Tensor, b: Tensor) -> float:
    """0 for a row of zeros."""
    a, b = a.tolist(), b.tolist()
    norms = math.hypot(*a) * math.hypot(*b)
    return sum(x * y for x, y in zip(a, b, strict=True)) / norms if norms else 0.0


def semantic_agreement(log_probs: Tensor, unembedding: Tensor, top_k: int) -> list[float]:
    """Double loop over ordered pairs of subnetworks and over pairs of tokens."""

    def similarity(i: int, j: int) -> float:
        return 1.0 if i == j else min(1.0, max(0.0, cosine(unembedding[i], unembedding[j])))

    def renormalised(p: list[float]) -> dict[int, float]:
        kept = top_tokens(p, top_k)
        return {i: p[i] / sum(p[k] for k in kept) for i in kept}

    out = []
    for dists in by_position(log_probs):
        agreements = [
            sum(q[i] * similarity(i, j) * r[j] for i, j in product(q, r))
            for q, r in permutations(map(renormalised, dists), 2)
        ]
        out.append(sum(agreements) / len(agreements))
    return out


def response_diversity(embeddings: Tensor) -> float:
    cosines = [cosine(a, b) for a, b in combinations(embeddings, 2)]
    return 1 - sum(cosines) / len(cosines)
