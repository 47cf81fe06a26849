"""Thresholds with a risk guarantee: against plain loops, against MAPIE, and in simulations."""

import math

import numpy as np
import pytest
from scipy.stats import binom

from lm_polygraph_asmi.analysis.clusters import SEED
from lm_polygraph_asmi.decisions import risk_p_value, risk_threshold, risk_thresholds
from lm_polygraph_asmi.decisions.risk_control import BETS, GRID_SHARE, _grid, least_clusters
from tests.analysis.simulation import keys, monte_carlo_error, shared


def answers(rng, clusters, size, strength=2.0, base=-0.3):
    """Scores, errors that hang together within clusters, and the clusters' keys."""
    score = rng.normal(size=clusters * size)
    passage = np.repeat(rng.normal(size=clusters), size)
    chance = 1 / (1 + np.exp(-(base + strength * score + passage)))
    return score, rng.random(len(score)) < chance, keys(clusters, size)


class Truth:
    """Risk and coverage of every threshold, from very many answers."""

    def __init__(self, **kind):
        score, wrong, _ = answers(np.random.default_rng(99), 200_000, 1, **kind)
        order = np.argsort(score)
        self.scores, self.base = score[order], wrong.mean()
        self.risks = np.cumsum(wrong[order]) / np.arange(1, len(order) + 1)

    def coverage(self, threshold):
        return np.searchsorted(self.scores, threshold, side="right") / len(self.scores)

    def risk(self, threshold):
        return self.risks[np.searchsorted(self.scores, threshold, side="right") - 1]

    def oracle(self, risk):
        kept = np.flatnonzero(self.risks <= risk)
        return (kept[-1] + 1) / len(self.risks) if len(kept) else 0.0


def loops(accepted, wrong, clusters, risk, largest, seed=SEED):
    """The bet as it is told: a gambler for every stake, cluster after cluster."""
    names = sorted(set(clusters))
    order = np.random.default_rng(seed).permutation(len(names))
    purses = [1.0] * len(BETS)
    most = 1.0
    for place in order:
        rows = [i for i, name in enumerate(clusters) if name == names[place]]
        excess = sum(wrong[i] - risk for i in rows if accepted[i])
        for number, bet in enumerate(BETS):
            purses[number] *= 1 - bet * excess / ((1 - risk) * largest)
        most = max(most, sum(purses) / len(purses))
    return 1 / most


@pytest.mark.parametrize("seed", range(4))
def test_p_value_of_clusters_is_that_of_plain_loops(seed):
    rng = np.random.default_rng(seed)
    score, wrong, names = answers(rng, 30, 3)
    names = rng.permutation(names).tolist()  # keys, not the order of rows, tell clusters
    keep = score < rng.normal()
    for largest in (None, 5):
        found = risk_p_value(keep, wrong, names, 0.2, largest)
        assert found == pytest.approx(loops(keep, wrong, names, 0.2, largest or 3))
        again = rng.permutation(len(keep))
        shuffled = [names[i] for i in again]
        assert risk_p_value(keep[again], wrong[again], shuffled, 0.2, largest) == found


def test_p_value_of_single_answers_is_the_exact_one():
    rng = np.random.default_rng(0)
    score, wrong, names = answers(rng, 80, 1)
    keep = score < 0
    n, errors = int(keep.sum()), int((keep & wrong).sum())
    expected = sum(math.comb(n, k) * 0.3**k * 0.7 ** (n - k) for k in range(errors + 1))
    assert risk_p_value(keep, wrong, names, 0.3) == pytest.approx(expected)
    assert risk_p_value(np.zeros(80, bool), wrong, names, 0.3) == 1
    # As soon as a cluster may have two answers the binomial does not hold.
    assert risk_p_value(keep, wrong, names, 0.3, largest=2) > expected


@pytest.mark.parametrize("size", [1, 3])
def test_sequence_is_that_of_plain_loops(size):
    for seed in range(2):
        score, wrong, names = answers(np.random.default_rng(seed), 600 // size, size)
        found = risk_threshold(score, wrong, names, 0.25, 0.9)
        distinct = sorted(set(names))
        order = np.random.default_rng(SEED).permutation(len(distinct))
        first = {distinct[i] for i in order[: round(GRID_SHARE * len(distinct))]}
        fixes = np.array([name in first for name in names])
        codes = np.array([distinct.index(name) for name in names])
        last = None
        for threshold in _grid(score[fixes], wrong[fixes], codes[fixes], 0.25, size):
            keep = score[~fixes] <= threshold
            own = [name for name, fixing in zip(names, fixes, strict=True) if not fixing]
            errors = wrong[~fixes]
            if size == 1:
                p = binom.cdf((keep & errors).sum(), keep.sum(), 0.25)
            else:
                p = loops(keep, errors, own, 0.25, size)
            if p > 0.1:
                break
            last = threshold
        if last is None:
            assert found.threshold is None
            continue
        assert found.threshold == min(last, score.max())
        assert found.coverage == np.mean(score <= found.threshold)
        assert found.error_rate == wrong[score <= found.threshold].mean()


@pytest.mark.filterwarnings("ignore:Fixed sequence testing requires:UserWarning")
def test_mapie_agrees_where_clusters_are_single():
    """Its p-value is Hoeffding's and Bentkus', ours exact: what it accepts is accepted here."""
    from mapie.risk_control import BinaryClassificationController

    compared = 0
    for seed in range(6):
        score, wrong, _ = answers(np.random.default_rng(seed), 1000, 1)
        codes = np.arange(1000)
        fixes = np.arange(1000) < 200
        grid = _grid(score[fixes], wrong[fixes], codes[fixes], 0.2, 1)[:-1]
        correctness = BinaryClassificationController(
            lambda x: np.column_stack([x, -x]),
            risk="precision",
            target_level=0.8,
            confidence_level=0.9,
            list_predict_params=-grid,
            fwer_method="fixed_sequence",
        )
        correctness.calibrate(score[~fixes], ~wrong[~fixes])
        theirs = {-float(value) for value in correctness.valid_predict_params}
        ours = []
        for threshold in grid:
            if risk_p_value(score[~fixes] <= threshold, wrong[~fixes], codes[~fixes], 0.2) > 0.1:
                break
            ours.append(float(threshold))
        assert theirs <= set(ours)
        assert len(ours) - len(theirs) <= 4
        compared += len(theirs)
    assert compared > 20


def violations(truth, clusters, size, risk, confidence, draws, **kind):
    """Share of draws that break the promise, that find nothing, and mean coverage."""
    rng, broken, coverage = np.random.default_rng(5), 0, []
    for _ in range(draws):
        score, wrong, names = answers(rng, clusters, size, **kind)
        found = risk_threshold(score, wrong, names, risk, confidence)
        if found.threshold is None:
            coverage.append(0.0)
            continue
        broken += truth.risk(found.threshold) > risk
        coverage.append(truth.coverage(found.threshold))
    return broken / draws, float(np.mean(np.array(coverage) == 0)), float(np.mean(coverage))


@pytest.fixture(scope="module")
def truth():
    return Truth()


@pytest.mark.parametrize(("clusters", "size", "least"), [(800, 1, 0.7), (500, 3, 0.7)])
def test_the_promise_is_kept(truth, clusters, size, least):
    draws = 30
    broken, _, coverage = violations(truth, clusters, size, 0.2, 0.9, draws)
    assert broken <= 0.1 + 3 * monte_carlo_error(0.1, draws)
    assert least * truth.oracle(0.2) < coverage < truth.oracle(0.2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clusters", "size"), [(200, 1), (500, 1), (2000, 1), (125, 8), (250, 8), (400, 3), (60, 8)]
)
@pytest.mark.parametrize(("risk", "confidence"), [(0.1, 0.95), (0.2, 0.9)])
@pytest.mark.parametrize("kind", [{}, {"strength": 1.0, "base": -1.5}], ids=["strong", "weak"])
def test_the_promise_is_kept_everywhere(clusters, size, risk, confidence, kind):
    draws = 400
    truth = Truth(**kind)
    broken, nothing, coverage = violations(truth, clusters, size, risk, confidence, draws, **kind)
    print(
        f"\n| {clusters} x {size} | {truth.base:.2f} | {risk} | {confidence} | {broken:.3f} "
        f"| {nothing:.2f} | {coverage:.2f} | {truth.oracle(risk):.2f} |"
    )
    allowed = 1 - confidence
    assert broken <= allowed + 3 * monte_carlo_error(allowed, draws)


@pytest.mark.parametrize("size", [1, 8])
def test_answers_that_go_wrong_together(size):
    """Whole clusters right or wrong: the least that 8 answers can tell is what one can."""
    rng, broken, draws = np.random.default_rng(1), 0, 50
    for _ in range(draws):
        wrong = np.repeat(rng.random(60) < 0.21, size)
        score = shared(rng, 60, size)  # says nothing
        found = risk_threshold(score, wrong, keys(60, size), 0.2, 0.9)
        broken += found.threshold is not None
    assert broken / draws <= 0.1 + 3 * monte_carlo_error(0.1, draws)


def test_a_risk_that_is_not_monotone():
    """Confident answers are often wrong: the risk is kept between the scores .2 and .8 alone."""
    rng, thresholds, draws = np.random.default_rng(3), [], 40
    for _ in range(draws):
        score = rng.random(600)
        chance = np.select([score < 0.1, score < 0.6], [0.35, 0.05], 0.5)
        found = risk_threshold(score, rng.random(600) < chance, keys(600, 1), 0.2, 0.9)
        thresholds.append(np.nan if found.threshold is None else found.threshold)
    # Up to t >= .6, a share (.06 + .5 (t - .6)) / t of the accepted is wrong.
    broken = np.greater(thresholds, 0.8) | np.less(thresholds, 0.2)
    assert broken.mean() <= 0.1 + 3 * monte_carlo_error(0.1, draws)
    assert np.nanmedian(thresholds) > 0.6


def test_scores_with_many_ties():
    rng, broken, draws = np.random.default_rng(2), 0, 50
    for _ in range(draws):
        score = rng.integers(0, 4, size=300).astype(float)
        wrong = rng.random(300) < np.array([0.05, 0.22, 0.4, 0.6])[score.astype(int)]
        found = risk_threshold(score, wrong, keys(300, 1), 0.1, 0.9)
        # Up to 0 a share of .05 is wrong, up to 1 of .135: answers of one score go together.
        broken += found.threshold is not None and found.threshold >= 1
        assert found.threshold is None or found.coverage == np.mean(score <= found.threshold)
    assert broken / draws <= 0.1 + 3 * monte_carlo_error(0.1, draws)


@pytest.mark.parametrize("size", [1, 3])
def test_corners(size):
    n = 300
    names = keys(n // size, size)
    score = np.random.default_rng(3).normal(size=n)
    right = risk_threshold(score, np.zeros(n), names, 0.1, 0.95)
    assert (right.threshold, right.coverage, right.error_rate) == (score.max(), 1, 0)
    assert right.unavoidable == 0
    wrong = risk_threshold(score, np.ones(n), names, 0.1, 0.95)
    assert (wrong.threshold, wrong.coverage) == (None, 0)
    assert wrong.unavoidable == 1
    assert "any score must reject 100%" in str(wrong)
    constant = np.full(n, 0.5)
    half = np.arange(n) % 2 == 0
    assert risk_threshold(constant, half, names, 0.1, 0.95).threshold is None
    assert risk_threshold(constant, half, names, 0.7, 0.95).threshold == 0.5
    few = risk_threshold(score[: 6 * size], np.zeros(6 * size), names[: 6 * size], 0.1, 0.95)
    assert few.threshold is None
    assert few.error_rate is None


def test_what_is_said_of_few_labels():
    few = risk_threshold(np.zeros(60), np.zeros(60), keys(60, 1), 0.05, 0.95)
    assert few.threshold is None
    assert str(few).endswith(
        "; even without an error, at least 74 answers are needed, of which 59 test thresholds"
    )


def test_thresholds_by_group():
    """Two of four groups have labels for a third of what is left; each is tested by itself."""
    rng = np.random.default_rng(0)
    score, wrong, names = answers(rng, 1000, 1, base=-1.0)
    groups = np.repeat(["how", "who", "why", "when"], [500, 460, 30, 10])
    found = risk_thresholds(score, wrong, names, groups, 0.2, 0.9)
    assert list(found) == ["how", "when", "who", "why"]
    attained = [name for name in found if found[name].threshold is not None]
    # At .1 / 3 = .033, 16 right answers pass, so 20 labels are needed: three groups have them.
    assert least_clusters(0.2, 1 - 0.1 / 3) == 20
    for name in ("how", "who", "why"):
        rows = np.flatnonzero(groups == name)
        own = [names[row] for row in rows]
        assert found[name] == risk_threshold(score[rows], wrong[rows], own, 0.2, 1 - 0.1 / 3)
    assert attained == ["how", "who"]
    few = found["when"]
    assert (few.threshold, few.answers, few.confidence) == (None, 10, 1 - 0.1 / 4)
    assert f"at least {least_clusters(0.2, 1 - 0.1 / 4)} answers are needed" in str(few)
    alone = risk_thresholds(score, wrong, names, ["all"] * 1000, 0.2, 0.9)
    assert alone == {"all": risk_threshold(score, wrong, names, 0.2, 0.9)}


def test_thresholds_of_all_groups_keep_the_risk_together():
    """Three groups of a shared passage, their scores useless, their risks just above the bound."""
    rng, broken, draws = np.random.default_rng(7), 0, 30
    names, groups = keys(150, 3), ["a", "b", "c"] * 150
    for _ in range(draws):
        wrong = np.repeat(rng.random(150), 3) < 0.205  # one label for a passage
        wrong ^= rng.random(450) < 0.001
        found = risk_thresholds(rng.random(450), wrong, names, groups, 0.2, 0.9)
        broken += any(rule.threshold is not None for rule in found.values())
    assert broken / draws <= 0.1 + 3 * monte_carlo_error(0.1, draws)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("risk", "confidence"), [(0.05, 0.95), (0.2, 0.9), (0.5, 0.5), (0.9, 0.9)])
def test_the_least_number_of_labels(size, risk, confidence):
    """All right and all of one score: so many clusters do, and one less does not."""
    least = least_clusters(risk, confidence, single=size == 1)
    for clusters, attainable in ((least, True), (least - 1, False)):
        if clusters < 2:
            continue
        n = clusters * size
        found = risk_threshold(np.zeros(n), np.zeros(n), keys(clusters, size), risk, confidence)
        assert (found.threshold is not None) == attainable
        assert ("even without an error, at least" in str(found)) != attainable
    for few in range(2, min(21, least)):
        found = risk_threshold(np.zeros(few), np.zeros(few), keys(few, 1), risk, confidence)
        if few < least_clusters(risk, confidence):
            assert f"at least {least_clusters(risk, confidence)} answers" in str(found)


def test_what_is_said_of_a_threshold():
    score, wrong, names = answers(np.random.default_rng(1), 2000, 1)
    found = risk_threshold(score, wrong, names, 0.2, 0.9)
    base = wrong.mean()
    assert found.unavoidable == pytest.approx((base - 0.2) / 0.8)
    assert str(found) == (
        f"accept up to {found.threshold:.4g}: {found.coverage:.0%} of these answers, "
        f"{found.error_rate:.1%} of them wrong (at most 20% errors, confidence 90%). {base:.0%} of "
        f"all answers are wrong, so any score must reject {math.ceil(100 * found.unavoidable)}%"
    )
    # A score that tells right from wrong gets near what is unavoidable, and never beyond.
    perfect = risk_threshold(wrong + 0.1 * score, wrong, names, 0.2, 0.9)
    assert found.coverage < perfect.coverage <= 1 - perfect.unavoidable
