"""Semantic agreement and the diversity of responses, against loops over pairs."""

import math

import pytest
import torch

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.core.maths import (
    agreement_on_support,
    response_diversity,
    semantic_agreement,
    union_support,
)
from lm_polygraph_asmi.core.scores import adaptive_gate, discount
from tests import brute_force

S, T, V, D = 5, 2, 12, 6

in_32_and_16_bits = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@in_32_and_16_bits
@pytest.mark.parametrize("top_k", [1, 2, 7, V])
def test_agreement_equals_the_double_loop_over_pairs(top_k, dtype):
    """Also in parts of the kernel, with parallel and opposite rows, and with one of zeros."""
    generator = torch.Generator().manual_seed(2)
    log_probs = (2 * torch.randn(S, T, V, generator=generator)).log_softmax(-1)
    unembedding = torch.randn(V, D, generator=generator).to(dtype)
    unembedding[:3] = unembedding[3] * torch.tensor([[2.0], [-1.0], [0.0]])
    fast = semantic_agreement(log_probs, unembedding, top_k)
    slow = brute_force.semantic_agreement(log_probs, unembedding, top_k)
    assert fast.tolist() == pytest.approx(slow, abs=1e-6)
    support = union_support(log_probs, top_k)
    for rows in (1, 5, V):
        in_parts = agreement_on_support(support, unembedding, rows_at_once=rows)
        torch.testing.assert_close(in_parts, fast, rtol=0, atol=1e-7)


@in_32_and_16_bits
def test_diversity_equals_the_loop_over_pairs(dtype):
    """Lengths do not matter; float16 dot products of the longest would be infinite."""
    embeddings = torch.randn(10, 16, generator=torch.Generator().manual_seed(0))
    embeddings = (embeddings * torch.logspace(-4, 4.8, 10)[:, None]).to(dtype)
    expected = brute_force.response_diversity(embeddings)
    assert response_diversity(embeddings) == pytest.approx(expected, abs=1e-9)


def one_mask(probs):
    return agreement_on_support(union_support(probs.log(), top_k=1), torch.eye(2))


@pytest.mark.parametrize(
    ("function", "value", "error", "word"),
    [
        (response_diversity, torch.ones(1, 3), ValueError, "at least 2"),
        (one_mask, torch.ones(1, 1, 2) / 2, ValueError, "two or more, got 1"),
        (response_diversity, torch.full((2, 2), math.inf), FloatingPointError, "NaN"),
        (adaptive_gate, math.nan, ValueError, "diversity"),
        (discount, ASMIConfig(method="adapt"), ValueError, "diversity"),
    ],
)
def test_refusals(function, value, error, word):
    with pytest.raises(error, match=word):
        function(value)
