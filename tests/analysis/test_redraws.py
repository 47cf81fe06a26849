import numpy as np
import pytest

from lm_polygraph_asmi.analysis import (
    cluster_interval,
    normalised_prr,
    rank_correlations,
    redraw_stability,
)


def test_stability_of_redraws():
    rng = np.random.default_rng(0)
    quality = rng.random(50)
    scores = -quality + rng.normal(scale=0.3, size=(5, 50))
    found = redraw_stability(scores, quality)
    prr = [normalised_prr(row, quality) for row in scores]
    assert found.mean == pytest.approx(np.mean(prr))
    assert found.sd == pytest.approx(np.std(prr, ddof=1))
    assert (found.low, found.high) == (min(prr), max(prr))
    ranks = scores.argsort(1).argsort(1)
    pairs = [np.corrcoef(ranks[i], ranks[j])[0, 1] for i in range(5) for j in range(i)]
    assert found.rank_correlation == pytest.approx(np.mean(pairs))


def test_rank_correlation_of_equal_and_reversed_redraws():
    row = np.arange(10.0)
    found = rank_correlations([row, row**3, -row])
    np.testing.assert_allclose(found, [1, -1, -1])


def test_one_redraw_is_no_redraw():
    with pytest.raises(ValueError, match=r"\(R >= 2, n\)"):
        redraw_stability([[1.0, 2.0]], [0.0, 1.0])


def test_clusters_are_drawn_whole():
    """Four rows a cluster that are copies of one another carry no more evidence than one."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=60)
    copies = np.repeat(values, 4)
    alone = cluster_interval(lambda rows: values[rows].mean(), [str(i) for i in range(60)])
    keys = [str(i) for i in range(60) for _ in range(4)]
    clustered = cluster_interval(lambda rows: copies[rows].mean(), keys)
    ignored = cluster_interval(lambda rows: copies[rows].mean(), [str(i) for i in range(240)])
    assert clustered.value == pytest.approx(alone.value)
    width, expected = clustered.high - clustered.low, alone.high - alone.low
    assert width == pytest.approx(expected, rel=0.15)
    assert ignored.high - ignored.low == pytest.approx(expected / 2, rel=0.15)
    # The interval is that of the mean.
    assert width == pytest.approx(2 * 1.96 * values.std() / np.sqrt(60), rel=0.15)


def test_an_undefined_statistic_has_no_interval():
    found = cluster_interval(lambda _: float("nan"), ["a", "b"])
    assert all(np.isnan(found))
    assert np.isnan(cluster_interval(lambda rows: rows.mean(), ["a", "a"]).low)
