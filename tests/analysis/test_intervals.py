"""Every statistic with an interval, against a plain loop over resamples of whole clusters."""

from functools import cache

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score
from statsmodels.regression.linear_model import OLS

from lm_polygraph_asmi.analysis import (
    Clustered,
    Interval,
    Labelled,
    aurc,
    aurc_difference,
    auroc_difference,
    auroc_interval,
    cluster_band,
    cluster_interval,
    confident_but_fragile,
    confident_filter,
    distinct_signal,
    error_separation,
    global_selector,
    normalised_prr,
    prr_intervals,
    token_null,
)
from lm_polygraph_asmi.analysis.clusters import bootstrap_interval
from lm_polygraph_asmi.analysis.distinct import error_probability
from tests.analysis.simulation import coverage, ends, keys, monte_carlo_error, shared

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
    return normalised_prr(score[rows], QUALITY[rows])


def gap(rows):
    """Medians anew in every resample."""
    msp, fragility, wrong = MSP[rows], FRAGILITY[rows], WRONG[rows]
    confident, fragile = msp <= np.median(msp), fragility > np.median(fragility)
    return wrong[confident & fragile].mean() - wrong[confident & ~fragile].mean()


CONFIDENT = [row for row in range(90) if MSP[row] <= np.median(MSP)]
SCORES = np.concatenate([TOKENS[row] for row in CONFIDENT])
LABELS = np.array([WRONG[row] for row in CONFIDENT for _ in TOKENS[row]])
OF_TOKENS = [NAMES[row] for row in CONFIDENT for _ in TOKENS[row]]


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


@cache
def left():
    """Residuals of a regression on the other folds."""
    folds, found = Labelled(WRONG, NAMES, seed=5).folds(), np.empty(90)
    known = np.column_stack([np.ones(90), CONTROLS])
    for fold in range(5):
        train = folds != fold
        model = OLS(FRAGILITY[train], known[train]).fit()
        found[~train] = FRAGILITY[~train] - model.predict(known[~train])
    return found


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
    "AUROC": (lambda a: auroc_interval(MSP, a), lambda rows: area(rows, MSP)),
    "AUROC of one of several": (
        lambda a: error_separation(TOKENS, {"a": MSP, "b": ENTROPY}, a).auroc["b"],
        lambda rows: area(rows, ENTROPY),
    ),
    "difference of AUROC": (
        lambda a: auroc_difference(MSP, FRAGILITY, a),
        lambda rows: area(rows, MSP) - area(rows, FRAGILITY),
    ),
    "difference of AURC": (
        lambda a: aurc_difference(MSP, FRAGILITY, a),
        lambda rows: aurc(MSP[rows], WRONG[rows]) - aurc(FRAGILITY[rows], WRONG[rows]),
    ),
    "gap": (lambda a: confident_but_fragile(MSP, FRAGILITY, a).gap, gap),
    # Clusters are drawn with all tokens of their confident answers.
    "gap of tokens": (lambda a: token_null(MSP, TOKENS, a).gap, token_gap, OF_TOKENS),
    "AUROC of tokens": (
        lambda a: token_null(MSP, TOKENS, a).auroc,
        lambda rows: roc_auc_score(LABELS[rows], SCORES[rows]),
        OF_TOKENS,
    ),
    "filter": (
        lambda a: confident_filter(MSP, FRAGILITY, ENTROPY, a).difference,
        lambda rows: filtered(rows, FRAGILITY) - filtered(rows, ENTROPY),
    ),
    "selector": (
        lambda a: global_selector(CONTROLS, FRAGILITY, a, [0.9, 0.7])[0.7][2],
        lambda rows: selected(rows, True) - selected(rows, False),
    ),
    "residual": (
        lambda a: distinct_signal(FRAGILITY, CONTROLS, a).residual_auroc,
        lambda rows: area(rows, left()),
    ),
    "increment": (
        lambda a: distinct_signal(FRAGILITY, CONTROLS, a).incremental_auroc,
        lambda rows: area(rows, fitted(True)) - area(rows, fitted(False)),
    ),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_an_interval_is_a_loop_over_the_draws(name):
    found, plain, *rest = STATISTICS[name]
    names = rest[0] if rest else NAMES
    drawn = Clustered(names, resamples=30, seed=5)
    every = np.arange(len(names))
    samples = [np.repeat(every, counts) for part in drawn.draws() for counts in part]
    expected = plain(every), *ends([plain(rows) for rows in samples], drawn.n_clusters)
    answers = Labelled(WRONG, NAMES, QUALITY, resamples=30, seed=5)
    assert found(answers) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("found", [
    lambda a: cluster_interval(lambda rows: MSP[rows].mean(), a),
    lambda a: bootstrap_interval(0.5, len, a),
    *(STATISTICS[name][0] for name in ("PRR", "difference of PRR", "AUROC", "filter")),
])  # fmt: skip
def test_one_cluster_has_a_value_and_no_interval(found):
    alone = found(Labelled(WRONG, ["one"] * 90, QUALITY, resamples=20))
    assert np.isfinite(alone.value)
    assert np.isnan(alone[1:]).all()


def test_what_two_methods_share_cancels_in_their_difference():
    answers = Labelled(WRONG, NAMES, QUALITY, resamples=300)
    twin = MSP + 0.05 * RNG.normal(size=90)
    alone, paired = prr_intervals({"a": MSP, "twin": twin}, answers, [("a", "twin"), ("a", "a")])
    found = paired["a", "twin"]
    assert found.high - found.low < 0.25 * (alone["a"].high - alone["a"].low)
    for same in (
        paired["a", "a"],
        auroc_difference(MSP, MSP, answers),
        aurc_difference(MSP, MSP, answers),
        confident_filter(MSP, ENTROPY, ENTROPY, answers).difference,
    ):
        assert same == (0, 0, 0)


def test_a_band_is_the_interval_of_each_point():
    values, rows = RNG.normal(size=(40, 3)), Clustered(keys(20, 2), resamples=100)
    found = cluster_band(lambda chosen: values[chosen].mean(0), rows, points=3)
    for place in range(3):
        expected = cluster_interval(lambda chosen, j=place: values[chosen, j].mean(), rows)
        assert found[:, place].tolist() == pytest.approx([expected.low, expected.high])
    # A curve of as many points as rows is read at the same shares of it.
    spread = cluster_band(lambda chosen: np.linspace(0, 1, len(chosen)), rows, points=5)
    np.testing.assert_allclose(spread, [[0, 0.25, 0.5, 0.75, 1]] * 2)
    assert np.isnan(cluster_band(lambda chosen: values[chosen, 0], Clustered(["one"] * 40))).all()


def test_intervals_cover_the_mean_of_correlated_rows_and_narrow_ones_do_not():
    """100 simulations: 0.95 within three Monte Carlo errors of 0.022."""
    rng = np.random.default_rng(4)

    def found(clusters: list[str]) -> list[Interval]:
        rows = Clustered(clusters, resamples=200)
        samples = [shared(rng, 80, 4) for _ in range(100)]
        return [
            bootstrap_interval(values.mean(), lambda counts, v=values: counts @ v / 320, rows)
            for values in samples
        ]

    error = monte_carlo_error(0.95, 100)
    assert coverage(found(keys(80, 4)), 0) == pytest.approx(0.95, abs=3 * error)
    assert coverage(found(keys(320, 1)), 0) < 0.95 - 3 * error


def truth_and_samples(clusters, simulations):
    """The true difference of PRR of two scores of clustered answers, and samples of them."""
    rng = np.random.default_rng(12)

    def sample(number):
        difficulty = shared(rng, number, 8, 0.4)
        quality = 1 / (1 + np.exp(difficulty + rng.normal(size=number * 8)))
        return [difficulty + shared(rng, number, 8, 0.4) * noise for noise in (1.0, 1.6)], quality

    (a, b), quality = sample(40_000)
    truth = normalised_prr(a, quality) - normalised_prr(b, quality)
    return truth, [sample(clusters) for _ in range(simulations)]


@pytest.mark.slow
@pytest.mark.parametrize("clusters", [11, 50, 200])
def test_few_clusters_have_intervals_too(clusters):
    """400 simulations: 0.95 within three Monte Carlo errors; plain percentiles hold 0.905 of 11."""
    truth, samples = truth_and_samples(clusters, 400)
    found = []
    for (a, b), quality in samples:
        answers = Labelled(quality=quality, clusters=keys(clusters, 8), resamples=500)
        found.append(prr_intervals({"a": a, "b": b}, answers, [("a", "b")])[1]["a", "b"])
    assert coverage(found, truth) == pytest.approx(0.95, abs=3 * monte_carlo_error(0.95, 400))
