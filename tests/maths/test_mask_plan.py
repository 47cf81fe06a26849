"""p and S that are derived from the number of heads, against the binomial term by term."""

import math

import pytest

from lm_polygraph_asmi.core.mask_plan import (
    flops_ratio,
    heads_masked_at_once,
    masks_for_coverage,
    operating_point,
)


def exceeds(heads: int, rate: float, most: int) -> float:
    """P(more than so many heads masked), term by term."""
    terms = (math.comb(heads, k) * rate**k * (1 - rate) ** (heads - k) for k in range(most + 1))
    return 1 - sum(terms)


@pytest.mark.parametrize("heads", [4, 8, 9, 14, 16, 24, 32, 40, 64])
def test_the_point_is_the_cheapest_admissible_corner(heads):
    rate, num_masks = operating_point(heads)
    at_most, gaussian = heads_masked_at_once(heads, rate)
    assert exceeds(heads, rate, heads // 4) <= 0.05 < exceeds(heads, rate + 0.01, heads // 4)
    assert exceeds(heads, rate, at_most) <= 0.05 < exceeds(heads, rate, at_most - 1)
    assert heads * (1 - rate) ** num_masks <= 0.05 < heads * (1 - rate) ** (num_masks - 1)
    spread = math.sqrt(heads * rate * (1 - rate))
    assert gaussian == pytest.approx(heads * rate + 1.6449 * spread, abs=1e-3)


def test_stated_points_and_what_follows_from_values_that_are_given():
    assert [operating_point(heads) for heads in (32, 9, 4)] == [(0.15, 40), (0.09, 56), (0.09, 47)]
    assert operating_point(32, num_masks=80) == (0.15, 80)
    # S is derived from the mask rate in force, not from the one it replaces.
    assert operating_point(32, mask_rate=0.10) == (0.10, masks_for_coverage(32, 0.10)) == (0.1, 62)
    assert operating_point(2, mask_rate=0.5) == (0.5, 6)
    assert operating_point(32, 7, 0.3) == (0.3, 7)
    for heads in (1, 3):
        with pytest.raises(ValueError, match="mask_rate"):
            operating_point(heads)


def test_the_cost_is_counted_in_layers():
    """Of 36 layers 22 run once, the others once per mask."""
    assert flops_ratio(36, 22, 40) == (22 + 14 * 40) / 36
    assert flops_ratio(4, 0, 1) == 1
