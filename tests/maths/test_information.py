"""Reductions of distributions and their information, against plain loops over drawn ones."""

import math

import pytest
import torch

from lm_polygraph_asmi.core.maths import (
    disagreement,
    most_likely,
    mutual_information,
    ranked,
    semantic_agreement,
    top_k_coverage,
    union_support,
)
from tests import brute_force

S, T, V = 6, 3, 40


@pytest.fixture
def log_probs() -> torch.Tensor:
    """In float64: what holds exactly is held against 1e-12, far above its rounding."""
    generator = torch.Generator().manual_seed(1)
    return (3 * torch.randn(S, T, V, generator=generator).double()).log_softmax(-1)


def agreement(log_probs, *how):
    return semantic_agreement(
        log_probs, torch.randn(V, 6, generator=torch.Generator().manual_seed(3)), *how
    )


@pytest.mark.parametrize(
    ("dtype", "most"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 0.02), (torch.bfloat16, 0.02)],
)
@pytest.mark.parametrize("top_k", [1, 3, 8, V, 3 * V])
def test_equals_plain_loops(log_probs, top_k, dtype, most):
    log_probs[:, 1] = log_probs[0, 1]  # equal, and as different as can be
    log_probs[:, 2] = torch.eye(S, V).log()
    fast = mutual_information(log_probs.to(dtype), top_k)
    slow = brute_force.mutual_information(log_probs, min(top_k, V))
    assert fast.tolist() == pytest.approx(slow, abs=most)
    parts = disagreement(union_support(log_probs.to(dtype), top_k))
    torch.testing.assert_close(parts.divergence_from_mean.mean(0), fast)
    torch.testing.assert_close(parts.entropy_of_mean - parts.mean_entropy, fast)


def test_coverage_is_the_mass_of_the_most_likely(log_probs):
    in_order, sizes = log_probs.exp().sort(descending=True).values.cumsum(-1), [1, 8, V, 64]
    expected = in_order[..., [min(size, V) - 1 for size in sizes]]
    torch.testing.assert_close(top_k_coverage(log_probs, sizes), expected)


@pytest.mark.parametrize("measure", [mutual_information, agreement])
@pytest.mark.parametrize("drawn", [[3, 1, 1, 2, 1, 4], [1, 5], [4]])
def test_counts_stand_for_repeated_masks(log_probs, measure, drawn):
    """Also if one mask is all that was drawn, several times."""
    counts, distinct = torch.tensor(drawn).double(), log_probs[: len(drawn)]
    repeated = distinct.repeat_interleave(torch.tensor(drawn), dim=0)
    torch.testing.assert_close(measure(distinct, 5, counts), measure(repeated, 5))


@pytest.mark.parametrize("measure", [mutual_information, agreement])
@pytest.mark.parametrize(
    ("change", "top_k", "word"),
    [
        (lambda p: p, 0, "top_k"),
        (lambda p: p[:1], 8, "num_masks"),
        (lambda p: p + 0.05, 8, "log_softmax"),
        (lambda p: p - 0.05, 8, "log_softmax"),
        (lambda p: (p + 0.05).float(), 8, "log_softmax"),
        (lambda p: p.half() + 0.5, 8, "log_softmax"),
        (lambda p: p.index_fill(-1, torch.tensor(5), math.nan), 8, "NaN"),
        (lambda p: p.index_fill(-1, torch.tensor(5), math.inf), 8, "NaN"),
    ],
)
def test_refusals(log_probs, measure, change, top_k, word):
    with pytest.raises(FloatingPointError if word == "NaN" else ValueError, match=word):
        measure(change(log_probs), top_k)


@pytest.mark.parametrize("vocabulary", [1000, 4096])
def test_ranking_by_blocks_is_ranking(vocabulary):
    """The most likely tokens of a large vocabulary are sought in some blocks of it alone."""
    generator = torch.Generator().manual_seed(2)
    log_probs = torch.randn(3, 2, vocabulary, generator=generator).log_softmax(-1)
    log_probs[0, 0, 128:140] = 0.5  # neighbours, and others at the end
    log_probs[1, 1, -3:] = 0.5
    values, ids = ranked(log_probs, 7)
    assert torch.equal(values, log_probs.topk(7).values)
    assert torch.equal(log_probs.gather(-1, ids), values)
    assert all(len(set(row)) == 7 for row in ids.flatten(0, 1).tolist())
    assert torch.equal(most_likely((values, ids))[1:, 0], log_probs.argmax(-1)[1:, 0])
    assert most_likely(ranked(log_probs, 12))[0, 0] == 128  # of equals the first
