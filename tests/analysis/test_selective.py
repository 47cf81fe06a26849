from itertools import permutations

import numpy as np
import pandas as pd
import pytest

from lm_polygraph_asmi.analysis import Labelled, selective
from tests.analysis import test_intervals as shared
from tests.analysis.test_intervals import ALL, ENTROPY, FRAGILITY, MSP, NAMES, WRONG

ANSWERS = Labelled(WRONG, NAMES, resamples=20)


def naive_curve(uncertainty, wrong):
    """Rejecting one by one, the most uncertain first. Without ties."""
    ranked = [w for _, w in sorted(zip(uncertainty, wrong, strict=True))]
    return [sum(ranked[:k]) / k for k in range(1, len(ranked) + 1)]


def test_risk_coverage_its_area_and_its_points_against_a_loop():
    expected = naive_curve(MSP, WRONG)
    np.testing.assert_allclose(selective.risk_coverage(MSP, WRONG), expected)
    assert selective.aurc(MSP, WRONG) == pytest.approx(np.mean(expected))
    for share, kept in ((1.0, 90), (0.9, 81), (0.7, 63), (0.5, 45), (0.1, 9), (0.001, 1)):
        assert selective.retained_error(MSP, WRONG, share) == pytest.approx(expected[kept - 1])


def test_ties_count_as_the_mean_over_all_their_orders():
    tied, wrong = np.array([2, 1, 2, 1, 2, 0]), np.array([1, 0, 0, 1, 1, 0])
    # A stable sort of each.
    orders = (sorted(order, key=lambda row: tied[row]) for order in permutations(range(6)))
    expected = np.mean([naive_curve(range(6), wrong[rows].tolist()) for rows in orders], axis=0)
    np.testing.assert_allclose(selective.risk_coverage(tied, wrong), expected)
    assert selective.aurc(tied, wrong) == pytest.approx(expected.mean())
    assert [selective.aurc(tied, np.full(6, kind)) for kind in (0, 1)] == [0, 1]


@pytest.mark.parametrize(
    ("msp", "fragility"), [(MSP, FRAGILITY), (MSP, ALL * 0), (ALL * 0, FRAGILITY)]
)
def test_quadrants_are_pandas_groups(msp, fragility):
    """An empty one is undefined."""
    found = selective.confident_but_fragile(msp, fragility, ANSWERS)
    table = pd.DataFrame({"msp": msp, "fragility": fragility, "wrong": WRONG})
    high = (table[column] > table[column].median() for column in ("msp", "fragility"))
    groups = table.groupby([*high])["wrong"].agg(["mean", "size"])
    groups = groups.reindex(pd.MultiIndex.from_product([[False, True]] * 2))
    np.testing.assert_allclose(found.error_rate.ravel(), groups["mean"])
    np.testing.assert_array_equal(found.count.ravel(), groups["size"].fillna(0))


@pytest.mark.parametrize("n", [90, 81])
def test_filter_curve_against_a_loop(n):
    msp, by, wrong = MSP[:n], FRAGILITY[:n], WRONG[:n]
    half = sorted(range(n), key=lambda row: msp[row])[: (n + 1) // 2]
    half.sort(key=lambda row: by[row])
    shares = [0.0, 0.1, 0.5, 0.9, 1.0]
    expected = [wrong[half[: max(1, round((1 - s) * len(half)))]].mean() for s in shares]
    np.testing.assert_allclose(selective.filter_curve(msp, by, wrong, shares), expected)
    # A constant filter keeps the confident error.
    assert selective.filter_curve(msp, np.ones(n), wrong, [0.5]) == pytest.approx(expected[0])


def test_a_filter_reports_all_its_errors():
    """Also where seven in ten tie at the lowest MSP, so that the confident half is no half."""
    for msp, confident in ((MSP, 45), (np.maximum(0, ALL - 62.0), 63)):
        found = selective.confident_filter(msp, FRAGILITY, ENTROPY, ANSWERS)
        assert found.confident_error == pytest.approx(WRONG[msp <= np.median(msp)].mean())
        shares = confident / 90, round(confident / 2) / 90
        assert (found.confident, found.coverage) == pytest.approx(shares)
        assert selective.confident_but_fragile(msp, FRAGILITY, ANSWERS).count[0].sum() == confident
        for error, by in ((found.by_fragility, FRAGILITY), (found.by_other, ENTROPY)):
            assert [error] == pytest.approx(selective.filter_curve(msp, by, WRONG, [0.5]))


def test_a_selector_reports_both_errors():
    answers = Labelled(WRONG, NAMES, resamples=20, seed=5)
    found = selective.global_selector(shared.CONTROLS, FRAGILITY, answers)
    assert list(found) == [0.7, 0.8, 0.9]
    expected = [shared.selected(ALL, False), shared.selected(ALL, True)]
    assert found[0.7][:2] == pytest.approx(expected)
