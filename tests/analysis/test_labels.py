import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from lm_polygraph_asmi.analysis import Interval, auroc, auroc_by_label, label_noise, strata
from lm_polygraph_asmi.analysis.labels import THRESHOLDS, same_order
from tests.analysis.simulation import monte_carlo_error

NAN = float("nan")


def test_every_judge_is_scikit_learns():
    rng = np.random.default_rng(0)
    scores = {"a": rng.normal(size=60), "b": rng.normal(size=60)}
    qualities = {"one": rng.random(60), "all alike": np.ones(60)}
    found = auroc_by_label(scores, qualities)
    assert list(found) == [("one", threshold) for threshold in THRESHOLDS]
    for (metric, threshold), by_method in found.items():
        for method, value in by_method.items():
            wrong = qualities[metric] < threshold
            assert value == pytest.approx(roc_auc_score(wrong, scores[method]))
    with pytest.raises(ValueError, match="quality has values that are not finite"):
        auroc_by_label(scores, {"one": np.full(60, np.nan)})


def test_orders_of_methods():
    first = {"a": 0.9, "b": 0.7, "c": 0.6}
    assert same_order(first, {"c": 0.1, "b": 0.2, "a": 0.3}) == 1  # by name, not by place
    assert same_order(first, {"a": 0.6, "b": 0.7, "c": 0.9}) == -1
    assert same_order(first, {"a": 0.7, "b": 0.9, "c": 0.6}) == pytest.approx(1 / 3)
    assert np.isnan(same_order(first, dict.fromkeys("abc", 0.5)))
    with pytest.raises(ValueError, match="only in one: c, d"):
        same_order(first, {"a": 0.1, "b": 0.2, "d": 0.3})


def test_wrong_labels_shrink_auroc():
    """The law behind `label_noise`, on labels of which known shares are wrong."""
    rng, n = np.random.default_rng(1), 200_000
    called = rng.random(n) < 0.5
    e0, e1 = 0.1, 0.25
    wrong = np.where(rng.random(n) < np.where(called, e1, e0), ~called, called)
    score = wrong + rng.normal(size=n)
    behind = auroc(score, wrong) - 0.5
    seen = auroc(score, called) - 0.5
    assert seen == pytest.approx((1 - e0 - e1) * behind, abs=3 * monte_carlo_error(0.5, n))


@pytest.mark.parametrize(
    ("interval", "noise"),
    [
        (Interval(0.7, 0.6, 0.8), 0.5),  # half of the gap would be left, as wide as the interval
        (Interval(0.3, 0.25, 0.4), 0.5),  # also below chance
        (Interval(0.55, 0.45, 0.65), -0.5),  # labels half noise may hide 0.6, whose low is 0.5
        (Interval(0.5, 0.4, 0.6), NAN),
        (Interval(0.7, NAN, NAN), NAN),
    ],
)
def test_noise_that_would_change_a_verdict(interval, noise):
    found = label_noise(interval)
    assert found == pytest.approx(noise, nan_ok=True)
    if found > 0:
        shrunk = 0.5 + (interval.value - 0.5) * (1 - found)
        width = interval.value - interval.low if interval.value > 0.5 else interval.high - 0.3
        assert abs(shrunk - 0.5) == pytest.approx(width)


def test_strata_keep_equals_together():
    assert strata([5, 1, 3, 2, 6, 4]).tolist() == [2, 0, 1, 0, 2, 1]
    found = strata([1] * 7 + [2, 3, 4])
    assert np.ptp(found[:7]) == 0
    assert set(found.tolist()) == set(range(found.max() + 1))
    assert strata([2, 2, 2]).tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="not finite"):
        strata([1.0, NAN])
