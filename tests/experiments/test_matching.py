import math

import pytest
import torch

from lm_polygraph_asmi.experiments.matching import matching_scale, relative_change
from lm_polygraph_asmi.maths import divergence


def test_relative_change_by_loops():
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(3, 5, generator=generator)
    changed = plain + torch.randn(7, 3, 5, generator=generator)
    changed[:, 2] = plain[2]
    found = relative_change(plain, changed)
    for t in range(3):
        squares = [sum((float(a) - float(b)) ** 2 for a, b in zip(row[t], plain[t], strict=True))
                   for row in changed]  # fmt: skip
        size = math.sqrt(sum(squares) / 7)
        length = math.sqrt(sum(float(x) ** 2 for x in plain[t]))
        assert float(found[t]) == pytest.approx(size / length, abs=1e-6)
    assert found[2] == 0
    assert relative_change(torch.zeros(1, 2), torch.zeros(4, 1, 2)) == 0


def test_divergence_by_loops():
    p, q = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.2, 0.7, 0.1]])
    expected = 0.5 * math.log(0.5 / 0.2) + 0.5 * math.log(0.5 / 0.7)
    assert float(divergence(p.log(), q.log())) == pytest.approx(expected, abs=1e-6)
    assert divergence(p.log(), p.log()) == 0


@pytest.mark.parametrize("start", [1.0, 1e-2, 37.0])
@pytest.mark.parametrize("effect", [lambda d: 0.3 * d**2, lambda d: 2 * (1 - math.exp(-(d**3)))])
def test_the_scale_of_an_effect(effect, start):
    found = matching_scale(effect, 0.5, start)
    assert effect(found) == pytest.approx(0.5, rel=1e-3)


def test_an_effect_that_is_never_reached():
    assert matching_scale(lambda d: d / (1 + d), 2.0, 1.0) is None
    assert matching_scale(lambda _: 0.0, 2.0, 1.0) is None
    with pytest.raises(ValueError, match="above 0"):
        matching_scale(lambda d: d, 0.0, 1.0)


@pytest.mark.parametrize(
    ("effect", "most"),
    [(lambda d: d**2, 2), (lambda d: d**1.6 / (1 + 0.1 * d), 5), (lambda d: d if d > 3 else 0, 40)],
)
def test_few_tries_are_needed(effect, most):
    """All that a search costs: two where the effect is the scale squared, as near zero. One that is
    no power of it is bracketed."""
    tried = []
    found = matching_scale(lambda d: tried.append(d) or effect(d), 5.0, 0.7)
    assert effect(found) == pytest.approx(5, rel=1e-3)
    assert len(tried) <= most
    assert len(set(tried)) == len(tried)
