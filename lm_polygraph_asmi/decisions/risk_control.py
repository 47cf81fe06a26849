"""A threshold on a score with a risk guarantee: a bound on the error rate of accepted answers.

Learn then Test (Angelopoulos et al., 2021, arXiv 2110.01052). Thresholds are tested in sequence,
from strict to lenient. The null hypothesis is that the error rate of accepted answers is at least
the risk; the sequence stops at the first that cannot be rejected, and the threshold before it is
used. Questions on one passage are not independent, so the test uses sums by cluster.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from lm_polygraph_asmi.analysis.clusters import SEED, binary, check_rows, cluster_codes, finite
from lm_polygraph_asmi.validation import check_number

STRICTEST = 0.05
"""Coverage of the strictest threshold."""
STEPS = 39
GRID_SHARE = 0.2
"""Share of the clusters that choose the thresholds to test; the rest test them."""
BETS = np.linspace(0, 1, 51)[1:-1]
"""Stakes to average over, as shares of the largest stake that cannot lose everything."""


@dataclass(frozen=True)
class RiskThreshold:
    """The score up to which answers are accepted, and its risk guarantee.

    Attributes:
        threshold: accept if score <= this; None: not attainable with these answers.
        coverage: share of all these answers that is accepted, 0 without a threshold.
        error_rate: of the accepted answers in this sample, None without a threshold.
        risk, confidence: the guarantee: with at least this confidence over the sample, at most a
            share `risk` of accepted answers is wrong.
        base_rate: error rate of all answers.
        answers, clusters: numbers of them.
        largest: most answers of a cluster; None: not recorded.
        share: of the clusters, which chose the thresholds and did not test them.
    """

    threshold: float | None
    coverage: float
    error_rate: float | None
    risk: float
    confidence: float
    base_rate: float
    answers: int
    clusters: int
    largest: int | None = None
    share: float = GRID_SHARE

    @property
    def unavoidable(self) -> float:
        """Share of answers that even a perfect score must reject for this risk."""
        return max(0.0, (self.base_rate - self.risk) / (1 - self.risk))

    @property
    def single(self) -> bool:
        """Whether each cluster has one answer."""
        return self.answers == self.clusters

    def __str__(self) -> str:
        guarantee = f"at most {100 * self.risk:g}% errors, confidence {100 * self.confidence:g}%"
        if self.threshold is not None and self.error_rate is not None:
            sentence = (
                f"accept up to {self.threshold:.4g}: {self.coverage:.0%} of these answers, "
                f"{self.error_rate:.1%} of them wrong ({guarantee})"
            )
        else:
            advice = ""
            least = least_clusters(self.risk, self.confidence, self.single, self.share)
            if self.clusters < least:
                kind = "answers" if self.single else "clusters"
                advice += (
                    f"; even without an error, at least {least} {kind} are needed, of which "
                    f"{least - _fixing(least, self.share)} test thresholds"
                )
            sentence = f"not attainable with these {self.answers} answers ({guarantee}){advice}"
        if self.unavoidable:
            sentence += (
                f". {self.base_rate:.0%} of all answers are wrong, so any score must reject "
                f"{math.ceil(100 * self.unavoidable - 1e-9)}%"
            )
        return sentence


def check_guarantee(risk: float, confidence: float) -> None:
    """Raise ValueError unless both are numbers in (0, 1)."""
    for name, value in (("risk", risk), ("confidence", confidence)):
        check_number(name, value)
        if not 0 < value < 1:
            raise ValueError(f"{name} must lie strictly between 0 and 1, got {value}")


def group_codes(groups: Sequence[Any], answers: int) -> tuple[list[str], np.ndarray]:
    """Names of groups in their order, and the number (n,) of each answer's group."""
    if len(groups) != answers:
        raise ValueError(f"groups has {len(groups)} values for {answers} answers: one each")
    names, member = np.unique(np.asarray(list(map(str, groups))), return_inverse=True)
    return names.tolist(), member


def risk_threshold(
    scores: ArrayLike,
    wrong: ArrayLike,
    clusters: Sequence[str],
    risk: float,
    confidence: float,
    seed: int = SEED,
    share: float = GRID_SHARE,
) -> RiskThreshold:
    """The most lenient threshold with the risk guarantee.

    With probability at least `confidence` over the labelled answers, at most a share `risk` of
    later accepted answers is wrong. This assumes that clusters come from the same distribution and
    that none has more answers than the largest here. A share of the clusters chooses the thresholds
    to test, from the one of strongest evidence to one that accepts all; the rest tests them, in
    this order. Scores may depend on the labels of that share, but not on those of the rest.

    Args:
        clusters: (n,) key of each row; rows that share a passage or prompt are not independent.
        risk: guaranteed upper bound on the error rate of accepted answers, in (0, 1).
        confidence: in (0, 1).
        seed: of the choice of clusters that choose the thresholds, and of the order of the others.
        share: of the clusters that choose the thresholds: those of `fixing_rows`.

    Raises:
        ValueError: also fewer than two clusters, or risk or confidence outside (0, 1).

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
    if total < 2:
        raise ValueError(
            "expected at least two clusters, to choose thresholds and to test them, got one: use "
            "answers on several passages (with one answer each, at least "
            f"{least_clusters(risk, confidence, share=share)} at this risk and confidence)"
        )
    accepted_to = _search(score, errors, codes, risk, confidence, largest, seed, share)
    coverage, rate = 0.0, None
    if accepted_to is not None:
        # Accepting all was tested, but answers above all scores in the sample were not.
        accepted_to = min(accepted_to, float(score.max()))
        kept = errors[score <= accepted_to]
        coverage, rate = len(kept) / len(score), float(kept.mean())
    return RiskThreshold(
        accepted_to, coverage, rate, risk, confidence, float(errors.mean()), len(score), total,
        largest, share,
    )  # fmt: skip


def risk_thresholds(
    scores: ArrayLike,
    wrong: ArrayLike,
    clusters: Sequence[str],
    groups: Sequence[Any],
    risk: float,
    confidence: float,
    seed: int = SEED,
) -> dict[str, RiskThreshold]:
    """A threshold for each group of answers, such as a type of question.

    With probability at least `confidence`, the guarantees of all thresholds hold together
    (Bonferroni): `1 - confidence` is divided by the number of groups that have labels enough for
    their part of it. Numbers of labels choose these groups, not the labels. A group without a
    threshold needs `least_clusters` at its own confidence; abstain on its answers.

    Args:
        scores, wrong, clusters, risk, seed: as in `risk_threshold`.
        groups: (n,) name of each answer's group.
        confidence: of all guarantees together, in (0, 1).

    Returns:
        One for each group, by name, each with its own confidence.

    Example:
        >>> groups = ["who"] * 100 + ["why"] * 100 + ["how"] * 10
        >>> scores, wrong, keys = [0.1] * 210, [0] * 210, [str(n) for n in range(210)]
        >>> for name, rule in risk_thresholds(scores, wrong, keys, groups, 0.1, 0.9).items():
        ...     print(name, rule.threshold, round(rule.confidence, 3))
        how None 0.967
        who 0.1 0.95
        why 0.1 0.95
    """
    check_guarantee(risk, confidence)
    check_rows(clusters, scores=scores, wrong=wrong)
    score, errors, codes = finite(scores=scores), binary(wrong=wrong), cluster_codes(clusters)
    names, member = group_codes(groups, len(score))
    rows = {name: np.flatnonzero(member == row) for row, name in enumerate(names)}
    sizes = {name: np.unique(codes[of], return_counts=True)[1] for name, of in rows.items()}

    def surplus(name: str, tested: int) -> int:
        """Clusters of a group beyond the least, if so many groups are tested."""
        level, single = 1 - (1 - confidence) / tested, bool(sizes[name].max() == 1)
        return len(sizes[name]) - least_clusters(risk, level, single)

    tested = max(
        (k for k in range(1, len(rows) + 1) if sum(surplus(name, k) >= 0 for name in rows) >= k),
        default=0,
    )
    ranked = sorted(rows, key=lambda name: -surplus(name, max(tested, 1)))
    rules = {}
    for name, of in rows.items():
        enough = name in ranked[:tested]
        level = 1 - (1 - confidence) / (tested if enough else tested + 1)
        if enough:
            keys = np.asarray(clusters, dtype=str)[of].tolist()
            rules[name] = risk_threshold(score[of], errors[of], keys, risk, level, seed)
        else:
            rules[name] = RiskThreshold(
                None, 0.0, None, risk, level, float(errors[of].mean()), len(of), len(sizes[name]),
                int(sizes[name].max()),
            )  # fmt: skip
    return rules


def least_clusters(
    risk: float, confidence: float, single: bool = True, share: float = GRID_SHARE
) -> int:
    """The least number of labelled clusters that could ever give the guarantee.

    With no error among m tested answers, each a cluster, the p-value is (1 - risk)^m, and it must
    be at most 1 - confidence. Clusters of several answers are tested by betting, whose capital
    grows most if all answers of all clusters are accepted and right. Some clusters choose the
    thresholds and are not tested.

    Args:
        risk, confidence: of the guarantee, in (0, 1).
        single: whether each cluster has one answer.
        share: of the clusters that choose the thresholds.

    Example:
        >>> least_clusters(risk=0.05, confidence=0.95)  # 59 are tested
        74
    """
    least = int(np.ceil(np.log(1 - confidence) / np.log1p(-risk) - 1e-9))
    if not single:
        least = least_wins(BETS * risk / (1 - risk), 1 - confidence)
    total = least + 1
    while total - _fixing(total, share) < least:
        total += 1
    return total


def least_wins(gains: np.ndarray, level: float) -> int:
    """How many clusters in a row reach 1 / level; each gains a share (stakes,) of each stake."""

    def reached(clusters: int) -> bool:
        log_capital = np.logaddexp.reduce(clusters * np.log1p(gains)) - np.log(len(gains))
        return bool(log_capital >= -np.log(level) - 1e-9)

    few, enough = 0, 1
    while not reached(enough):
        few, enough = enough, 2 * enough
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if reached(middle) else (middle, enough)
    return enough


def _fixing(clusters: int, share: float) -> int:
    """How many of so many clusters choose the thresholds."""
    return max(1, round(share * clusters))


def fixing_rows(clusters: Sequence[str], seed: int = SEED, share: float = GRID_SHARE) -> np.ndarray:
    """(n,) rows of the clusters that choose thresholds; other choices may use them too."""
    return _fixing_rows(cluster_codes(clusters), seed, share)


def _fixing_rows(codes: np.ndarray, seed: int, share: float) -> np.ndarray:
    order = np.random.default_rng(seed).permutation(codes.max() + 1)
    return np.isin(codes, order[: _fixing(len(order), share)])


def _search(
    score: np.ndarray,
    errors: np.ndarray,
    codes: np.ndarray,
    risk: float,
    confidence: float,
    largest: int,
    seed: int,
    share: float,
) -> float | None:
    """`risk_threshold` of checked columns, with clusters numbered from 0; inf accepts all."""
    fixing = _fixing_rows(codes, seed, share)
    grid = _grid(score[fixing], errors[fixing], codes[fixing], risk, largest)
    test_scores, test_errors = score[~fixing], errors[~fixing]
    test_codes = np.unique(codes[~fixing], return_inverse=True)[1]
    accepted_to = None
    for threshold in grid:
        p_value = _p_value(test_scores <= threshold, test_errors, test_codes, risk, largest, seed)
        if p_value > 1 - confidence:
            break
        accepted_to = float(threshold)
    return accepted_to


def _grid(
    score: np.ndarray, wrong: np.ndarray, clusters: np.ndarray, risk: float, largest: int
) -> np.ndarray:
    """Thresholds to test, from the one of strongest evidence to one that accepts everything.

    A first threshold with too few answers, or with too many errors, would end the sequence at once.
    """
    grid = np.quantile(score, np.linspace(STRICTEST, 1, STEPS), method="higher")
    grid = np.unique(np.r_[grid[:-1], np.inf])
    gains = [_gains(score <= t, wrong, clusters, risk, largest).sum(1).max() for t in grid]
    return grid[int(np.argmax(gains)) :]


def risk_p_value(
    accepted: ArrayLike,
    wrong: ArrayLike,
    clusters: Sequence[Any],
    risk: float,
    largest: int | None = None,
    seed: int = SEED,
) -> float:
    """p-value of "a share of at least `risk` of the accepted answers is wrong".

    Exact binomial if every cluster has one answer. Otherwise a betting test: let Z be the sum of
    (wrong - risk) over a cluster's accepted answers, whose mean is at least 0 under this
    hypothesis. Capital that bets a share on -Z, cluster by cluster, does not grow on average, so by
    Ville's inequality 1 / (its maximum) is a p-value. It averages over stakes, and the order of
    clusters is random, so nothing is tuned to the answers. Source:
    Waudby-Smith and Ramdas (2024), Estimating means of bounded random variables by betting.

    Args:
        accepted: (n,), 1 or True = accepted.
        clusters: (n,) key of each answer.
        risk: in (0, 1), which is not checked.
        largest: most answers of a cluster, all of which may be wrong; None: the most here.
        seed: of the order of clusters.

    Example:
        >>> accepted, wrong = [1] * 30, [0] * 30
        >>> round(risk_p_value(accepted, wrong, range(30), risk=0.1), 3)  # 0.9 to the power of 30
        0.042
    """
    check_rows(list(clusters), accepted=accepted, wrong=wrong)
    codes = cluster_codes(clusters)
    largest = int(np.bincount(codes).max()) if largest is None else largest
    return _p_value(binary(accepted=accepted), binary(wrong=wrong), codes, risk, largest, seed)


def _p_value(
    keep: np.ndarray, errors: np.ndarray, codes: np.ndarray, risk: float, largest: int, seed: int
) -> float:
    """`risk_p_value` of checked columns, with clusters numbered from 0."""
    if largest == 1:
        from scipy.stats import binom

        return float(binom.cdf((keep & errors).sum(), keep.sum(), risk)) if keep.any() else 1.0
    gains = _gains(keep, errors, codes, risk, largest)
    gains = gains[:, np.random.default_rng(seed).permutation(gains.shape[1])]
    log_capital = np.logaddexp.reduce(gains.cumsum(1), axis=0) - np.log(len(BETS))
    return float(np.exp(-max(0.0, log_capital.max())))


def _gains(
    keep: np.ndarray, errors: np.ndarray, clusters: np.ndarray, risk: float, largest: int
) -> np.ndarray:
    """(stakes, clusters) logarithm of the factor by which a stake grows in a cluster."""
    codes = np.unique(clusters, return_inverse=True)[1]
    sums = np.bincount(codes, keep * (errors - risk))
    stakes = BETS / ((1 - risk) * largest)  # the largest loss: all accepted and wrong
    return np.log1p(-stakes[:, None] * sums)
