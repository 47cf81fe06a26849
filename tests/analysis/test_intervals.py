"""Every statistic with an interval, against a plain loop over resamples of whole clusters."""

import dataclasses
from functools import cache
from itertools import permutations

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from lm_polygraph_asmi import analysis
from lm_polygraph_asmi.analysis import (
    Clustered,
    Labelled,
    cluster_interval,
    prr_intervals,
    selective,
)
from lm_polygraph_asmi.analysis.clusters import bootstrap_interval
from lm_polygraph_asmi.analysis.distinct import error_probability, residual
from tests.analysis.simulation import ends, keys

RNG = np.random.default_rng(0)
MSP, FRAGILITY = RNG.normal(size=(2, 90))
ENTROPY = MSP + 0.5 * RNG.normal(size=90)
QUALITY = 1 / (1 + np.exp(MSP + FRAGILITY + RNG.normal(size=90)))
WRONG = QUALITY < 0.4
NAMES = keys(30, 3)
CONTROLS = np.column_stack([MSP, ENTROPY])
FEATURES = np.column_stack([CONTROLS, FRAGILITY])
TOKENS = [score + RNG.normal(size=RNG.integers(1, 5)) for score in FRAGILITY]
ALL = np.arange(90)


def area(rows, score):
    return roc_auc_score(WRONG[rows], score[rows])


def prr(rows, score):
    return analysis.normalised_prr(score[rows], QUALITY[rows])


def naive_curve(uncertainty, wrong):
    """Rejecting one by one, the most uncertain first. Ties are copies of one row, or none."""
    ranked = [w for _, w in sorted(zip(uncertainty, wrong, strict=True))]
    return [sum(ranked[:k]) / k for k in range(1, len(ranked) + 1)]


def gap(rows):
    """Medians anew in every resample."""
    msp, fragility, wrong = MSP[rows], FRAGILITY[rows], WRONG[rows]
    confident, fragile = msp <= np.median(msp), fragility > np.median(fragility)
    return wrong[confident & fragile].mean() - wrong[confident & ~fragile].mean()


ANSWER = [row for row in ALL[np.median(MSP) >= MSP] for _ in TOKENS[row]]
"""Rows of the tokens of confident answers."""
SCORES = np.concatenate([TOKENS[row] for row in dict.fromkeys(ANSWER)])
LABELS, OF_TOKENS = WRONG[ANSWER], [NAMES[row] for row in ANSWER]


def token_gap(rows):
    scores, labels = SCORES[rows], LABELS[rows]
    high = scores > np.median(scores)
    return labels[high].mean() - labels[~high].mean()


def filtered(rows, by):
    """Copies of a row agree in everything, so that their order is nothing to the loop."""
    half = sorted(rows[MSP[rows] <= np.median(MSP[rows])], key=lambda row: by[row])
    return WRONG[half[: max(1, round(0.5 * len(half)))]].mean()


@cache
def fitted(with_signal):
    features = FEATURES if with_signal else CONTROLS
    return error_probability(features, WRONG, Labelled(WRONG, NAMES, seed=5).folds())


def selected(rows, with_signal):
    """Error rate of the 0.7 least likely to be wrong."""
    chance = fitted(with_signal)
    return WRONG[sorted(rows, key=lambda row: chance[row])[: round(0.7 * len(rows))]].mean()


LEFT = residual(FRAGILITY, CONTROLS, Labelled(WRONG, NAMES, seed=5).folds())


STATISTICS = {
    "of rows": (
        lambda a: cluster_interval(lambda rows: np.median(MSP[rows]), a),
        lambda rows: np.median(MSP[rows]),
    ),
    "of counts": (
        lambda a: bootstrap_interval(MSP.mean(), lambda counts: counts @ MSP / 90, a),
        lambda rows: MSP[rows].mean(),
    ),
    "PRR": (lambda a: prr_intervals({"a": MSP}, a)[0]["a"], lambda rows: prr(rows, MSP)),
    "difference of PRR": (
        lambda a: prr_intervals({"a": MSP, "b": FRAGILITY}, a, [("b", "a")])[1]["b", "a"],
        lambda rows: prr(rows, FRAGILITY) - prr(rows, MSP),
    ),
    "AUROC": (lambda a: analysis.auroc_interval(MSP, a), lambda rows: area(rows, MSP)),
    "AUROC of one of several": (
        lambda a: analysis.error_separation(TOKENS, {"a": MSP, "b": ENTROPY}, a).auroc["b"],
        lambda rows: area(rows, ENTROPY),
    ),
    "difference of AUROC": (
        lambda a: analysis.auroc_difference(MSP, FRAGILITY, a),
        lambda rows: area(rows, MSP) - area(rows, FRAGILITY),
    ),
    "difference of AURC": (
        lambda a: analysis.aurc_difference(MSP, FRAGILITY, a),
        lambda rows: (
            np.mean(naive_curve(MSP[rows], WRONG[rows]))
            - np.mean(naive_curve(FRAGILITY[rows], WRONG[rows]))
        ),
    ),
    "gap": (lambda a: analysis.confident_but_fragile(MSP, FRAGILITY, a).gap, gap),
    # Clusters are drawn with all tokens of their confident answers.
    "gap of tokens": (lambda a: analysis.token_null(MSP, TOKENS, a).gap, token_gap, OF_TOKENS),
    "AUROC of tokens": (
        lambda a: analysis.token_null(MSP, TOKENS, a).auroc,
        lambda rows: roc_auc_score(LABELS[rows], SCORES[rows]),
        OF_TOKENS,
    ),
    "filter": (
        lambda a: analysis.confident_filter(MSP, FRAGILITY, ENTROPY, a).difference,
        lambda rows: filtered(rows, FRAGILITY) - filtered(rows, ENTROPY),
    ),
    "selector": (
        lambda a: analysis.global_selector(CONTROLS, FRAGILITY, a)[0.7][2],
        lambda rows: selected(rows, True) - selected(rows, False),
    ),
    "residual": (
        lambda a: analysis.distinct_signal(FRAGILITY, CONTROLS, a).residual_auroc,
        lambda rows: area(rows, LEFT),
    ),
    "increment": (
        lambda a: analysis.distinct_signal(FRAGILITY, CONTROLS, a).incremental_auroc,
        lambda rows: area(rows, fitted(True)) - area(rows, fitted(False)),
    ),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_an_interval_is_a_loop_over_the_draws(name):
    found, plain, *rest = STATISTICS[name]
    names = rest[0] if rest else NAMES
    drawn = Clustered(names, resamples=20, seed=5)
    every = np.arange(len(names))
    samples = [np.repeat(every, counts) for part in drawn.draws() for counts in part]
    expected = plain(every), *ends([plain(rows) for rows in samples], drawn.n_clusters)
    answers = Labelled(WRONG, NAMES, QUALITY, resamples=20, seed=5)
    assert found(answers) == pytest.approx(expected, abs=1e-12)


def test_a_band_is_the_interval_of_each_point():
    values, rows = RNG.normal(size=(40, 3)), Clustered(keys(20, 2), resamples=100)
    found = analysis.cluster_band(lambda chosen: values[chosen].mean(0), rows, points=3)
    expected = [
        cluster_interval(lambda chosen, j=j: values[chosen, j].mean(), rows) for j in (0, 1, 2)
    ]
    np.testing.assert_allclose(found.T, [(one.low, one.high) for one in expected])
    # A curve of as many points as rows is read at the same shares of it.
    spread = analysis.cluster_band(lambda chosen: np.linspace(0, 1, len(chosen)), rows, points=5)
    np.testing.assert_allclose(spread, [[0, 0.25, 0.5, 0.75, 1]] * 2)
    # One cluster has a value, and neither interval nor band.
    alone = Clustered(["one"] * 40)
    expected = pytest.approx((values[:, 0].mean(), np.nan, np.nan), nan_ok=True)
    assert cluster_interval(lambda chosen: values[chosen, 0].mean(), alone) == expected
    assert np.isnan(analysis.cluster_band(lambda chosen: values[chosen, 0], alone)).all()


ANSWERS = Labelled(WRONG, NAMES, resamples=20, seed=5)


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
    curve = naive_curve(by[half], wrong[half])
    shares = np.linspace(0, 1, 201)
    expected = [curve[max(1, round((1 - share) * len(half))) - 1] for share in shares]
    np.testing.assert_allclose(selective.filter_curve(msp, by, wrong, shares), expected)
    # A constant filter keeps the confident error.
    assert selective.filter_curve(msp, np.ones(n), wrong, [0.5]) == pytest.approx(expected[0])


def test_a_filter_reports_all_its_errors():
    """Also where seven in ten tie at the lowest MSP, so that the confident half is no half."""
    for msp, confident in ((MSP, 45), (np.maximum(0, ALL - 62.0), 63)):
        found = selective.confident_filter(msp, FRAGILITY, ENTROPY, ANSWERS)
        by_fragility, by_other = (
            selective.filter_curve(msp, by, WRONG, [0.5])[0] for by in (FRAGILITY, ENTROPY)
        )
        error = WRONG[msp <= np.median(msp)].mean()
        expected = confident / 90, round(confident / 2) / 90, error, by_fragility, by_other
        assert dataclasses.astuple(found)[:5] == pytest.approx(expected)


def test_a_selector_reports_both_errors():
    found = selective.global_selector(CONTROLS, FRAGILITY, ANSWERS)
    assert list(found) == [0.7, 0.8, 0.9]
    assert found[0.7][:2] == pytest.approx((selected(ALL, False), selected(ALL, True)))
