"""The slow, obvious truth: full forward passes and plain loops, written from the paper alone.

Nothing here is shared with the package.
"""

import copy
import math
from itertools import combinations, permutations

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
    weight = (masked := copy.deepcopy(projection)).weight
    width = weight.shape[axis] // len(mask)
    with torch.no_grad():
        for head, keep in enumerate(mask.tolist()):
            if not keep:
                weight.narrow(axis, head * width, width).zero_()
    return masked


def subnetwork_log_probs(
    model: nn.Module, projection: str, axis: int, input_ids: Tensor, prompt_length: int,
    masks: Tensor, scope: str = "all",
) -> Tensor:  # fmt: skip
    """S full passes, one mask after the other; (S, T, V)."""
    predicting = slice(prompt_length - 1, len(input_ids) - 1)
    positions = predicting if scope == "response" else slice(None)
    whole = model.get_submodule(projection)
    rows = []
    for mask in masks:
        masked = ByPosition(without_heads(whole, axis, mask), whole, positions)
        found = replaced_log_probs(model, projection, masked, input_ids[None, :-1])
        rows.append(found[predicting])
    return torch.stack(rows)


def replaced_log_probs(model: nn.Module, path: str, module: nn.Module, ids: Tensor) -> Tensor:
    """(N, V) of a full pass with another module at a path; the model is left as found."""
    parent, _, name = path.rpartition(".")
    holder, whole = model.get_submodule(parent), model.get_submodule(path)
    setattr(holder, name, module)
    try:
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
    finally:
        setattr(holder, name, whole)


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

    def similarity(i: int, j: int) -> float:
        a, b = unembedding[i].double(), unembedding[j].double()
        return 1.0 if i == j else min(1.0, max(0.0, (a @ b / (a.norm() * b.norm())).item()))

    out = []
    for t in range(num_positions):
        vectors = []
        for row in log_probs[:, t]:
            p = row.double().exp().tolist()
            kept = top_tokens(p, top_k)
            mass = sum(p[i] for i in kept)
            vectors.append({i: p[i] / mass for i in kept})
        total = 0.0
        for one, other in permutations(vectors, 2):
            for i, p_i in one.items():
                for j, p_j in other.items():
                    total += p_i * similarity(i, j) * p_j
        out.append(total / (num_masks * (num_masks - 1)))
    return out


def response_diversity(embeddings: Tensor) -> float:
    cosines = []
    for a, b in combinations(embeddings.double().tolist(), 2):
        dot = sum(x * y for x, y in zip(a, b, strict=True))
        norms = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(y * y for y in b))
        cosines.append(dot / norms)
    return 1 - sum(cosines) / len(cosines)
