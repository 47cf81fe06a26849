import math

import pytest
import torch

from lm_polygraph_asmi.core.maths import response_diversity
from lm_polygraph_asmi.core.scores import adaptive_gate
from tests import brute_force


def test_equals_the_loop_over_pairs():
    embeddings = torch.randn(10, 16, generator=torch.Generator().manual_seed(0))
    embeddings *= torch.logspace(-4, 4.8, 10)[:, None]  # lengths do not matter
    expected = brute_force.response_diversity(embeddings)
    assert response_diversity(embeddings) == pytest.approx(expected, abs=1e-9)
    # Any float16 dot product of these would be infinite.
    states = torch.full((3, 2560), 300.0, dtype=torch.bfloat16)
    assert response_diversity(states) == pytest.approx(0, abs=1e-9)


def test_refusals():
    for number in (0, 1):
        with pytest.raises(ValueError, match="at least 2 responses"):
            response_diversity(torch.ones(number, 3))
    with pytest.raises(FloatingPointError, match="NaN or infinity"):
        response_diversity(torch.tensor([[1.0, float("inf")], [1.0, 0.0]]))
    for diversity in (math.nan, math.inf):
        with pytest.raises(ValueError, match="diversity must be finite"):
            adaptive_gate(diversity)


@pytest.mark.parametrize("diversity", [0.0, 0.1, 0.3, 0.7, 2.0])
def test_gate_is_the_logistic(diversity):
    expected = 1 / (1 + math.exp(-10 * (0.3 - diversity)))
    assert adaptive_gate(diversity) == pytest.approx(expected)
    assert adaptive_gate(diversity, 0.5, 1e6) == (diversity < 0.5)
