import numpy as np
import pytest
from scipy.special import entr
from scipy.stats import entropy

from lm_polygraph_asmi.analysis import Clustered, coverage_intervals
from lm_polygraph_asmi.analysis.coverage import TOP_K, coverage_by_band, tail_entropy_bound
from tests.analysis.simulation import ends


def tokens(n=400):
    """MI_t, and masses that grow with K and shrink with MI_t."""
    rng = np.random.default_rng(0)
    information = rng.exponential(size=n)
    missing = 0.2 * rng.random((n, 1)) * np.minimum(information, 1)[:, None]
    return information, 1 - missing / np.sqrt(TOP_K)


def test_the_bound_bounds():
    """Whatever the mass up to m, and no looser; the paper has 0.14 nats for 4.5 % outside."""
    assert tail_entropy_bound(0.045) == pytest.approx(0.14, abs=0.005)
    limits = np.linspace(0, 1, 101)
    bounds = tail_entropy_bound(limits)
    for limit, bound in zip(limits, bounds, strict=True):
        masses = np.linspace(0, limit, 50)
        # What one bucket adds to an entropy, scipy's here.
        most = (entropy([masses, 1 - masses]) - entr(1 - masses)).max()
        assert most - 1e-12 <= bound <= most + 1e-3
    assert (np.diff(bounds) >= 0).all()
    np.testing.assert_array_equal(tail_entropy_bound([0.0, -1e-9]), 0)  # rounding below zero


def test_bands_under_ties_against_all_orders():
    """70 % zeros: what the bands hold on average over the orders of equal tokens.

    Of 43 tokens a decile has five: 4.3, and a rank that is cut belongs to the band.
    """
    information, coverage = tokens(43)
    information[:30] = 0
    found = coverage_by_band(information, coverage)
    rng, drawn = np.random.default_rng(3), []
    for _ in range(4000):
        order = np.lexsort([rng.random(43), information])
        drawn.append([coverage[order[:5]].mean(0), coverage[order[19:24]].mean(0)])
    np.testing.assert_allclose(found.iloc[:2, 1:8].astype(float), np.mean(drawn, 0), atol=5e-3)
    assert found["n"].to_dict() == {
        "low (bottom decile)": 5, "mid (P45 to P55)": 5, "high (top decile)": 5, "all tokens": 43,
    }  # fmt: skip
    top = np.argsort(information)[38:]
    expected = coverage[top].mean(0), coverage.mean(0)
    np.testing.assert_allclose(found[list(TOP_K)].iloc[2:].astype(float), expected)
    np.testing.assert_allclose(found["tail entropy bound"], tail_entropy_bound(1 - found[64]))


def test_bands_over_answers_against_a_loop():
    information, mass = tokens(90)
    information = information.round(1)  # ties
    parts = np.arange(3, 90, 3)
    answers, covered = np.split(information, parts), np.split(mass, parts)
    names = [str(i // 2) for i in range(30)]
    found = coverage_intervals(answers, covered, Clustered(names, resamples=30))
    drawn = []
    for counts in np.concatenate([*Clustered(names, resamples=30).draws()]):
        rows = np.repeat(np.arange(30), counts)
        columns = (np.concatenate([column[i] for i in rows]) for column in (answers, covered))
        table = coverage_by_band(*columns)
        drawn.append(table[list(TOP_K)].to_numpy(dtype=float))
    for place, (band, found_ends) in enumerate(found.items()):
        assert band == table.index[place]
        own = np.array([one[place] for one in drawn])
        np.testing.assert_allclose(found_ends.T, [ends(column, 15) for column in own.T])
    alone = coverage_intervals(answers, covered, Clustered(["one"] * 30))
    assert all(np.isnan(band).all() for band in alone.values())
