"""Selective prediction: error rates of the accepted answers if a user abstains by a score.

Source: sections "Deployment Payoff" and "The Confident-but-Fragile Split" of the paper, and its
appendix "Deployment Payoff: Full Analysis". In functions without `answers`, scores may be infinite,
but not NaN. MSP is that of LM-Polygraph, where higher = less confident. The confident answers are
those with an MSP up to its median.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike

from lm_polygraph_asmi.analysis.clusters import (
    Interval,
    Medians,
    bootstrap_interval,
    bootstrap_values,
    check_rows,
    control_table,
    finite,
    percentile_interval,
)
from lm_polygraph_asmi.analysis.comparison import auroc_interval
from lm_polygraph_asmi.analysis.distinct import error_probability
from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.analysis.prr import Rejection

FILTERED = 0.5
"""Share of the confident half on which the paper's filter abstains."""
COVERAGES = (0.7, 0.8, 0.9)
"""Shares of answers that the paper's global selector accepts."""


def aurc(uncertainty: ArrayLike, wrong: ArrayLike) -> float:
    """Area under the risk-coverage curve: error rate of the k most certain, averaged over all k.

    Lower = better, in [0, 1]. Equal scores count as their mean. Source: table "payoff-aurc" of the
    paper.

    Example:
        >>> aurc([0.1, 0.2, 0.9], wrong=[0, 0, 1]) < aurc([0.9, 0.2, 0.1], wrong=[0, 0, 1])
        True
    """
    errors = finite(wrong=wrong)
    every = np.ones((1, len(errors)), dtype=int)
    return float(Rejection(uncertainty, errors).area(every, every @ errors)[0])


def risk_coverage(uncertainty: ArrayLike, wrong: ArrayLike) -> Float[np.ndarray, " n"]:
    """(n,) error rate of the k least uncertain answers for k = 1 ... n. Ties count as their mean.

    Example:
        >>> risk_coverage([0.1, 0.2, 0.9], wrong=[0, 0, 1]).round(2).tolist()
        [0.0, 0.0, 0.33]
    """
    order = Rejection(uncertainty, finite(wrong=wrong))
    n = len(order.values)
    sizes = np.diff(np.r_[order.starts, n])
    mean = np.repeat(np.add.reduceat(order.values, order.starts) / sizes, sizes)
    return mean.cumsum() / np.arange(1, n + 1)


def retained_error(uncertainty: ArrayLike, wrong: ArrayLike, coverage: float) -> float:
    """Error rate of a share `coverage` in [0, 1] of the answers, the least uncertain, at least one.

    Example:
        >>> uncertainty, wrong = [0.1, 0.2, 0.3, 0.9], [0, 0, 1, 1]
        >>> [retained_error(uncertainty, wrong, coverage) for coverage in (1.0, 0.5)]
        [0.5, 0.0]
    """
    return _at(coverage, risk_coverage(uncertainty, wrong))


def _at(coverage: float, curve: Float[np.ndarray, " n"]) -> float:
    if not 0 <= coverage <= 1:
        raise ValueError(f"coverage must lie in [0, 1], got {coverage}: it is a share of answers")
    return float(curve[max(1, round(coverage * len(curve))) - 1])


@dataclass(frozen=True)
class Quadrants:
    """Answers split at the medians of MSP and fragility.

    Attributes:
        error_rate, count: (2, 2). Rows: confident and unconfident answers by MSP. Columns: robust
            and fragile answers.
        gap: error rate of confident-fragile answers minus that of confident-robust ones.
    """

    error_rate: Float[np.ndarray, "2 2"]
    count: Int[np.ndarray, "2 2"]
    gap: Interval


def _gap(
    counts: Int[np.ndarray, "b n"], high: Bool[np.ndarray, "#b n"], wrong: Float[np.ndarray, " n"]
) -> Float[np.ndarray, " b"]:
    """(b,) error rate of the high rows minus that of the others, in samples with counts (b, n).

    NaN if all rows are right, all wrong, all high, or none high.
    """
    high = counts * high
    n, errors, n_high, of_high = counts.sum(1), counts @ wrong, high.sum(1), high @ wrong
    known = (n_high > 0) & (n_high < n) & (errors > 0) & (errors < n)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(known, of_high / n_high - (errors - of_high) / (n - n_high), np.nan)


def confident_but_fragile(msp: ArrayLike, fragility: ArrayLike, answers: Labelled) -> Quadrants:
    """Error rates by confidence and fragility. NaN in an empty quadrant.

    Medians are computed again in every resample. A score at the median counts as confident or
    robust, so with many ties the parts are not halves (see `Quadrants.count`). The gap is undefined
    if the confident answers are all right, or all wrong. Source: figure "confident-fragile" of the
    paper.

    Args:
        fragility: score of Sem-ASMI, u_sem.

    Example:
        >>> msp, fragility, wrong = [0, 0, 1, 1] * 10, [0, 1, 0, 1] * 10, [0, 1, 1, 1] * 10
        >>> quadrants = confident_but_fragile(msp, fragility, Labelled(wrong, range(40)))
        >>> quadrants.error_rate.tolist()  # confident answers are wrong if fragile
        [[0.0, 1.0], [1.0, 1.0]]
        >>> quadrants.gap.value, quadrants.gap.excludes(0)
        (1.0, True)
    """
    msp, fragility = answers.columns(msp=msp, fragility=fragility)
    wrong = answers.wrong.astype(float)
    medians = Medians(msp), Medians(fragility)

    def gap(counts: np.ndarray) -> np.ndarray:
        msp_median, fragility_median = (median(counts)[:, None] for median in medians)
        return _gap(counts * (msp <= msp_median), fragility > fragility_median, wrong)

    value = float(gap(np.ones((1, len(wrong)), dtype=int))[0])
    place = 2 * (msp > np.median(msp)) + (fragility > np.median(fragility))
    count = np.bincount(place, minlength=4).reshape(2, 2)
    errors = np.bincount(place, wrong, minlength=4).reshape(2, 2)
    rate = np.divide(errors, count, out=np.full((2, 2), np.nan), where=count > 0)
    return Quadrants(rate, count, bootstrap_interval(value, gap, answers))


@dataclass(frozen=True)
class TokenNull:
    """Whether the effect on confident answers also appears in their tokens.

    Attributes:
        gap: error rate of tokens with a score above the median, minus that of the others. A token
            is wrong if its answer is.
        auroc: AUROC of token scores for the answer's label. 0.5 = chance.
    """

    gap: Interval
    auroc: Interval


def token_null(msp: ArrayLike, token_scores: Sequence[np.ndarray], answers: Labelled) -> TokenNull:
    """The confident-but-fragile gap of tokens, where a token has the label of its answer.

    `token_scores`: n arrays (T,) of u_t. Both statistics are NaN if all confident answers are
    right, or all wrong. The gap is also NaN if all their tokens have the same score. Raises
    ValueError also if no confident answer has a token. Source: appendix "The Distinct-Signal
    Analysis" of the paper (no effect at the token level).

    Example:
        >>> tokens = [np.array([0.1, 0.9])] * 20  # alike in right and in wrong answers
        >>> null = token_null([0, 1] * 10, tokens, Labelled([0, 0, 1, 1] * 5, range(20)))
        >>> null.gap.value, null.auroc.value
        (0.0, 0.5)
    """
    (msp,) = answers.columns(msp=msp)
    if len(token_scores) != len(answers):
        raise ValueError(
            f"expected tokens for each of {len(answers)} labels, got them for {len(token_scores)} "
            "answers"
        )
    confident = np.flatnonzero(msp <= np.median(msp)).tolist()
    lengths = [len(token_scores[i]) for i in confident]
    scores = np.concatenate([finite(token_scores=token_scores[i]) for i in confident])
    if not len(scores):
        raise ValueError("no confident answer has a token")
    tokens = answers.take(np.repeat(confident, lengths))
    labels, median = tokens.wrong.astype(float), Medians(scores)

    def gap(counts: np.ndarray) -> np.ndarray:
        return _gap(counts, scores > median(counts)[:, None], labels)

    value = float(gap(np.ones((1, len(labels)), dtype=int))[0])
    return TokenNull(bootstrap_interval(value, gap, tokens), auroc_interval(scores, tokens))


def _confident_risk(
    msp: ArrayLike, by: ArrayLike, wrong: ArrayLike
) -> Float[np.ndarray, " confident"]:
    """`risk_coverage` of the confident half by MSP, with the score `by`."""
    msp = np.asarray(msp, dtype=float)
    confident = msp <= np.median(msp)
    return risk_coverage(np.asarray(by)[confident], np.asarray(wrong)[confident])


@dataclass(frozen=True)
class Filter:
    """Abstaining on confident answers by u_sem, compared with another score.

    Attributes:
        confident: share of answers in the confident half. It is above 1/2 if many answers tie at
            the median of MSP.
        coverage: share of all answers that the filter accepts. It is 0.25 unless many answers tie.
        confident_error: error rate of the confident half, without abstaining.
        by_fragility, by_other: error rates after the filter.
        difference: the first minus the second; negative = u_sem is the better filter.
    """

    confident: float
    coverage: float
    confident_error: float
    by_fragility: float
    by_other: float
    difference: Interval


def confident_filter(
    msp: ArrayLike, fragility: ArrayLike, other: ArrayLike, answers: Labelled
) -> Filter:
    """Error rate of the confident half after abstaining on half of it, by fragility or `other`.

    Source: table "payoff" of the paper, where the other score is entropy.

    Example:
        >>> msp, fragility, other = [0, 0, 1, 1] * 10, [0, 1, 0, 1] * 10, [0.5] * 40
        >>> answers = Labelled([0, 1, 1, 1] * 10, range(40), resamples=200)
        >>> payoff = confident_filter(msp, fragility, other, answers)
        >>> payoff.confident_error, payoff.by_fragility, payoff.by_other
        (0.5, 0.0, 0.5)
    """
    m, f, o = answers.columns(msp=msp, fragility=fragility, other=other)
    w = answers.wrong.astype(float)
    median, by_fragility, by_other = Medians(m), Rejection(f, w), Rejection(o, w)

    def difference(counts: np.ndarray) -> np.ndarray:
        half = counts * (m <= median(counts)[:, None])
        number = np.maximum(1, np.round((1 - FILTERED) * half.sum(1, keepdims=True)))
        return (by_fragility.kept(half, number) - by_other.kept(half, number))[:, 0]

    confident = int((m <= np.median(m)).sum())
    without, by_f, by_o = (
        _at(1 - share, _confident_risk(m, by, w))
        for by, share in ((m, 0), (f, FILTERED), (o, FILTERED))
    )
    interval = bootstrap_interval(by_f - by_o, difference, answers)
    accepted = max(1, round((1 - FILTERED) * confident))
    return Filter(confident / len(m), accepted / len(m), without, by_f, by_o, interval)


def aurc_difference(first: ArrayLike, second: ArrayLike, answers: Labelled) -> Interval:
    """AURC of the first score minus that of the second, on the same resamples.

    Negative = the first is better.

    Example:
        >>> good, bad = [0.1, 0.9] * 10, [0.9, 0.1] * 10
        >>> aurc_difference(good, bad, Labelled([0, 1] * 10, range(20))).high < 0  # good is better
        True
    """
    first, second = answers.columns(first=first, second=second)
    errors = answers.wrong.astype(float)
    a, b = Rejection(first, errors), Rejection(second, errors)

    def difference(counts: np.ndarray) -> np.ndarray:
        total = counts @ errors
        return a.area(counts, total) - b.area(counts, total)

    return bootstrap_interval(aurc(first, errors) - aurc(second, errors), difference, answers)


def filter_curve(
    msp: ArrayLike, by: ArrayLike, wrong: ArrayLike, abstain: Sequence[float] | np.ndarray
) -> Float[np.ndarray, " m"]:
    """Error rate of the confident half by MSP, after abstaining on shares of it.

    Source: figure "payoff" of the paper.

    Args:
        by: (n,) score. The answers with the highest values are rejected.
        abstain: (m,) shares of the confident half that are rejected, in [0, 1]. At least one answer
            is kept.

    Example:
        >>> msp, by, wrong = [0] * 4 + [1] * 4, [1, 2, 3, 4] + [0] * 4, [0, 0, 0, 1] + [1] * 4
        >>> filter_curve(msp, by, wrong, abstain=[0, 0.25]).tolist()  # one of four, then none
        [0.25, 0.0]
    """
    check_rows(range(len(np.asarray(wrong))), msp=msp, by=by, wrong=wrong)
    curve = _confident_risk(msp, by, wrong)
    return np.array([_at(1 - share, curve) for share in abstain])


def global_selector(
    controls: ArrayLike,
    signal: ArrayLike,
    answers: Labelled,
) -> dict[float, tuple[float, float, Interval]]:
    """Error rate of the answers that a logistic selector accepts, with and without the signal.

    For each of `COVERAGES`: the error rate without the signal, the rate with it, and the second
    minus the first. The selector is fitted out of fold. Source: appendix "Deployment Payoff: Full
    Analysis" of the paper.

    Args:
        controls: (n, m), MSP and entropy.
        signal: (n,) score of Sem-ASMI, u_sem.

    Raises:
        ValueError: also if fewer than five clusters have a right answer, or a wrong one.

    Example:
        >>> signal, wrong = [0.1, 0.3, 0.2, 0.9] * 10, [0, 0, 1, 1] * 10
        >>> control = [[n % 7] for n in range(40)]
        >>> answers = Labelled(wrong, range(40), resamples=100)
        >>> without, with_signal, change = global_selector(control, signal, answers)[0.7]
        >>> without > 0.4 > with_signal, change.high < 0  # the control has no information on errors
        (True, True)
    """
    controls, signal = answers.columns(controls=control_table(controls), signal=signal)
    wrong, folds = answers.wrong.astype(float), answers.folds()
    base, full = (
        answers.once(error_probability, features, answers.wrong, folds)
        for features in (controls, np.column_stack([controls, signal]))
    )
    with_signal, without = Rejection(full, wrong), Rejection(base, wrong)

    def difference(counts: np.ndarray) -> np.ndarray:
        number = np.maximum(1, np.round(np.outer(counts.sum(1), COVERAGES)))
        return with_signal.kept(counts, number) - without.kept(counts, number)

    by_coverage = {}
    for coverage, drawn in zip(COVERAGES, bootstrap_values(difference, answers).T, strict=True):
        before, after = (retained_error(score, wrong, coverage) for score in (base, full))
        interval = percentile_interval(after - before, drawn, answers.n_clusters)
        by_coverage[coverage] = before, after, interval
    return by_coverage
