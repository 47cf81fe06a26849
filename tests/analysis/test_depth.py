import numpy as np
import pytest

from lm_polygraph_asmi.analysis import Labelled, Sweep, depth, depth_selection, normalised_prr
from tests.analysis.simulation import keys


def sweep(rng, noise, clusters=30, size=3) -> Sweep:
    """A score per level of noise: less noise, better depth."""
    quality = rng.random(clusters * size)
    scores = [-quality + level * rng.normal(size=len(quality)) for level in noise]
    return Sweep(np.array(scores), Labelled(quality=quality, clusters=keys(clusters, size)))


@pytest.fixture
def halves_seen(monkeypatch):
    """Counts by which `depth_selection` weighs the rows, in the order of its calls."""
    seen, weighted_prr = [], depth.weighted_prr

    def spy(scores, quality, samples):
        samples = list(samples)
        seen.extend(samples)
        return weighted_prr(scores, quality, iter(samples))

    monkeypatch.setattr(depth, "weighted_prr", spy)
    monkeypatch.setattr(depth, "SPLITS", 60)
    return seen


def test_halves_are_disjoint_in_clusters_and_even(halves_seen):
    rng = np.random.default_rng(1)
    groups = [sweep(rng, [1.0, 2.0], clusters=7) for _ in range(2)]
    for seed in (1, 1, 2):
        for group in groups:
            group.answers.seed = seed
        depth_selection(groups)
    first, second, twin, _, again, _, _, _, other, *_ = halves_seen
    by_cluster = first.reshape(-1, 7, 3)
    for found, expected in (
        # Settings over the same clusters are halved alike: else a question would choose the depth
        # for one model and judge it for another.
        (twin, first), (again, first),  # the same seed
        (first + second, 1), (by_cluster.min(2), by_cluster.max(2)),
        (by_cluster[:, :, 0].sum(1), 3),  # of 7 clusters
    ):  # fmt: skip
        np.testing.assert_array_equal(found, expected)
    assert not np.array_equal(first, other)
    # Random: another half in almost every split, and each cluster in about 3 of 7 of them.
    assert len(np.unique(first, axis=0)) > 20
    np.testing.assert_allclose(by_cluster.mean((0, 2)), 3 / 7, atol=4 * np.sqrt(0.25 / len(first)))


def test_selection_against_a_loop(halves_seen):
    """Close depths, so that choices vary; settings of other sizes, and one without errors."""
    rng = np.random.default_rng(1)
    groups = [sweep(rng, [0.9, 1.0, 1.0], clusters) for clusters in (10, 13)]
    silent = groups[1]._replace(answers=Labelled([0] * 39, groups[1].answers.clusters))
    found = depth_selection([*groups, silent])

    def prr(rows):
        """(settings, depths), of some rows of each setting."""
        return np.array([
            [normalised_prr(s[r], g.answers.quality[r]) for s in g.scores]
            for g, r in zip(groups, rows, strict=True)
        ])  # fmt: skip

    np.testing.assert_allclose(found.groups[:2], whole := prr([slice(None)] * 2))
    assert np.isnan(found.groups[2]).all()
    np.testing.assert_allclose(found.aggregate, whole.mean(0))
    assert found.chosen == np.argmax(whole.mean(0)) != np.argmax(whole[0])
    selected, regrets = [], []
    for split in range(depth.SPLITS):
        first, second = (
            prr([np.flatnonzero(halves_seen[place + half][split]) for place in (0, 2)]).mean(0)
            for half in (0, 1)
        )
        selected.append(int(np.argmax(first)))
        regrets.append(second.max() - second[selected[-1]])
    np.testing.assert_allclose(found.selected, [selected.count(d) / depth.SPLITS for d in range(3)])
    expected = np.mean(regrets), np.mean(np.array(regrets) < 1e-12)
    assert (found.mean_regret, found.no_regret) == pytest.approx(expected)
    assert (len(set(selected)), 0 < found.no_regret < 1) == (3, True)


def test_splits_without_a_defined_half_do_not_count():
    """One error in all: a half without it has no PRR, and says nothing of a depth."""
    scores, rows = np.stack([np.arange(40.0), -np.arange(40.0)]), np.arange(40)
    one, two = (
        Sweep(scores, Labelled(np.isin(rows, wrong), keys(20, 2))) for wrong in ([7], [7, 21])
    )
    with pytest.raises(ValueError, match="undefined on a half of every split"):
        depth_selection([one])
    found = depth_selection([two])
    # Both errors, in different clusters, fall into different halves about half of the time.
    assert 0.3 < found.splits / depth.SPLITS < 0.7
    assert found.selected.sum() == pytest.approx(1)
    assert np.isfinite(found.mean_regret)
