import math

import pytest

from lm_polygraph_asmi.maths import operating_point
from lm_polygraph_asmi.maths.mask_plan import masks_for_coverage


@pytest.mark.parametrize(
    ("heads", "expected"), [(32, (0.15, 40)), (9, (0.09, 56)), (4, (0.09, 47))]
)
def test_stated_points(heads, expected):
    assert operating_point(heads) == expected


def test_the_papers_coverage_bound():
    assert masks_for_coverage(32, 0.10) == 62
    assert masks_for_coverage(32, 0.15) == 40
    assert pytest.approx(5.9, abs=0.05) == 32 * 0.9**16


@pytest.mark.parametrize("heads", [4, 8, 9, 14, 16, 24, 32, 40, 64])
def test_the_point_is_the_cheapest_admissible_corner(heads):
    def exceeds(rate: float) -> float:
        """P(more than a quarter of the heads masked), term by term."""
        return 1 - sum(
            math.comb(heads, k) * rate**k * (1 - rate) ** (heads - k) for k in range(heads // 4 + 1)
        )

    rate, num_masks = operating_point(heads)
    assert exceeds(rate) <= 0.05 < exceeds(rate + 0.01)
    assert heads * (1 - rate) ** num_masks <= 0.05 < heads * (1 - rate) ** (num_masks - 1)


@pytest.mark.parametrize("heads", [1, 3])
def test_too_few_heads(heads):
    with pytest.raises(ValueError, match="set mask_rate yourself"):
        operating_point(heads)


def test_what_is_given_stays_and_the_rest_follows():
    assert operating_point(32, num_masks=80) == (0.15, 80)
    # S is derived from the mask rate in force, not from the one it replaces.
    assert operating_point(32, mask_rate=0.10) == (0.10, 62)
    assert operating_point(2, mask_rate=0.5) == (0.5, 6)
    assert operating_point(32, 7, 0.3) == (0.3, 7)
