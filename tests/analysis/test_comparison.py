import numpy as np
import pytest
from scipy.stats import mannwhitneyu, norm
from scipy.stats import t as student
from sklearn.metrics import roc_auc_score
from statsmodels.stats.contingency_tables import mcnemar as statsmodels_mcnemar

from lm_polygraph_asmi.analysis import Clustered, Interval, Labelled, normalised_prr
from lm_polygraph_asmi.analysis.comparison import (
    augrc,
    auroc,
    auroc_difference,
    auroc_interval,
    mcnemar,
    prr_intervals,
)
from lm_polygraph_asmi.analysis.prr import weighted_prr
from tests.analysis.simulation import coverage, ends, keys, monte_carlo_error, shared


def answers(rng, clusters=40, size=3, noise=(0.8, 1.2)):
    """Quality, and a score per level of noise; all correlated within clusters."""
    quality = shared(rng, clusters, size, 0.8)
    return [-quality + level * shared(rng, clusters, size, 0.8) for level in noise], quality


def test_prr_and_differences_against_a_loop():
    (a, b), quality = answers(np.random.default_rng(0))
    names = keys(40, 3)
    alone, paired = prr_intervals(
        {"a": a, "b": b},
        Labelled(quality=quality, clusters=names, resamples=100),
        [("a", "b"), ("b", "a")],
    )
    rows = [
        np.repeat(np.arange(120), c)
        for draws in Clustered(names, resamples=100).draws()
        for c in draws
    ]
    drawn = {n: [normalised_prr(s[r], quality[r]) for r in rows] for n, s in (("a", a), ("b", b))}
    for name, score in (("a", a), ("b", b)):
        expected = (normalised_prr(score, quality), *ends(drawn[name], 40))
        assert alone[name] == pytest.approx(expected)
    # Paired: the difference is taken within a draw.
    difference = np.subtract(drawn["a"], drawn["b"])
    value = normalised_prr(a, quality) - normalised_prr(b, quality)
    assert paired["a", "b"] == pytest.approx((value, *ends(difference, 40)))
    assert paired["b", "a"] == pytest.approx(-paired["a", "b"])


def test_what_two_methods_share_cancels_in_their_difference():
    (a,), quality = answers(np.random.default_rng(1), noise=(0.8,))
    twin = a + 0.05 * np.random.default_rng(2).normal(size=120)
    alone, paired = prr_intervals(
        {"a": a, "twin": twin},
        Labelled(quality=quality, clusters=keys(40, 3), resamples=500),
        [("a", "twin"), ("a", "a")],
    )
    found = paired["a", "twin"]
    assert found.high - found.low < 0.25 * (alone["a"].high - alone["a"].low)
    assert paired["a", "a"] == (0, 0, 0)


@pytest.mark.parametrize("noise", [(1.0, 1.0), (0.6, 1.5)])
def test_intervals_cover_the_true_difference_of_prr(noise):
    """50 simulations: 0.95 within three Monte Carlo errors of 0.031."""
    rng = np.random.default_rng(3)
    truth = 0.0  # two methods of equal noise are exchangeable
    if noise[0] != noise[1]:
        (a, b), quality = answers(rng, 50_000, 4, noise)
        truth = normalised_prr(a, quality) - normalised_prr(b, quality)
        assert truth > 0.2

    def found(clusters: list[str], simulations: int) -> list[Interval]:
        intervals = []
        for _ in range(simulations):
            (a, b), quality = answers(rng, 80, 4, noise)
            _, paired = prr_intervals(
                {"a": a, "b": b},
                Labelled(quality=quality, clusters=clusters, resamples=200),
                [("a", "b")],
            )
            intervals.append(paired["a", "b"])
        return intervals

    error = monte_carlo_error(0.95, 50)
    assert coverage(found(keys(80, 4), 50), truth) == pytest.approx(0.95, abs=3 * error)
    # Rows taken as independent: too narrow.
    error = monte_carlo_error(0.95, 25)
    assert coverage(found(keys(320, 1), 25), truth) < 0.95 - 3 * error


def test_no_errors_no_prr_and_no_interval():
    scores = {"a": np.arange(6.0), "b": np.ones(6)}
    alone, paired = prr_intervals(
        scores, Labelled(quality=np.ones(6), clusters=keys(3, 2), resamples=50), [("a", "b")]
    )
    for found in (*alone.values(), *paired.values()):
        assert np.isnan(found).all()


def test_one_cluster_has_a_prr_and_no_interval():
    quality = np.array([1.0, 0, 1, 0])
    alone, paired = prr_intervals(
        {"a": -quality, "b": np.ones(4)},
        Labelled(quality=quality, clusters=["x"] * 4, resamples=50),
        [("a", "b")],
    )
    assert alone["a"].value == pytest.approx(1)
    assert paired["a", "b"].value == pytest.approx(1)
    for found in (*alone.values(), *paired.values()):
        assert np.isnan(found[1:]).all()


def test_a_constant_score_has_the_prr_of_chance_in_every_resample():
    quality = np.random.default_rng(4).random(30)
    alone, _ = prr_intervals(
        {"constant": np.ones(30)}, Labelled(quality=quality, clusters=keys(10, 3), resamples=50), []
    )
    assert alone["constant"] == pytest.approx((0, 0, 0), abs=1e-12)


@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_auroc_is_scikit_learns(levels):
    rng = np.random.default_rng(5)
    score, wrong = rng.integers(levels, size=80), rng.random(80) < 0.3
    assert auroc(score, wrong) == pytest.approx(roc_auc_score(wrong, score), rel=1e-12)
    assert auroc(-score, wrong) == pytest.approx(1 - auroc(score, wrong))
    pairs = wrong.sum() * (~wrong).sum()
    statistic = mannwhitneyu(score[wrong], score[~wrong]).statistic
    assert auroc(score, wrong) == pytest.approx(statistic / pairs)


def test_auroc_of_a_constant_score_is_chance():
    assert auroc([3, 3, 3], [1, 0, 0]) == 0.5


def test_auroc_needs_wrong_and_right_answers():
    for wrong in (0, 1):
        assert np.isnan(auroc([1, 2, 3], [wrong] * 3))
        assert np.isnan(
            auroc_interval([1, 2, 3], Labelled([wrong] * 3, ["a", "b", "c"], resamples=20))
        ).all()


def test_auroc_interval_against_a_loop():
    rng = np.random.default_rng(6)
    score, wrong, names = rng.normal(size=60), rng.random(60) < 0.4, keys(20, 3)
    rows = [
        np.repeat(np.arange(60), c)
        for draws in Clustered(names, resamples=100).draws()
        for c in draws
    ]
    drawn = [roc_auc_score(wrong[r], score[r]) for r in rows]
    expected = (roc_auc_score(wrong, score), *ends(drawn, 20))
    assert auroc_interval(score, Labelled(wrong, names, resamples=100)) == pytest.approx(expected)


def test_auroc_intervals_cover_the_truth():
    """200 simulations of clustered errors, whose normal scores lie 1 above those of the rest."""
    rng, names, found = np.random.default_rng(7), keys(80, 3), []
    for _ in range(200):
        wrong = np.repeat(rng.random(80) < 0.4, 3)
        found.append(
            auroc_interval(wrong + shared(rng, 80, 3), Labelled(wrong, names, resamples=100))
        )
    truth = norm.cdf(1 / np.sqrt(2))
    assert coverage(found, truth) == pytest.approx(0.95, abs=3 * monte_carlo_error(0.95, 200))


def test_a_difference_shares_its_draws():
    rng = np.random.default_rng(8)
    first, second = rng.normal(size=(2, 45))
    wrong, names = rng.random(45) < 0.4, keys(15, 3)
    found = auroc_difference(first, second, Labelled(wrong, names, resamples=40))
    rows = [
        np.repeat(np.arange(45), c)
        for draws in Clustered(names, resamples=40).draws()
        for c in draws
    ]
    drawn = [roc_auc_score(wrong[r], first[r]) - roc_auc_score(wrong[r], second[r]) for r in rows]
    value = roc_auc_score(wrong, first) - roc_auc_score(wrong, second)
    assert found == pytest.approx((value, *ends(drawn, 15)))
    assert auroc_difference(first, first, Labelled(wrong, names, resamples=20)) == (0, 0, 0)


@pytest.mark.parametrize("flagged", [0, 1, 15, 40, 60])
def test_mcnemar_is_statsmodels(flagged):
    rng = np.random.default_rng(9)
    first, second = rng.normal(size=(2, 60))
    wrong = rng.random(60) < 1 / (1 + np.exp(-1.5 * first))
    found = mcnemar(first, second, wrong, flagged)
    a, b = (set(np.argsort(score)[60 - flagged :].tolist()) for score in (first, second))
    errors = set(np.flatnonzero(wrong).tolist())
    table = [
        [len(errors & a & b), len(errors & (a - b))],
        [len(errors & (b - a)), len(errors - a - b)],
    ]
    assert [found.both, found.only_first, found.only_second] == [
        table[0][0],
        table[0][1],
        table[1][0],
    ]
    assert found.flagged == flagged
    assert found.p_value == pytest.approx(statsmodels_mcnemar(table, exact=True).pvalue)


def test_mcnemar_of_one_sided_errors():
    """Ten errors that the first score alone flags: two-sided, 2 / 2**10."""
    wrong = np.arange(40) < 10
    found = mcnemar(wrong.astype(float), (~wrong).astype(float), wrong, 10)
    assert found == (10, 0, 0, 10, pytest.approx(2 / 2**10))
    swapped = mcnemar((~wrong).astype(float), wrong.astype(float), wrong, 10)
    assert swapped == (0, 10, 0, 10, pytest.approx(2 / 2**10))


def test_mcnemar_without_wrong_answers_finds_nothing():
    assert mcnemar([1, 2, 3], [3, 2, 1], [0, 0, 0], 2) == (0, 0, 0, 2, 1.0)


def test_mcnemar_shares_flags_among_equal_scores():
    """Two flags for three equal answers: two thirds of one each, whatever the order of the file."""
    found = mcnemar([1, 1, 1, 0], [0, 1, 2, 3], [1, 0, 0, 1], 2)
    assert found[:3] == pytest.approx((2 / 3, 1, 0))
    rng = np.random.default_rng(10)
    first, second = rng.integers(3, size=40), rng.integers(4, size=40)
    wrong = rng.random(40) < 0.4
    found = mcnemar(first, second, wrong, 15)
    for order in (np.argsort(wrong), np.argsort(~wrong)):  # errors last, errors first
        again = mcnemar(first[order], second[order], wrong[order], 15)
        assert again == pytest.approx(found)
    # On average over the orders in which equal scores can be taken.
    drawn = []
    for _ in range(1000):
        a, b = (
            np.isin(np.arange(40), np.lexsort([rng.random(40), -score])[:15])
            for score in (first, second)
        )
        drawn.append([(wrong & a & ~b).sum(), (wrong & b & ~a).sum(), (wrong & a & b).sum()])
    assert np.mean(drawn, 0) == pytest.approx(found[:3], abs=0.15)


def test_augrc_is_the_area_under_its_curve():
    """Trapezoids under the share of wrong answers among all that are kept, best first."""
    rng = np.random.default_rng(11)
    score, wrong = rng.permutation(50), rng.random(50) < 0.3
    kept = np.r_[0, wrong[np.argsort(score)].cumsum()] / 50
    assert augrc(score, wrong) == pytest.approx(np.trapezoid(kept, dx=1 / 50))
    # Ties: the mean over their orders; a constant score is random.
    tied = score // 7
    drawn = [augrc(tied + rng.random(50), wrong) for _ in range(2000)]
    assert augrc(tied, wrong) == pytest.approx(np.mean(drawn), abs=1e-3)
    assert augrc(np.zeros(50), wrong) == pytest.approx(wrong.mean() / 2)
    assert (augrc(score, np.zeros(50)), augrc(score, np.ones(50))) == (0, 0.5)


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
    names = keys(clusters, 8)
    found = [
        prr_intervals(
            {"a": a, "b": b}, Labelled(quality=quality, clusters=names, resamples=500), [("a", "b")]
        )[1]["a", "b"]
        for (a, b), quality in samples
    ]
    print(clusters, coverage(found, truth))
    assert coverage(found, truth) == pytest.approx(0.95, abs=3 * monte_carlo_error(0.95, 400))


@pytest.mark.slow
def test_studentised_intervals_do_no_better():
    """Why there are none: with 11 clusters they are wider, and hold the truth no more often."""
    clusters, size, resamples = 11, 8, 200
    names, codes = keys(clusters, size), np.repeat(np.arange(clusters), size)
    far = student.ppf(0.975, clusters - 1)

    def difference(scores, quality, by_cluster):
        drawn = weighted_prr(scores, quality, iter([by_cluster[:, codes]]))
        return drawn[:, 0] - drawn[:, 1]

    def error(scores, quality, times):
        """Jackknife: without one of the clusters drawn, each as often as it was."""
        present = np.flatnonzero(times)
        less = np.tile(times, (len(present), 1))
        less[np.arange(len(present)), present] -= 1
        values, weight = difference(scores, quality, less), times[present]
        mean = weight @ values / clusters
        return np.sqrt((clusters - 1) / clusters * weight @ (values - mean) ** 2)

    truth, samples = truth_and_samples(clusters, 200)
    found = {"in use": [], "jackknife": [], "bootstrap-t": []}
    for number, (scores, quality) in enumerate(samples):
        scored = dict(zip("ab", scores, strict=True))
        own = prr_intervals(
            scored, Labelled(quality=quality, clusters=names, resamples=resamples), [("a", "b")]
        )[1]["a", "b"]
        whole = np.ones(clusters, dtype=int)
        value, spread = own.value, error(scores, quality, whole)
        drawn = np.random.default_rng(number).multinomial(clusters, whole / clusters, resamples)
        spreads = np.array([error(scores, quality, times) for times in drawn])
        low, high = np.nanpercentile(
            (difference(scores, quality, drawn) - value) / spreads, [2.5, 97.5]
        )
        found["in use"].append(own)
        found["jackknife"].append(Interval(value, value - far * spread, value + far * spread))
        found["bootstrap-t"].append(Interval(value, value - high * spread, value - low * spread))
    covered = {kind: coverage(intervals, truth) for kind, intervals in found.items()}
    widths = {kind: np.mean([i.high - i.low for i in own]) for kind, own in found.items()}
    print(covered, widths)
    assert max(covered.values()) <= covered["in use"] + 2 * monte_carlo_error(0.95, 200)
    assert min(widths, key=widths.get) == "in use"
