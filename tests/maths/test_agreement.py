import pytest
import torch

from lm_polygraph_asmi.core.maths.agreement import agreement_on_support, cosines, semantic_agreement
from lm_polygraph_asmi.core.maths.support import ranked, top_k_coverage, union_support
from tests import brute_force

S, T, V, D = 5, 2, 12, 6


@pytest.fixture
def log_probs() -> torch.Tensor:
    return (2 * torch.randn(S, T, V, generator=torch.Generator().manual_seed(2))).log_softmax(-1)


@pytest.fixture
def unembedding() -> torch.Tensor:
    return torch.randn(V, D, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("top_k", [1, 2, 7, V])
def test_equals_the_double_loop_over_pairs(log_probs, unembedding, top_k):
    fast = semantic_agreement(log_probs, unembedding, top_k)
    slow = brute_force.semantic_agreement(log_probs, unembedding, top_k)
    assert fast.tolist() == pytest.approx(slow, abs=1e-6)


@pytest.mark.parametrize("rows", [1, 5, 7, V])
def test_some_rows_of_the_kernel_at_a_time(log_probs, unembedding, rows):
    support = union_support(log_probs, 7)
    whole = agreement_on_support(support, unembedding)
    in_parts = agreement_on_support(support, unembedding, rows_at_once=rows)
    torch.testing.assert_close(in_parts, whole, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[1.0, 0], [-1.0, 0]], 0),  # opposite: cosine -1 is clipped
        ([[1.0, 2.0], [2.0, 4.0]], 1),  # parallel rows of the output projection count as one token
        ([[1.0, 0], [1.0, 1.0]], 0.5**0.5),
    ],
)
def test_certain_of_two_tokens(rows, expected):
    found = semantic_agreement(torch.eye(2)[:, None].log(), torch.tensor(rows), 1).item()
    assert found == pytest.approx(expected)


def test_a_zero_row_agrees_with_itself_alone(log_probs, unembedding):
    unembedding[4] = 0
    assert torch.isfinite(semantic_agreement(log_probs, unembedding, 8)).all()
    assert cosines(unembedding)[4].abs().max() == 0
    certain = torch.full((S, 1, V), -torch.inf)
    certain[..., 4] = 0
    assert semantic_agreement(certain, unembedding, 1).item() == 1


def test_cosines_of_16_bits_are_those_of_the_same_numbers_in_32():
    rows = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows[0, 3] = 0
    torch.testing.assert_close(cosines(rows), cosines(rows.float()), atol=1e-6, rtol=0)
    assert (cosines(rows)[0, 3] == 0).all()


def test_one_ranking_serves_support_and_coverage():
    log_probs = torch.randn(4, 3, 40, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    by_rank = ranked(log_probs, 20)
    shared, alone = union_support(log_probs, 5, by_rank), union_support(log_probs, 5)
    for name in ("token_ids", "probs", "tail", "top_probs"):
        assert torch.equal(getattr(shared, name), getattr(alone, name)), name
    covered = top_k_coverage(log_probs, (1, 20), by_rank)
    assert torch.equal(covered, top_k_coverage(log_probs, (1, 20)))
