import math
from functools import partial

import pytest
import torch

from lm_polygraph_asmi.core.maths.agreement import semantic_agreement
from lm_polygraph_asmi.core.maths.information import disagreement, mutual_information
from lm_polygraph_asmi.core.maths.support import most_likely, ranked, top_k_coverage, union_support
from tests import brute_force

S, T, V = 6, 3, 40


@pytest.fixture
def log_probs() -> torch.Tensor:
    """In float64: what holds exactly is held against 1e-12, far above its rounding."""
    generator = torch.Generator().manual_seed(1)
    return (3 * torch.randn(S, T, V, generator=generator).double()).log_softmax(-1)


def agreement(log_probs, *how):
    rows = torch.randn(V, 6, generator=torch.Generator().manual_seed(3))
    return semantic_agreement(log_probs, rows, *how)


@pytest.mark.parametrize("top_k", [1, 3, 8, V, 3 * V])
def test_equals_plain_loops(log_probs, top_k):
    log_probs[:, 1] = log_probs[0, 1]  # equal, and as different as can be
    log_probs[:, 2] = torch.eye(S, V).log()
    fast = mutual_information(log_probs, top_k).tolist()
    slow = brute_force.mutual_information(log_probs, min(top_k, V))
    assert fast == pytest.approx(slow, abs=1e-12)
    assert fast[1:] == pytest.approx([0, math.log(S)], abs=1e-12)


def test_mean_divergence_from_the_mean_is_mutual_information(log_probs):
    found = disagreement(union_support(log_probs, 8))
    torch.testing.assert_close(found.divergence_from_mean.mean(0), found.mutual_information)
    torch.testing.assert_close(found.entropy_of_mean - found.mean_entropy, found.mutual_information)


def test_union_support_partitions_the_mass(log_probs):
    support, ones = union_support(log_probs, 4), torch.ones(S, T, dtype=torch.float64)
    torch.testing.assert_close(support.probs.sum(-1) + support.tail, ones)
    torch.testing.assert_close(support.top_probs.sum(-1), ones)
    for t in range(T):
        union = {i for s in range(S) for i in log_probs[s, t].topk(4).indices.tolist()}
        ids, found = support.token_ids[t, : len(union)].tolist(), support.probs[:, t]
        assert set(ids) == union
        assert not found[:, len(union) :].any()
        torch.testing.assert_close(found[:, : len(union)], log_probs[:, t, ids].double().exp())


def test_top_k_coverage(log_probs):
    coverage = top_k_coverage(log_probs, (1, 8, 64))
    assert coverage.shape == (S, T, 3)
    torch.testing.assert_close(coverage[..., 0], log_probs.double().exp().amax(-1))
    eight = log_probs.double().exp().sort(dim=-1, descending=True).values[..., :8].sum(-1)
    torch.testing.assert_close(coverage[..., 1], eight)
    torch.testing.assert_close(coverage[..., 2], torch.ones(S, T, dtype=torch.float64))


def test_probability_zero_is_no_information(log_probs):
    """Tokens no subnetwork can produce change nothing."""
    padded = torch.cat([log_probs, torch.full((S, T, 9), -math.inf)], dim=-1)
    found = mutual_information(padded, V + 9)
    torch.testing.assert_close(found, mutual_information(log_probs, V), atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_any_floating_point_type_will_do(log_probs, dtype):
    found = mutual_information(log_probs.to(dtype), 8)
    torch.testing.assert_close(found, mutual_information(log_probs, 8), atol=0.02, rtol=0)


def with_value(value, log_probs):
    log_probs[2, 1, 5] = value
    return log_probs


both_measures = pytest.mark.parametrize("measure", [mutual_information, agreement])


@both_measures
@pytest.mark.parametrize(
    ("change", "top_k", "error", "message"),
    [
        (lambda p: p, 0, ValueError, r"top_k \(K\) must be at least 1"),
        (lambda p: p, -1, ValueError, r"top_k \(K\) must be at least 1"),
        (lambda p: p[:1], 8, ValueError, r"num_masks \(S\) must be at least 2, got 1"),
        (lambda p: p + 0.05, 8, ValueError, "apply log_softmax first"),
        (lambda p: p - 0.05, 8, ValueError, "apply log_softmax first"),
        (partial(with_value, math.nan), 8, FloatingPointError, "NaN or infinity"),
        (partial(with_value, math.inf), 8, FloatingPointError, "NaN or infinity"),
    ],
)
def test_refusals(log_probs, measure, change, top_k, error, message):
    with pytest.raises(error, match=message):
        measure(change(log_probs), top_k)


@both_measures
def test_counts_stand_for_repeated_masks(log_probs, measure):
    counts = torch.tensor([3.0, 1, 1, 2, 1, 4])
    repeated = log_probs.repeat_interleave(counts.long(), dim=0)
    torch.testing.assert_close(measure(log_probs, 5, counts), measure(repeated, 5))


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
