"""Labelled answers are checked where they are made, and their columns where they are passed."""

import numpy as np
import pytest

from lm_polygraph_asmi.analysis import Labelled


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"wrong": [0, 1]}, "clusters must have a key for every row"),
        ({"wrong": [], "clusters": []}, "there is no row"),
        ({"clusters": ["a"]}, "expected wrong, quality or both"),
        ({"wrong": [0, 1], "clusters": ["a"]}, "wrong has 2 values for 1 cluster keys"),
        ({"quality": [0.5], "clusters": list("ab")}, "quality has 1 values for 2 cluster keys"),
        ({"wrong": [0.5], "clusters": ["a"]}, "wrong must contain True and False"),
        ({"wrong": [np.nan], "clusters": ["a"]}, "wrong has values that are not finite"),
        ({"quality": [np.inf], "clusters": ["a"]}, "quality has values that are not finite"),
    ],
)
def test_labels_that_are_none(made, message):
    with pytest.raises(ValueError, match=message):
        Labelled(**made)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([1.0], "score has 1 values for 2 cluster keys"),
        ([1.0, np.nan], "score has values that are not finite"),
        (["high", "low"], "score must contain numbers"),
    ],
)
def test_columns_that_do_not_fit(column, message):
    with pytest.raises(ValueError, match=message):
        Labelled([0, 1], ["a", "b"]).columns(score=column)


def test_quality_alone_says_nothing_of_errors():
    answers = Labelled(quality=[0.2, 0.9], clusters=["a", "a"])
    assert (answers.quality.tolist(), answers.n_clusters) == ([0.2, 0.9], 1)
    with pytest.raises(ValueError, match="no correctness labels: pass wrong"):
        assert answers.wrong
    assert Labelled([True, False], ["b", "a"]).quality.tolist() == [0, 1]
