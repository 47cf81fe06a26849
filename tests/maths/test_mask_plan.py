"""p and S that are derived from the number of heads, against the binomial term by term."""

import math

import pytest

from lm_polygraph_asmi.core.mask_plan import (
    heads_masked_at_once,
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
    assert gaussian == pytest.approx(
        heads * rate + 1.6449 * math.sqrt(heads * rate * (1 - rate)), abs=1e-3
    )


POINTS = {
    (32, None, None): (0.15, 40), (9, None, None): (0.09, 56), (4, None, None): (0.09, 47),
    (32, 80, None): (0.15, 80), (32, 7, 0.3): (0.3, 7), (2, None, 0.5): (0.5, 6),
    # S is derived from the mask rate in force, not from the one it replaces.
    (32, None, 0.10): (0.10, 62),
    (4, None, 0.99): (0.99, 2),  # one mask would do, and has nothing to disagree with
}  # fmt: skip
"""H, S and p as they are given, and the point: the paper's first."""


def test_stated_points_and_what_follows_from_values_that_are_given():
    assert {given: operating_point(*given) for given in POINTS} == POINTS
    for heads in (1, 3):
        with pytest.raises(ValueError, match="mask_rate"):
            operating_point(heads)
