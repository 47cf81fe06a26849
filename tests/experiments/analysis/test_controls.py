"""The rule special, reproduced or inconclusive on data whose truth is known."""

import numpy as np
import pytest
from scipy.stats import spearmanr

from lm_polygraph_asmi.analysis import Interval, Labelled, equivalence_size, normalised_prr
from lm_polygraph_asmi.analysis.clusters import percentiles, tail
from lm_polygraph_asmi.analysis.comparison import drawn_prr
from lm_polygraph_asmi.analysis.hypotheses import equivalence
from lm_polygraph_asmi.experiments.analysis import (
    ConditionComparison,
    condition_comparisons,
    corrected_correlation,
    double_dissociation,
    verdicts,
)
from lm_polygraph_asmi.experiments.analysis.controls import questions_to_decide
from tests.analysis.simulation import keys, shared

DRAWS = 400
CONDITIONS = ("pseudo_heads", "foreign", "mlp")


def group(seed=0, clusters=150, noise=None, heads=0.5):
    """Answers whose errors follow a latent fragility that scores read with noise.

    Args:
        noise: condition -> noise of its score; None reads nothing of the fragility.
        heads: noise of the score under masked heads.
    """
    rng = np.random.default_rng(seed)
    fragility = shared(rng, clusters, 3)
    quality = 1 / (1 + np.exp(2 * fragility + rng.normal(size=len(fragility))))

    def read(error):
        own = rng.normal(size=len(fragility))
        return own if error is None else fragility + error * own

    read_by_heads = read(heads)
    wanted = dict.fromkeys(CONDITIONS) | (noise or {})
    conditions = {
        condition: read_by_heads + error * rng.normal(size=len(fragility)) if error == 0.01
        else read(error)
        for condition, error in wanted.items()
    }  # fmt: skip
    answers = Labelled(quality=quality, clusters=keys(clusters, 3), resamples=DRAWS)
    return read_by_heads, conditions, answers


def compared(*args, **kwargs):
    return condition_comparisons(*group(*args, **kwargs))


def test_comparisons_are_paired_differences():
    heads, conditions, answers = group()
    quality = answers.quality
    found = condition_comparisons(heads, conditions, answers)
    _, drawn = drawn_prr({"h": heads, "a": conditions["mlp"]}, answers)
    gaps, one = drawn["h"] - drawn["a"], found["mlp"]
    twin = normalised_prr(heads, quality) - normalised_prr(conditions["mlp"], quality)
    assert one.difference.value == pytest.approx(twin)
    low_high = np.percentile(gaps, percentiles(150))
    assert [one.difference.low, one.difference.high] == pytest.approx(low_high)
    assert one.standard_error == pytest.approx(gaps.std(ddof=1))
    assert one.p_above == pytest.approx(2 * tail((1 + (gaps <= 0).sum()) / (1 + DRAWS), 150))
    assert one.p_below == 1
    assert one.p_equivalent == equivalence(gaps, clusters=150)
    assert one.heads.value - one.condition.value == pytest.approx(one.difference.value)
    swapped = condition_comparisons(conditions["mlp"], {"h": heads}, answers)["h"]
    assert swapped.difference == pytest.approx(-one.difference)
    assert (swapped.p_below, swapped.p_above) == (one.p_above, 1)


def test_heads_that_alone_read_the_fragility_are_special():
    (said,) = verdicts([compared()])
    assert (said.outcome, said.condition, said.questions) == ("special", None, None)
    assert said.p_special < 0.05 < said.p_reproduced


def test_an_condition_that_reads_the_same_reproduces():
    """Nearly the same ranks: the difference is known to a hundredth."""
    (said,) = verdicts([compared(noise={"mlp": 0.01})])
    assert (said.outcome, said.condition) == ("reproduced", "mlp")
    # Heads are better than both conditions that they must beat, and yet: the hypothesis fails.
    assert said.p_special < 0.05


def test_a_better_condition_reproduces():
    (said,) = verdicts([compared(heads=3.0, noise={"foreign": 0.2})])
    assert (said.outcome, said.condition) == ("reproduced", "foreign")


def test_an_interval_that_holds_zero_is_not_reproduced():
    found = compared(clusters=30, noise=dict.fromkeys(CONDITIONS, 0.5))
    assert any(not one.difference.excludes(0) for one in found.values())
    (said,) = verdicts([found])
    assert said.outcome == "inconclusive"
    assert said.questions > 90  # more than there were


def test_both_conditions_must_be_beaten():
    half = compared(noise={"foreign": 0.5}, clusters=60)
    (said,) = verdicts([half])
    assert said.outcome == "inconclusive"
    without = {condition: one for condition, one in compared().items() if condition != "foreign"}
    (said,) = verdicts([without])
    assert said.outcome == "inconclusive"
    assert np.isnan(said.p_special)
    assert verdicts([{}])[0].outcome == "inconclusive"


def test_verdicts_are_adjusted_over_cells():
    one = compared(clusters=40, heads=1.5)
    (alone,) = verdicts([one])
    nothing = compared(1, clusters=40, heads=None)
    together = verdicts([one, *[nothing] * 9])[0]
    assert together.p_special > alone.p_special
    # Ten p-values of which one is small: ten times that, of both.
    small, *large = (dict.fromkeys(CONDITIONS, planted(0.1, 9, 9, p)) for p in (0.004, *[1] * 9))
    for groups, p in (([small], 0.004), ([small, *large], 0.04)):
        first = verdicts(groups)[0]
        assert [first.p_special, first.p_reproduced] == pytest.approx([p, p])


@pytest.mark.parametrize(("gap", "equal"), [(0.015, True), (0.025, False)])
def test_the_margin_is_two_hundredths(gap, equal):
    gaps = gap + 0.001 * np.random.default_rng(0).normal(size=DRAWS)
    for side in (1, -1):
        assert (equivalence(side * gaps, clusters=150) < 0.05) == equal


def planted(gap, to_differ, to_equal, p=1):
    difference = Interval(gap, gap - 0.1, gap + 0.1)
    nothing = Interval(0.0, 0.0, 0.0)
    return ConditionComparison(nothing, nothing, difference, p, 1, p, 0.05, to_differ, to_equal)


@pytest.mark.parametrize(
    ("gaps", "wanted"),
    [
        # Both that must be beaten are behind: the one nearer to heads takes the most questions.
        ({"pseudo_heads": (0.1, 500, 90), "foreign": (0.05, 2000, 90)}, 2000),
        # One of them is ahead: it reproduces, once that is shown.
        ({"pseudo_heads": (0.1, 500, 90), "foreign": (-0.05, 1500, 90)}, 1500),
        # Or it is as good as equal.
        ({"pseudo_heads": (0.1, 500, 90), "foreign": (0.01, 9000, 7000)}, 7000),
        # Nothing that was run can decide.
        ({"mlp": (0.1, 500, 90)}, None),
        ({}, None),
    ],
)
def test_questions_to_decide_are_the_cheapest_way(gaps, wanted):
    assert (
        questions_to_decide({condition: planted(*gap) for condition, gap in gaps.items()}) == wanted
    )


def test_as_many_questions_find_equal_methods_equal():
    """Power of two one-sided tests, simulated with the normal intervals they have."""
    rng = np.random.default_rng(0)
    questions = equivalence_size(0.02, 0.07, clusters=100, questions=300)
    assert questions == pytest.approx(300 * (2.927 * 0.07 / 0.02) ** 2, rel=0.01)
    error = 0.07 * np.sqrt(300 / questions)
    estimates = error * rng.normal(size=4000)
    within = np.abs(estimates) + 1.645 * error < 0.02
    assert within.mean() == pytest.approx(0.8, abs=0.02)


def test_a_double_dissociation_is_the_difference_of_differences():
    clusters = keys(60, 2)
    rng = np.random.default_rng(1)
    fragility = shared(rng, 60, 2)
    noise = rng.normal(size=(4, 120))
    with_context = fragility + 0.3 * noise[0], noise[1], -fragility + 0.5 * noise[2]
    without = noise[0], noise[1], -fragility + noise[3]
    found = double_dissociation(with_context, without, clusters, resamples=DRAWS)
    gaps = [
        normalised_prr(heads, quality) - normalised_prr(condition, quality)
        for heads, condition, quality in (with_context, without)
    ]
    assert found.value == pytest.approx(gaps[0] - gaps[1])
    assert found.low > 0
    same = double_dissociation(with_context, with_context, clusters, resamples=DRAWS)
    assert same == pytest.approx((0, 0, 0))  # passages are drawn once for both


def test_correlations_are_corrected_for_seed_noise():
    rng = np.random.default_rng(2)
    truth = rng.normal(size=900)
    first, second, again, other = truth + 0.7 * rng.normal(size=(4, 900))
    plain, corrected = corrected_correlation(
        (first, second), (again, other), keys(300, 3), resamples=100
    )
    assert plain.value == pytest.approx(spearmanr(first, second).statistic)
    reliability = spearmanr(first, again).statistic * spearmanr(second, other).statistic
    assert corrected.value == pytest.approx(plain.value / np.sqrt(reliability))
    assert not corrected.excludes(1)
    assert plain.high < 0.8
    lost = corrected_correlation((first, second), (-first, other), keys(300, 3), resamples=20)[1]
    assert np.isnan(lost.value)


def test_without_contrast_there_is_no_verdict():
    heads, conditions, answers = group()
    alike = Labelled([0] * len(answers), answers.clusters)
    with pytest.raises(ValueError, match="PRR is undefined"):
        condition_comparisons(heads, conditions, alike)
    one = Labelled(quality=answers.quality, clusters=["one"] * len(answers))
    with pytest.raises(ValueError, match="fewer than two clusters"):
        condition_comparisons(heads, conditions, one)
