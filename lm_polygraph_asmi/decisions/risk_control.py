"""A threshold on a score with a risk guarantee: a bound on the error rate of accepted answers.

Fixed sequence testing (Angelopoulos et al., 2021, arXiv 2110.01052): from a preset coverage towards
more, the first threshold whose risk cannot be shown ends the sequence, and the one before is used.
With one answer a cluster, the test is exact binomial; otherwise it uses sums by cluster.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import ArrayLike

from lm_polygraph_asmi.analysis.clusters import SEED, binary, check_rows, cluster_codes, finite
from lm_polygraph_asmi.validation import check_number

START, LOW_START = 0.3, 3.5
"""Coverage of the first threshold; with more than FEW labels, a second sequence, with a smaller
part of the level, begins at LOW_START / sqrt(labels). These accept most in simulations."""
FEW, LOW_PART = 200, 0.3
CHOICE_SHARE = 0.2
"""Share of the clusters that choose a signal, or with clusters the thresholds, and do not test."""
BETS = np.linspace(0, 1, 51)[1:-1]
"""Stakes to average over, as shares of the largest stake that cannot lose everything."""


@dataclass(frozen=True)
class RiskThreshold:
    """The score up to which answers are accepted, with the guarantee that `promise` states."""

    threshold: float | None  # accept if score <= this; None: not attainable with these answers
    coverage: float  # share of all these answers that is accepted, 0 without a threshold
    error_rate: float | None  # of the accepted answers in this sample, None without a threshold
    risk: float
    confidence: float
    base_rate: float  # error rate of all answers
    answers: int
    clusters: int
    largest: int | None = None  # most answers of a cluster; None: not recorded
    share: float = 0.0  # of the clusters, which made choices and did not test

    @property
    def unavoidable(self) -> float:
        """Share of answers that even a perfect score must reject for this risk."""
        return max(0.0, (self.base_rate - self.risk) / (1 - self.risk))

    @property
    def single(self) -> bool:
        """Whether each cluster has one answer."""
        return self.answers == self.clusters

    @property
    def promise(self) -> str:
        """The guarantee, in words; the confidence is over samples of labelled answers."""
        return (
            f"with {100 * self.confidence:g}% confidence, at most {100 * self.risk:g}% of accepted "
            "answers are wrong"
        )

    @property
    def limits(self) -> str:
        """What no score can change, in a sentence: labels needed, answers to reject; or empty."""
        kind, sentences = "answers" if self.single else "clusters", []
        least = least_clusters(self.risk, self.confidence, self.single, self.share)
        if self.clusters < least:
            sentences.append(f"Even without an error, at least {least} {kind} are needed.")
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
    wrong: ArrayLike,
    clusters: Sequence[str],
    risk: float,
    confidence: float,
    seed: int = SEED,
    share: float = 0.0,
    unlabelled: ArrayLike | None = None,
) -> RiskThreshold:
    """The most lenient threshold whose risk guarantee holds with at least this confidence.

    Assumes that clusters, one key a row, come from the distribution of the later ones, and that
    none of those has more answers than the largest here. Thresholds are (m,) scores of `unlabelled`
    answers, or of `CHOICE_SHARE` of the clusters if one has several answers; else of the labelled
    answers: then the risk, as the threshold rises, must pass `risk` once (page of the guarantee).
    A `share` of the clusters, drawn by `seed`, chose the score (`choosing_rows`): it does not test.

    Example:
        >>> scores, wrong = [0.1] * 150 + [0.9] * 50, [0] * 150 + [1] * 50
        >>> keys = [str(n) for n in range(200)]
        >>> rule = risk_threshold(scores, wrong, keys, risk=0.1, confidence=0.9)
        >>> rule.threshold, rule.coverage, rule.error_rate
        (0.1, 0.75, 0.0)
    """
    check_guarantee(risk, confidence)
    check_rows(clusters, scores=scores, wrong=wrong)
    score, errors, codes = finite(scores=scores), binary(wrong=wrong), cluster_codes(clusters)
    sizes = np.bincount(codes)
    total, largest = len(sizes), int(sizes.max())
    if largest > 1 and unlabelled is None:
        share = max(share, CHOICE_SHARE)
    if total < 2:
        raise ValueError(
            "expected at least two clusters, got one: use answers on several passages (with one "
            f"answer each, at least {least_clusters(risk, confidence)} at this risk and confidence)"
        )
    choosing = choosing_rows(codes, seed, share)
    tested = score[~choosing], errors[~choosing], codes[~choosing]
    found: list[float | None] = []
    for part, start in _sequences(total - _choosers(total, share)):
        level = part * (1 - confidence)
        if unlabelled is not None:
            ranks = ranks_to_test(total - _choosers(total, share), risk, level, start)
            others = finite(unlabelled=unlabelled)
            grid = np.quantile(others, ranks / ranks[-1], method="inverted_cdf")
        elif largest == 1:
            grid = np.sort(tested[0])[ranks_to_test(len(tested[0]), risk, level, start) - 1]
        else:
            chosen = score[choosing], errors[choosing], codes[choosing]
            grid, level = _strongest_on(*chosen, risk, largest), 1 - confidence
        found.append(_last_passed(np.unique(grid), *tested, risk, level, largest, seed))
    threshold = max((limit for limit in found if limit is not None), default=None)
    coverage, rate = 0.0, None
    if threshold is not None:
        # Accepting all was tested, but answers above all scores in the sample were not.
        threshold = min(threshold, float(score.max()))
        kept = errors[score <= threshold]
        coverage, rate = len(kept) / len(score), float(kept.mean()) if len(kept) else None
    return RiskThreshold(
        threshold, coverage, rate, risk, confidence, float(errors.mean()), len(score), total,
        largest, share,
    )  # fmt: skip


def _sequences(n: int) -> list[tuple[float, float]]:
    """Part of the level, and first coverage, of each sequence of thresholds for n labels."""
    if n <= FEW:
        return [(1.0, START)]
    return [(1 - LOW_PART, START), (LOW_PART, LOW_START / math.sqrt(n))]


@cache
def ranks_to_test(n: int, risk: float, level: float, start: float) -> np.ndarray:
    """Numbers of accepted answers, of n, at which thresholds are tested, ascending; the last is n.

    From coverage `start` on, one for each further error that the exact test at this level allows.

    Example:
        >>> ranks_to_test(60, 0.2, 0.05, 0.3).tolist()  # 1 error in 22, 2 in 30, 3 in 37 ...
        [22, 30, 37, 44, 50, 57, 60]
    """
    from scipy.stats import binom

    accepted = np.arange(n + 1)
    errors = binom.ppf(level, accepted, risk)  # the fewest whose probability reaches the level
    allowed = np.where(binom.cdf(errors, accepted, risk) <= level, errors, errors - 1)
    ranks = 1 + np.flatnonzero(np.diff(allowed) > 0)
    return np.union1d(ranks[ranks >= start * n], [n])


def least_clusters(risk: float, confidence: float, single: bool = True, share: float = 0.0) -> int:
    """The least number of labelled clusters, all right and accepted, that give the guarantee.

    Example:
        >>> least_clusters(risk=0.05, confidence=0.95)
        59
    """
    total = 2

    def attainable(tested: int) -> bool:
        level = (1 - confidence) * (_sequences(tested)[0][0] if single else 1.0)
        if single:
            return bool((1 - risk) ** tested <= level * (1 + 1e-9))
        return tested >= least_wins(BETS * risk / (1 - risk), level)

    while not attainable(total - _choosers(total, share)):
        total += 1
    return total


def least_wins(gains: np.ndarray, level: float) -> int:
    """How many clusters in a row reach 1 / level; each gains a share (stakes,) of each stake."""

    def reached(clusters: int) -> bool:
        log_capital = np.logaddexp.reduce(clusters * np.log1p(gains)) - np.log(len(gains))
        return bool(log_capital >= -np.log(level) - 1e-9)

    return 1 + bisect_left(range(1, 10**9), True, key=reached)


def choosing_rows(codes: np.ndarray, seed: int = SEED, share: float = CHOICE_SHARE) -> np.ndarray:
    """(n,) rows of the clusters, numbered from 0, that make choices and do not test."""
    order = np.random.default_rng(seed).permutation(codes.max() + 1)
    return np.isin(codes, order[: _choosers(len(order), share)])


def _choosers(clusters: int, share: float) -> int:
    return max(1, round(share * clusters)) if share else 0


def _strongest_on(
    score: np.ndarray, wrong: np.ndarray, clusters: np.ndarray, risk: float, largest: int
) -> np.ndarray:
    """Thresholds for clusters, from the one of strongest evidence to one that accepts everything.

    A first threshold with too few answers, or with too many errors, would end the sequence at once.
    """
    grid = np.quantile(score, np.linspace(0.05, 1, 39), method="higher")
    grid = np.unique(np.r_[grid[:-1], np.inf])
    gains = [_gains(score <= t, wrong, clusters, risk, largest).sum(1).max() for t in grid]
    return grid[int(np.argmax(gains)) :]


def _last_passed(
    grid: np.ndarray, score: np.ndarray, errors: np.ndarray, codes: np.ndarray, risk: float,
    level: float, largest: int, seed: int,
) -> float | None:  # fmt: skip
    """The last of ascending thresholds before the first whose risk cannot be shown."""
    if largest == 1:
        order = np.argsort(score)
        kept = np.searchsorted(score[order], grid, side="right")
        found = np.r_[0, errors[order].cumsum()][kept]
        passes = np.logical_and.accumulate(_binomial(found, kept, risk) <= level)
        return float(grid[passes][-1]) if passes.any() else None
    codes = np.unique(codes, return_inverse=True)[1]
    passed = None
    for threshold in grid.tolist():
        if p_value(score <= threshold, errors, codes, risk, largest, seed) > level:
            break
        passed = threshold
    return passed


def p_value(
    keep: np.ndarray, errors: np.ndarray, codes: np.ndarray, risk: float, largest: int, seed: int
) -> float:
    """p-value of "a share of at least `risk` of the answers in `keep` (n,) is wrong".

    Exact binomial if no cluster can have several answers. Otherwise a betting test (see `gate`):
    let Z be the sum of (wrong - risk) over a cluster's accepted answers, whose mean is at least 0
    under this hypothesis. Capital that bets a share on -Z, cluster by cluster, gives the p-value 1
    / (its maximum). It averages over stakes, and the order of clusters is random.

    Example:
        >>> keep, errors = np.ones(30, bool), np.zeros(30, bool)
        >>> round(p_value(keep, errors, np.arange(30), 0.1, 1, SEED), 3)  # 0.9 to the power of 30
        0.042
    """
    if largest == 1:
        return float(_binomial((keep & errors).sum(), keep.sum(), risk))
    gains = _gains(keep, errors, codes, risk, largest)
    gains = gains[:, np.random.default_rng(seed).permutation(gains.shape[1])]
    log_capital = np.logaddexp.reduce(gains.cumsum(1), axis=0) - np.log(len(BETS))
    return float(np.exp(-max(0.0, log_capital.max())))


def _binomial(errors: np.ndarray, kept: np.ndarray, risk: float) -> np.ndarray:
    """Probability of at most so many errors among `kept` answers; 1 for none."""
    from scipy.special import bdtr

    return np.where(kept > 0, bdtr(errors, np.maximum(kept, 1), risk), 1.0)


def _gains(
    keep: np.ndarray, errors: np.ndarray, clusters: np.ndarray, risk: float, largest: int
) -> np.ndarray:
    """(stakes, clusters) logarithm of the factor by which a stake grows in a cluster."""
    codes = np.unique(clusters, return_inverse=True)[1]
    sums = np.bincount(codes, keep * (errors - risk))
    stakes = BETS / ((1 - risk) * largest)  # the largest loss: all accepted and wrong
    return np.log1p(-stakes[:, None] * sums)
