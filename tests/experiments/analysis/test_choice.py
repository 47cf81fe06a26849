import numpy as np

from lm_polygraph_asmi.experiments.analysis.choice import (
    ablations,
    critical_first,
    critical_last,
    extremes,
    matched_pairs,
)


def test_extremes_are_disjoint_and_ties_go_by_order():
    high, low = extremes([0.1, 0.5, 0.5, np.nan, 0.0, 0.9], 2)
    assert high.tolist() == [5, 1]
    assert low.tolist() == [4, 0]
    high, low = extremes([0.2] * 5, 200)
    assert (high.tolist(), low.tolist()) == ([0, 1], [2, 3])
    high, low = extremes([3.0, 2.0, 1.0, 0.0], 1, [False, True, True, False])
    assert (high.tolist(), low.tolist()) == ([1], [2])


def test_pairs_have_like_entropy_and_no_token_twice():
    rng = np.random.default_rng(0)
    entropy = rng.exponential(size=400)
    mi = entropy * rng.uniform(0.5, 1.5, 400)
    high, low = matched_pairs(mi, entropy, 50)
    assert len(high) == len(low) > 20
    assert (np.abs(entropy[high] - entropy[low]) <= 0.1).all()
    assert len({*high, *low}) == 2 * len(high)
    assert mi[high].min() > np.median(mi) > mi[low].max()
    # What is not matched: the extremes differ in entropy by far.
    far_high, far_low = extremes(mi, 50)
    assert entropy[far_high].mean() - entropy[far_low].mean() > 1
    assert matched_pairs([1.0, 0.0], [2.0, 1.0])[0].tolist() == []
    # The nearest of those within the caliper, and then the next that nobody has taken.
    high, low = matched_pairs([4.0, 3.0, 0.0, 1.0], [1.0, 1.0, 1.09, 1.02])
    assert (high.tolist(), low.tolist()) == ([0, 1], [3, 2])


def test_orders_of_heads():
    criticality = np.array([[0.1, -0.2, np.nan, 0.1], [0, 3, 1, 2]])
    assert critical_first(criticality).tolist() == [[0, 3, 1, 2], [1, 3, 2, 0]]
    assert critical_last(criticality).tolist() == [[1, 0, 3, 2], [0, 2, 3, 1]]


def test_ablations_take_the_first_heads():
    masks = ablations([[2, 0, 1]], [0, 1, 3])
    assert masks.tolist() == [[[1, 1, 1], [1, 1, 0], [0, 0, 0]]]
