import numpy as np

from lm_polygraph_asmi.experiments.analysis.choice import (
    ablations,
    critical_first,
    extremes,
)


def test_extremes_are_disjoint_and_ties_go_by_order():
    high, low = extremes([0.1, 0.5, 0.5, np.nan, 0.0, 0.9], 2)
    assert high.tolist() == [5, 1]
    assert low.tolist() == [4, 0]
    high, low = extremes([0.2] * 5, 200)
    assert (high.tolist(), low.tolist()) == ([0, 1], [2, 3])


def test_orders_of_heads():
    criticality = np.array([[0.1, -0.2, np.nan, 0.1], [0, 3, 1, 2]])
    assert critical_first(criticality).tolist() == [[0, 3, 1, 2], [1, 3, 2, 0]]


def test_ablations_take_the_first_heads():
    masks = ablations([[2, 0, 1]], [0, 1, 3])
    assert masks.tolist() == [[[1, 1, 1], [1, 1, 0], [0, 0, 0]]]
