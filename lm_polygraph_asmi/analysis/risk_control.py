"""A threshold on a score with a risk guarantee: a bound on the error rate of accepted answers.

It uses fixed sequence testing (Angelopoulos et al., 2021, arXiv 2110.01052). From a preset coverage
on, thresholds are tested in ascending order. The first threshold whose risk cannot be shown ends
the sequence, and the one before it is used. The test is exact binomial; if clusters have several
answers, it uses only a share of the answers, at most one per cluster. If there are very many
answers, sums over clusters are tested instead. The proofs are on the page of the guarantee.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple
from zlib import crc32

import numpy as np
from jaxtyping import Bool, Float, Int, Real, Shaped
from numpy.typing import ArrayLike

from lm_polygraph_asmi.analysis.clusters import binary, finite
from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.validation import check_number

# START is the coverage of the first threshold. With more than FEW labels, a second sequence with a
# smaller part of the level begins at LOW_START / sqrt(labels). In simulations, these values
# accepted most.
START, LOW_START = 0.3, 3.5
FEW, LOW_PART = 300, 0.3
# If clusters may have three or more answers, and at least this many answers remain with one per
# cluster, all answers are tested by bets, which accepted more than the exact test in simulations.
# The second number applies with `unlabelled` scores. The simulations prove nothing, but the
# guarantee does not depend on them: the sizes of clusters choose the test, not the labels.
BETTING_FROM = 250, 150
CHOICE_SHARE = 0.2  # share of the clusters that choose thresholds for bets, and do not test
# Stakes that are averaged, as shares of the largest stake that cannot lose everything.
BETS = np.linspace(0, 1, 51)[1:-1]


@dataclass(frozen=True)
class RiskThreshold:
    """The score up to which answers are accepted, with the guarantee that `promise` states."""

    threshold: float | None  # accept if score <= this; None: not attainable with these answers
    coverage: float  # share of all these answers that is accepted; 0 without a threshold
    error_rate: float | None  # of the accepted answers in this sample; None without a threshold
    risk: float
    confidence: float
    base_rate: float | None  # error rate of all answers; None: unknown, labelled in order
    answers: int
    clusters: int
    largest: int = 1  # most answers of one cluster in later use
    share: float = 0.0  # share of the clusters that made choices and did not test
    tested: int | None = None  # clusters that test; None: not recorded
    signals: int = 1  # number of signals tried, each at an equal part of the level
    labels: int | None = None  # labels given so far, if in order; None: every answer has a label

    @property
    def unavoidable(self) -> float:
        """Share of answers that even a perfect score must reject at this risk."""
        return max(0.0, ((self.base_rate or 0.0) - self.risk) / (1 - self.risk))

    @property
    def thinning(self) -> str:
        """Why clusters have no answer that tests (`thinned_rows`), in a sentence; or empty."""
        chose = round(self.share * self.clusters)
        fewer = self.tested is not None and self.tested + chose < self.clusters
        if self.largest == 1 or not (fewer or self.labels is not None):
            return ""
        return (
            f" An answer is drawn with chance 1 in {self.largest}, since a cluster may have "
            f"{self.largest} answers."
        )

    @property
    def promise(self) -> str:
        """The guarantee in words. The confidence is over samples of labelled answers."""
        clusters = (
            "no two new answers share a passage or cluster"
            if self.largest == 1
            else f"no cluster has more than {self.largest} new answers"
        )
        return (
            f"with {100 * self.confidence:g}% confidence, at most {100 * self.risk:g}% of accepted "
            f"answers are wrong, if {clusters}"
        )

    @property
    def limits(self) -> str:
        """A sentence on limits of any score: labels needed, answers to reject; or empty."""
        sentences = []
        least = least_labels(self.risk, 1 - (1 - self.confidence) / self.signals)
        if self.tested is not None and self.tested < least:
            sentences.append(
                f"Even without an error, at least {least} answers, one per cluster, must test the "
                f"threshold; {self.tested} do."
            )
        if self.unavoidable:
            sentences.append(
                f"{self.base_rate:.0%} of all answers are wrong, so any score must reject at least "
                f"{math.ceil(100 * self.unavoidable - 1e-9)}%."
            )
        return " ".join(sentences)


def check_guarantee(risk: float, confidence: float) -> None:
    """Raise ValueError unless both are numbers in (0, 1)."""
    for name, value in (("risk", risk), ("confidence", confidence)):
        check_number(name, value)
        if not 0 < value < 1:
            raise ValueError(f"{name} must lie strictly between 0 and 1, got {value}")


def risk_threshold(
    scores: ArrayLike,
    answers: Labelled,
    risk: float,
    confidence: float,
    *,
    choosing: ArrayLike | None = None,
    unlabelled: ArrayLike | None = None,
    largest: int | None = None,
) -> RiskThreshold:
    """The largest threshold whose risk guarantee holds with at least this confidence.

    Two assumptions: clusters come from the same distribution as later ones, and no later cluster
    has more answers than `largest`. If clusters have several answers, at most one per cluster tests
    (`thinned_rows`). If clusters may have three or more answers, and there are very many answers,
    all of them test, by bets on sums over clusters (`BETTING_FROM`); without `unlabelled`, those of
    the clusters that choose do not.

    The thresholds to test are the scores of the answers that test. Then, as the threshold rises,
    the risk must pass `risk` at most once, and stay above it from there on (see the page of the
    guarantee). Bets test the scores of `CHOICE_SHARE` of the clusters, which also choose where to
    begin. With `unlabelled`, the scores of those answers are tested, and the guarantee needs no
    such condition.

    Args:
        scores: (n,), higher = more uncertain.
        answers: the same n answers, with labels and clusters.
        risk: largest error rate among accepted answers, in (0, 1).
        confidence: least probability, over samples of answers, that the guarantee holds.
        choosing: (n,) booleans. True for rows of whole clusters that chose the score, so that
            they do not test.
        unlabelled: (m,) scores of other answers, like later ones.
        largest: most answers of one cluster in later use; None: the most of a cluster here.

    All draws are seeded by the scores (`seed_of`), so the order of rows does not decide who tests.

    Example:
        >>> scores, wrong = [0.1] * 150 + [0.9] * 50, [0] * 150 + [1] * 50
        >>> answers = Labelled(wrong, clusters=range(200))
        >>> rule = risk_threshold(scores, answers, risk=0.1, confidence=0.9)
        >>> rule.threshold, rule.coverage, rule.error_rate
        (0.1, 0.75, 0.0)
    """
    check_guarantee(risk, confidence)
    (score,) = answers.columns(scores=scores)
    errors, codes = answers.wrong, answers.codes
    others = None if unlabelled is None else finite(unlabelled=unlabelled)
    largest = largest or int(np.bincount(codes).max())
    if answers.n_clusters < 2:
        raise ValueError(
            "expected at least two clusters, got one: use answers on several passages (with one "
            "answer "
            f"each, at least {least_labels(risk, confidence)} at this risk and confidence)"
        )
    chosen = np.zeros(len(score), bool) if choosing is None else binary(choosing=choosing)
    answers.columns(choosing=chosen)  # raises ValueError unless there is one for each answer
    if {*codes[chosen]} & {*codes[~chosen]}:
        raise ValueError("choosing: expected whole clusters, got only a part of one")
    tests = tests_of((score, errors, codes), chosen, risk, confidence, others, largest)
    limits = [
        float(limit)
        for grid, level in tests.grids
        for limit in grid[: _passed(grid, level, *tests.rows, risk, tests.largest)]
    ]
    # The test may accept everything, but answers above all scores of the sample were not tested.
    threshold = min(max(limits), float(score.max())) if limits else None
    kept = errors[score <= (np.nan if threshold is None else threshold)]
    return RiskThreshold(
        threshold=threshold,
        coverage=len(kept) / len(score),
        error_rate=float(kept.mean()) if len(kept) else None,
        risk=risk,
        confidence=confidence,
        base_rate=float(errors.mean()),
        answers=len(score),
        clusters=answers.n_clusters,
        largest=largest,
        share=tests.share,
        tested=len(set(tests.rows[2])),
    )


Rows = tuple[Real[np.ndarray, " n"], Shaped[np.ndarray, " n"], Int[np.ndarray, " n"]]
"""Answers: score; label (0: right, NaN: none, else wrong); number of the cluster."""
Grids = list[tuple[Real[np.ndarray, " t"], float]]
"""Sequences of tests: ascending thresholds, and the level of each test in the sequence."""


class SequencesOfTests(NamedTuple):
    """Which thresholds are tested, at which level, and on which answers."""

    grids: Grids  # thresholds and level of each sequence
    rows: Rows  # the answers that test
    largest: int  # argument of `p_value`; 1: the exact test
    share: float  # share of the clusters that made choices


def tests_of(
    answers: Rows,
    choosing: Bool[np.ndarray, " n"],
    risk: float,
    confidence: float,
    others: Real[np.ndarray, " m"] | None,
    largest: int,
) -> SequencesOfTests:
    """The tests of `risk_threshold`. `others` are its `unlabelled` scores.

    They do not depend on the order of rows. Labels matter only in two places: they order equal
    scores of one cluster, and for bets without `others`, some clusters choose the thresholds.
    """
    score, errors, codes = answers
    order, seed = np.lexsort((errors, score, codes)), seed_of(score)
    score, errors, codes, choosing = score[order], errors[order], codes[order], choosing[order]
    total = int(codes.max()) + 1
    codes = np.random.default_rng(seed).permutation(total)[codes]  # the order of the bets
    bets = largest > 2 and len(score) / largest >= BETTING_FROM[others is not None]
    if bets and others is None and not choosing.any():
        choosing = choosing_rows(codes, (seed, 1))  # another random stream than the permutation's
    alone = np.isin(np.arange(len(codes)), thinned_rows(codes, largest, seed))
    testing = ~choosing & (bets | alone)
    rows, n = (score[testing], errors[testing], codes[testing]), len(set(codes[testing]))
    if bets and others is None:
        chosen = score[choosing], errors[choosing], codes[choosing]
        grids = [(_strongest_on(*chosen, risk, largest), 1 - confidence)]
    else:
        grids = _grids(rows[0] if others is None else others, n, risk, confidence)
    return SequencesOfTests(grids, rows, largest if bets else 1, len(set(codes[choosing])) / total)


def seed_of(*columns: ArrayLike) -> int:
    """A seed computed from the values of columns (n,), whatever the order of rows.

    With a fixed seed, the clusters at the same places would test in every sample. If keys are
    sorted by size or topic, too many of these would be of one kind.
    """
    ordered = (np.sort(np.asarray(column, dtype=float) + 0.0) for column in columns)
    return crc32(b"".join(column.tobytes() for column in ordered))


def ordered_threshold(
    scores: ArrayLike, wrong: ArrayLike, risk: float, confidence: float, largest: int = 1
) -> tuple[RiskThreshold, np.ndarray, int]:
    """The threshold found with labels given in order, the most certain answers first.

    Also returns the rows to label for the next test, and how many of them may be wrong. One may
    look after each label, and stop at any time. With all labels, the threshold is that of
    `risk_threshold`. Labels above the first test that fails change nothing.

    Args:
        scores: (N,) scores of all answers, one per cluster, known before the first label.
        wrong: (N,) labels. None or NaN: no label, which counts as wrong.
        risk, confidence: see `risk_threshold`.
        largest: most answers of one cluster in later use, by which `thinned_rows` drew the answers.

    Returns:
        The threshold; row numbers to label, the most certain first (if there are none, further
        labels do not help); and the most of them that may be wrong if the next test is to pass.

    Example:
        >>> scores, wrong = range(100), [0] * 30 + [None] * 70
        >>> rule, to_label, spare = ordered_threshold(scores, wrong, risk=0.2, confidence=0.95)
        >>> rule.threshold, rule.coverage, to_label.tolist(), spare
        (29.0, 0.3, [30, 31, 32, 33, 34, 35, 36], 3)
    """
    from scipy.special import bdtr

    score, label = finite(scores=scores), np.asarray(wrong, dtype=float)
    if len(label) != len(score):
        raise ValueError(
            f"expected a label, or None, for each of {len(score)} scores, got {len(label)}"
        )
    known = ~np.isnan(label)
    binary(wrong=label[known])
    rule = risk_threshold(score, Labelled(label != 0, range(len(score))), risk, confidence)
    order, following = np.argsort(score, kind="stable"), list[tuple[float, float]]()
    for grid, level in _grids(score, len(score), risk, confidence):
        passed, possible = (
            _passed(grid, level, score, errors, order, risk, 1)
            for errors in (label != 0, label == 1)
        )
        following += [(limit, level) for limit in grid[passed:possible][:1].tolist()]
    accepted = label[known & (score <= (np.nan if rule.threshold is None else rule.threshold))]
    rule = replace(
        rule,
        error_rate=float(accepted.mean()) if len(accepted) else None,
        base_rate=None,
        largest=largest,
        labels=int(known.sum()),
    )
    limit, level = min(following, key=lambda test: test[0], default=(-np.inf, 0.0))
    tested, to_label = label[score <= limit], order[(~known & (score <= limit))[order]]
    allowed = (bdtr(np.arange(len(tested) + 1), len(tested), risk) <= level).sum() - 1
    return rule, to_label, max(0, int(allowed - (tested == 1).sum()))


def thinned_rows(
    codes: Int[np.ndarray, " n"], largest: int | None, seed: int
) -> Int[np.ndarray, " m"]:
    """Rows, at most one per cluster, drawn so that each has the same chance, 1 / `largest`.

    Of each cluster, one random row is taken with probability size / `largest`. So rows are
    independent, and the expected share of wrong rows is that of all answers.

    Args:
        codes: number of each row's cluster, from 0.
        largest: most rows of a cluster; None: the most here.
        seed: seed of the draw.

    Example:
        >>> thinned_rows(np.array([0, 0, 0, 1, 1, 1, 2, 2, 2]), 3, seed=0).tolist()  # one of each
        [1, 3, 6]
    """
    sizes = np.bincount(codes)
    if (largest := largest or sizes.max()) < sizes.max():
        raise ValueError(
            f"largest: expected at least {sizes.max()}, the size of the largest cluster here; got "
            f"{largest}. Name the most answers that a later cluster may have"
        )
    rng = np.random.default_rng([seed, 1])  # another random stream than in `choosing_rows`
    order = rng.permutation(len(codes))
    firsts = order[np.unique(codes[order], return_index=True)[1]]
    return np.sort(firsts[rng.random(len(sizes)) * largest < sizes])


def _grids(scores: Real[np.ndarray, " m"], n: int, risk: float, confidence: float) -> Grids:
    """The sequences of tests with n labels, whose thresholds are among `scores`."""
    grids, ranked = [], np.sort(scores)
    for part, start in _sequences(n):
        ranks = ranks_to_test(n, risk, part * (1 - confidence), start)
        places = np.ceil(ranks * (len(ranked) / n) - 1e-9).astype(int) - 1
        grids.append((np.unique(ranked[places]), part * (1 - confidence)))
    return grids


def _sequences(n: int) -> list[tuple[float, float]]:
    """For n labels, the part of the level and the first coverage of each sequence of thresholds."""
    if n <= FEW:
        return [(1.0, START)] if n else []
    return [(1 - LOW_PART, START), (LOW_PART, LOW_START / math.sqrt(n))]


@cache
def ranks_to_test(n: int, risk: float, level: float, start: float) -> Int[np.ndarray, " t"]:
    """Numbers of accepted answers, of n, at which thresholds are tested; ascending, up to n.

    They begin at coverage `start`, with one number for each further error that the exact test
    allows at this level.

    Example:
        >>> ranks_to_test(60, 0.2, 0.05, 0.3).tolist()  # 1 error in 22, 2 in 30, 3 in 37 ...
        [22, 30, 37, 44, 50, 57, 60]
    """
    from scipy.stats import binom

    accepted = np.arange(n + 1)
    errors = binom.ppf(level, accepted, risk)  # smallest number whose cdf reaches the level
    allowed = np.where(binom.cdf(errors, accepted, risk) <= level, errors, errors - 1)
    ranks = 1 + np.flatnonzero(np.diff(allowed) > 0)
    return np.union1d(ranks[ranks >= start * n], [n])


def least_labels(risk: float, confidence: float) -> int:
    """Least number of answers, one per cluster, all right and accepted, that give the guarantee.

    Example:
        >>> least_labels(risk=0.05, confidence=0.95)
        59
    """
    alone, shared = (
        math.ceil(math.log(part * (1 - confidence)) / math.log1p(-risk) - 1e-9)
        for part in (1.0, 1 - LOW_PART)
    )
    return alone if alone <= FEW else max(shared, FEW + 1)


def least_wins(gains: Float[np.ndarray, " stakes"], level: float) -> int:
    """Number of clusters, one after the other, after which the capital reaches 1 / level.

    In each cluster, every stake grows by its share in `gains`.
    """

    def reached(clusters: int) -> bool:
        log_capital = np.logaddexp.reduce(clusters * np.log1p(gains)) - np.log(len(gains))
        return bool(log_capital >= -np.log(level) - 1e-9)

    return 1 + bisect_left(range(1, 10**9), True, key=reached)


def choosing_rows(
    codes: Int[np.ndarray, " n"], seed: int | tuple[int, int], share: float = CHOICE_SHARE
) -> Bool[np.ndarray, " n"]:
    """Mask of the rows in the random `share` of clusters that make choices and do not test."""
    order = np.random.default_rng(seed).permutation(codes.max() + 1)
    return np.isin(codes, order[: max(1, round(share * len(order)))])


def _strongest_on(
    score: Real[np.ndarray, " n"],
    wrong: Shaped[np.ndarray, " n"],
    clusters: Int[np.ndarray, " n"],
    risk: float,
    largest: int,
) -> Real[np.ndarray, " t"]:
    """Thresholds for bets, from the one with the strongest evidence to one that accepts everything.

    A first threshold with too few answers, or with too many errors, would end the sequence at once.
    """
    grid = np.quantile(score, np.linspace(0.05, 1, 39), method="higher")
    grid = np.unique(np.r_[grid[:-1], np.inf])
    gains = [_gains(score <= t, wrong, clusters, risk, largest).sum(1).max() for t in grid]
    return grid[int(np.argmax(gains)) :]


def _passed(
    grid: Real[np.ndarray, " t"],
    level: float,
    score: Real[np.ndarray, " n"],
    errors: Shaped[np.ndarray, " n"],
    codes: Int[np.ndarray, " n"],
    risk: float,
    largest: int,
) -> int:
    """Number of ascending thresholds (t,) that pass before the first that does not."""
    tests = (p_value(score <= limit, errors, codes, risk, largest) for limit in grid)
    return next((place for place, p in enumerate(tests) if p > level), len(grid))


def p_value(
    keep: Bool[np.ndarray, " n"],
    errors: Shaped[np.ndarray, " n"],
    codes: Int[np.ndarray, " n"],
    risk: float,
    largest: int,
) -> float:
    """p-value of "a share of at least `risk` of the answers in `keep` is wrong".

    If no cluster can have several answers (`largest` is 1), the test is exactly binomial. Otherwise
    it is a betting test, see `risk_monitor`. Let Z be the sum of (wrong - risk) over a cluster's
    accepted answers. Under the hypothesis, its mean is at least 0. A share of the capital is staked
    on -Z, cluster by cluster. The p-value is 1 / (maximum of the capital), where the capital is
    averaged over stakes. The clusters' numbers `codes` give their order, which must be random, as
    in `tests_of`.

    Example:
        >>> keep, errors = np.ones(30, bool), np.zeros(30, bool)
        >>> round(p_value(keep, errors, np.arange(30), 0.1, 1), 3)  # 0.9 to the power of 30
        0.042
    """
    from scipy.special import bdtr

    if largest == 1:
        return float(bdtr((keep & errors).sum(), keep.sum(), risk)) if keep.any() else 1.0
    gains = _gains(keep, errors, codes, risk, largest)
    log_capital = np.logaddexp.reduce(gains.cumsum(1), axis=0) - np.log(len(BETS))
    return float(np.exp(-max(0.0, log_capital.max())))


def _gains(
    keep: Bool[np.ndarray, " n"],
    errors: Shaped[np.ndarray, " n"],
    clusters: Int[np.ndarray, " n"],
    risk: float,
    largest: int,
) -> Float[np.ndarray, "stakes clusters"]:
    """Logarithm of the factor by which the capital of each stake grows in each cluster."""
    codes = np.unique(clusters, return_inverse=True)[1]
    sums = np.bincount(codes, keep * (errors - risk))
    stakes = BETS / ((1 - risk) * largest)  # the largest loss is if all are accepted and wrong
    return np.log1p(-stakes[:, None] * sums)
