from itertools import permutations

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from lm_polygraph_asmi.analysis import Clustered, Labelled, normalised_prr
from lm_polygraph_asmi.analysis.distinct import error_probability
from lm_polygraph_asmi.analysis.selective import (
    aurc,
    confident_but_fragile,
    confident_filter,
    filter_curve,
    filter_error,
    global_selector,
    retained_error,
    risk_coverage,
    token_null,
)
from tests.analysis.simulation import coverage, ends, keys, monte_carlo_error


@pytest.fixture
def data():
    """MSP, fragility and entropy of 90 answers in 30 clusters, and which are wrong."""
    rng = np.random.default_rng(0)
    msp, fragility = rng.normal(size=(2, 90))
    entropy = msp + 0.5 * rng.normal(size=90)
    wrong = rng.random(90) < 1 / (1 + np.exp(1 - msp - fragility))
    return msp, fragility, entropy, wrong, keys(30, 3)


def loop_over_draws(statistic, names, resamples):
    """Ends of the interval, from a naive loop."""
    draws = [counts for chunk in Clustered(names, resamples=resamples).draws() for counts in chunk]
    found = [statistic(np.repeat(np.arange(len(names)), counts)) for counts in draws]
    return ends(found, len(set(names)))


def naive_curve(uncertainty, wrong):
    """Rejecting one by one, the most uncertain first. Without ties."""
    ranked = [w for _, w in sorted(zip(uncertainty, wrong, strict=True))]
    return [sum(ranked[:k]) / k for k in range(1, len(ranked) + 1)]


def test_risk_coverage_and_its_area_against_a_loop(data):
    msp, _, _, wrong, _ = data
    expected = naive_curve(msp.tolist(), wrong.tolist())
    np.testing.assert_allclose(risk_coverage(msp, wrong), expected)
    assert aurc(msp, wrong) == pytest.approx(np.mean(expected))


def test_ties_count_as_the_mean_over_all_their_orders():
    tied, wrong = np.array([2, 1, 2, 1, 2, 0]), np.array([1, 0, 0, 1, 1, 0])
    curves = []
    for order in permutations(range(6)):
        ranked = sorted(order, key=lambda row: tied[row])  # a stable sort
        curves.append(naive_curve(range(6), wrong[ranked].tolist()))
    expected = np.mean(curves, axis=0)
    np.testing.assert_allclose(risk_coverage(tied, wrong), expected)
    assert aurc(tied, wrong) == pytest.approx(expected.mean())
    for k in range(1, 7):
        assert retained_error(tied, wrong, k / 6) == pytest.approx(expected[k - 1])


def test_constant_scores_keep_the_error_rate_at_every_coverage():
    wrong = np.array([1, 1, 0, 0, 0])
    np.testing.assert_allclose(risk_coverage(np.ones(5), wrong), 0.4)
    assert aurc(np.ones(5), wrong) == pytest.approx(0.4)
    assert retained_error(np.ones(5), wrong, 0.2) == pytest.approx(0.4)


def test_no_wrong_answers_no_risk():
    assert aurc([1, 2, 3], [0, 0, 0]) == 0
    assert aurc([1, 2, 3], [1, 1, 1]) == 1
    np.testing.assert_array_equal(risk_coverage([1, 2, 3], [0, 0, 0]), 0)


@pytest.mark.parametrize("decimals", [8, 0])
def test_aurc_is_prr_on_another_scale(data, decimals):
    """For right and wrong answers, PRR = (error rate - AURC) / (error rate - oracle's AURC)."""
    msp, _, _, wrong, _ = data
    msp = np.round(msp, decimals)
    rate = wrong.mean()
    expected = (rate - aurc(msp, wrong)) / (rate - aurc(wrong, wrong))
    assert normalised_prr(msp, 1 - wrong) == pytest.approx(expected)


def test_retained_error_against_a_loop(data):
    msp, _, _, wrong, _ = data
    order = sorted(range(90), key=lambda row: msp[row])
    for share, kept in ((1.0, 90), (0.9, 81), (0.7, 63), (0.5, 45), (0.1, 9), (0.001, 1)):
        expected = sum(wrong[row] for row in order[:kept]) / kept
        assert retained_error(msp, wrong, share) == pytest.approx(expected)


def test_quadrants_are_pandas_groups(data):
    msp, fragility, _, wrong, names = data
    found = confident_but_fragile(msp, fragility, Labelled(wrong, names, resamples=100))
    table = pd.DataFrame({"msp": msp, "fragility": fragility, "wrong": wrong})
    unconfident, fragile = (table[c] > table[c].median() for c in ("msp", "fragility"))
    grouped = table.groupby([unconfident, fragile])["wrong"]
    np.testing.assert_allclose(found.error_rate, grouped.mean().unstack())
    np.testing.assert_array_equal(found.count, grouped.size().unstack())
    rates = grouped.mean()
    assert found.gap.value == pytest.approx(rates[False, True] - rates[False, False])
    assert found.gap.value > 0

    def gap(rows):
        # Medians anew in every resample.
        sample = table.iloc[rows].reset_index()
        confident = sample[sample["msp"] <= sample["msp"].median()]
        fragile = confident["fragility"] > sample["fragility"].median()
        return confident["wrong"][fragile].mean() - confident["wrong"][~fragile].mean()

    assert found.gap[1:] == pytest.approx(loop_over_draws(gap, names, 100))


def test_the_gap_of_a_planted_split():
    """Confident and fragile: wrong three times in ten. The rest: once in ten."""
    msp, fragility = (np.array(c, dtype=float) for c in ([0, 1] * 200, [0, 0, 1, 1] * 100))
    rng, gaps = np.random.default_rng(1), []
    for _ in range(100):
        rate = np.where((msp == 0) & (fragility == 1), 0.3, 0.1)
        wrong = rng.random(400) < rate
        noise = rng.random((2, 400)) / 2
        found = confident_but_fragile(
            msp + noise[0], fragility + noise[1], Labelled(wrong, keys(400, 1), resamples=100)
        )
        gaps.append(found.gap)
    assert np.mean([gap.value for gap in gaps]) == pytest.approx(0.2, abs=0.02)
    assert coverage(gaps, 0.2) == pytest.approx(0.95, abs=3 * monte_carlo_error(0.95, 100))


def test_empty_quadrants_are_undefined(data):
    msp, fragility, _, wrong, names = data
    found = confident_but_fragile(msp, np.ones(90), Labelled(wrong, names, resamples=20))
    np.testing.assert_array_equal(found.count, [[45, 0], [45, 0]])
    np.testing.assert_array_equal(np.isnan(found.error_rate), [[False, True], [False, True]])
    assert np.isnan(found.gap).all()
    # A constant MSP leaves everything confident.
    found = confident_but_fragile(np.ones(90), fragility, Labelled(wrong, names, resamples=20))
    np.testing.assert_array_equal(found.count, [[45, 45], [0, 0]])
    assert np.isnan(found.error_rate[1]).all()


def test_token_null_against_a_loop(data):
    msp, fragility, _, wrong, names = data
    rng = np.random.default_rng(2)
    tokens = [score + rng.normal(size=rng.integers(1, 5)) for score in fragility]
    found = token_null(msp, tokens, Labelled(wrong, names, resamples=50))
    scores, labels, keys_of_tokens = [], [], []
    for i in range(90):
        if msp[i] <= np.median(msp):
            for score in tokens[i]:
                scores.append(score)
                labels.append(wrong[i])
                keys_of_tokens.append(names[i])
    scores, labels = np.array(scores), np.array(labels)
    assert (found.tokens, found.answers) == (len(scores), 45)
    assert found.auroc.value == pytest.approx(roc_auc_score(labels, scores))

    def gap(rows):
        high = scores[rows] > np.median(scores[rows])
        return labels[rows][high].mean() - labels[rows][~high].mean()

    assert found.gap.value == pytest.approx(gap(np.arange(len(scores))))
    # Clusters are drawn with all tokens of their answers.
    assert found.gap[1:] == pytest.approx(loop_over_draws(gap, keys_of_tokens, 50))


def test_token_null_of_constant_tokens(data):
    msp, _, _, wrong, names = data
    found = token_null(msp, [np.ones(2)] * 90, Labelled(wrong, names, resamples=20))
    assert np.isnan(found.gap).all()
    assert found.auroc == (0.5, 0.5, 0.5)


def naive_filter(msp, by, wrong, abstain):
    rows = sorted(range(len(msp)), key=lambda row: msp[row])[: (len(msp) + 1) // 2]
    rows.sort(key=lambda row: by[row])
    kept = rows[: max(1, round((1 - abstain) * len(rows)))]
    return sum(wrong[row] for row in kept) / len(kept)


@pytest.mark.parametrize("n", [90, 81])
def test_filter_error_against_a_loop(data, n):
    msp, fragility, _, wrong, _ = (column[:n] for column in data)
    shares = [0.0, 0.1, 0.5, 0.9, 1.0]
    expected = [naive_filter(msp, fragility, wrong, share) for share in shares]
    found = [filter_error(msp, fragility, wrong, share) for share in shares]
    assert found == pytest.approx(expected)
    np.testing.assert_allclose(filter_curve(msp, fragility, wrong, shares), expected)
    assert filter_error(msp, fragility, wrong) == pytest.approx(expected[2])


def test_the_filters_final_coverage_is_a_quarter():
    """Of 8 answers, 4 are confident, and the 2 robust ones of these are kept."""
    msp, by = np.arange(8), np.array([3, 0, 2, 1, 9, 9, 9, 9])
    wrong = np.zeros(8)
    for row, expected in enumerate([0, 0.5, 0, 0.5, 0, 0, 0, 0]):
        wrong[:] = 0
        wrong[row] = 1
        assert filter_error(msp, by, wrong) == expected


def test_a_constant_filter_keeps_the_confident_error(data):
    msp, _, _, wrong, _ = data
    expected = wrong[msp <= np.median(msp)].mean()
    for share in (0.0, 0.3, 0.5):
        assert filter_error(msp, np.ones(90), wrong, share) == pytest.approx(expected)


def test_filter_difference_against_a_loop(data):
    msp, fragility, entropy, wrong, names = data
    found = confident_filter(msp, fragility, entropy, Labelled(wrong, names, resamples=100))
    assert found.confident_error == pytest.approx(wrong[msp <= np.median(msp)].mean())
    assert found.by_fragility == pytest.approx(naive_filter(msp, fragility, wrong, 0.5))
    assert found.by_other == pytest.approx(naive_filter(msp, entropy, wrong, 0.5))
    assert found.difference.value == pytest.approx(found.by_fragility - found.by_other)

    def difference(rows):
        # Copies of a row agree in everything, so that their order is nothing to the loop.
        m, f, o, w = (column[rows] for column in (msp, fragility, entropy, wrong))
        return naive_filter(m, f, w, 0.5) - naive_filter(m, o, w, 0.5)

    assert found.difference[1:] == pytest.approx(loop_over_draws(difference, names, 100))
    swapped = confident_filter(msp, entropy, fragility, Labelled(wrong, names, resamples=100))
    assert swapped.difference == pytest.approx(-found.difference)


def test_a_planted_filter_is_significantly_better():
    """Confident errors that fragility knows of and entropy does not."""
    rng = np.random.default_rng(3)
    msp, fragility, entropy = rng.normal(size=(3, 600))
    wrong = rng.random(600) < 1 / (1 + np.exp(1.5 - 1.5 * fragility))
    found = confident_filter(msp, fragility, entropy, Labelled(wrong, keys(200, 3), resamples=200))
    assert found.by_fragility < found.by_other
    assert found.difference.high < 0
    twice = confident_filter(msp, fragility, fragility, Labelled(wrong, keys(200, 3), resamples=50))
    assert twice.difference == (0, 0, 0)


def test_global_selector_against_its_definition(data):
    msp, fragility, entropy, wrong, names = data
    controls = np.column_stack([msp, entropy])
    found = global_selector(controls, fragility, Labelled(wrong, names, resamples=50), (0.7, 0.9))
    folds = Labelled(wrong, names).folds()
    base = error_probability(controls, wrong, folds)
    full = error_probability(np.column_stack([controls, fragility]), wrong, folds)
    assert list(found) == [0.7, 0.9]
    for share, (without, with_signal, difference) in found.items():
        kept = round(share * 90)
        expected = [wrong[np.argsort(score)[:kept]].mean() for score in (base, full)]
        assert [without, with_signal] == pytest.approx(expected)
        assert difference.value == pytest.approx(expected[1] - expected[0])

        def error(rows, share=share):
            new, old = (retained_error(s[rows], wrong[rows], share) for s in (full, base))
            return new - old

        assert difference[1:] == pytest.approx(loop_over_draws(error, names, 50))


@pytest.mark.parametrize("kind", [False, True])
def test_one_kind_of_answer_has_no_gap(data, kind):
    """Not a gap of 0.00 [0.00, 0.00], which would be knowledge."""
    msp, fragility, _, _, names = data
    wrong = np.full(90, kind)
    tokens = [np.array([score, 2 * score]) for score in fragility]
    found = token_null(msp, tokens, Labelled(wrong, names, resamples=20))
    assert np.isnan([*found.gap, *found.auroc]).all()
    assert np.isnan(
        confident_but_fragile(msp, fragility, Labelled(wrong, names, resamples=20)).gap
    ).all()


def test_a_filter_says_what_its_half_was(data):
    """Seven in ten tie at the lowest MSP, so that the confident half is no half."""
    _, fragility, other, wrong, names = data
    msp = np.maximum(0, np.arange(90) - 62.0)
    found = confident_filter(msp, fragility, other, Labelled(wrong, names, resamples=20))
    assert found.confident == pytest.approx(63 / 90)
    assert found.coverage == pytest.approx(round(63 / 2) / 90)
    assert (
        confident_but_fragile(msp, fragility, Labelled(wrong, names, resamples=20)).count[0].sum()
        == 63
    )
    found = confident_filter(fragility, msp, other, Labelled(wrong, names, resamples=20))
    assert (found.confident, found.coverage) == pytest.approx((0.5, 22 / 90))
