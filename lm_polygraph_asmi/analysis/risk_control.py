"""A threshold on a score that keeps a promise: so few errors among the answers below it.

Learn then Test (Angelopoulos et al., 2021, arXiv 2110.01052). Thresholds are tested one after the
other, from strict to lenient, each against "more errors than promised among what it accepts"; the
last one before the first that cannot be refuted is taken. Questions over one passage are not
independent, so what is tested is sums by cluster.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from lm_polygraph_asmi.analysis.clusters import SEED, binary, check_rows, cluster_codes, finite
from lm_polygraph_asmi.validation import check_number

STRICTEST = 0.05
"""Coverage of the strictest threshold that may be tested."""
STEPS = 39
GRID_SHARE = 0.2
"""Share of the clusters that fix the thresholds and the first of them; the rest test them."""
BETS = np.linspace(0, 1, 51)[1:-1]
"""Stakes, as shares of the largest that cannot ruin, over which the bets are averaged."""


@dataclass(frozen=True)
class RiskThreshold:
    """Below which score answers may be shown, and what that promises.

    Attributes:
        threshold: accept where score <= this; None: not attainable with these answers.
        coverage: share of the answers accepted, 0 where there is no threshold.
        error_rate: errors among the accepted answers here, None where there is no threshold.
        risk, confidence: the promise: drawn again and again, with at least this confidence no more
            than this share of the answers it accepts is wrong.
        base_rate: errors among all answers.
        answers, clusters: how many there were.
        answers_needed: where there is no threshold, about how many answers like these would give
            one; None where no number would, and where there is one.
    """

    threshold: float | None
    coverage: float
    error_rate: float | None
    risk: float
    confidence: float
    base_rate: float
    answers: int
    clusters: int
    answers_needed: int | None = None

    @property
    def unavoidable(self) -> float:
        """Share of answers that even a perfect score must hold back for this risk."""
        return max(0.0, (self.base_rate - self.risk) / (1 - self.risk))

    def __str__(self) -> str:
        promise = f"at most {self.risk:.0%} errors, confidence {self.confidence:.0%}"
        if self.threshold is not None and self.error_rate is not None:
            said = (
                f"accept up to {self.threshold:.4g}: {self.coverage:.0%} of the answers, "
                f"{self.error_rate:.1%} of them wrong ({promise})"
            )
        else:
            more = (
                "and by these, more like them would not change that"
                if self.answers_needed is None
                else f"about {self.answers_needed} like these might give one"
            )
            said = f"not attainable with these {self.answers} answers ({promise}); {more}"
        if self.unavoidable:
            said += (
                f". {self.base_rate:.0%} of all answers are wrong, so that any score must hold "
                f"back {self.unavoidable:.0%}"
            )
        return said


def risk_threshold(
    scores: ArrayLike,
    wrong: ArrayLike,
    clusters: Sequence[str],
    risk: float,
    confidence: float,
    seed: int = SEED,
) -> RiskThreshold:
    """The most lenient threshold for which an excess of errors can be refuted.

    With probability at least `confidence` over the labelled answers, at most a share `risk` of
    those accepted later is wrong, as long as they come as these did: clusters are draws of one
    kind, and none has more answers than the largest here. A fifth of the clusters fixes the
    thresholds, from the one that looks easiest to defend to one that accepts all; the rest tests
    them, in this order.

    Args:
        scores: (n,), higher = more uncertain.
        wrong: (n,), True or False.
        clusters: key of each row; rows that share a passage or prompt are not independent.
        risk: promised share of errors among accepted answers, in (0, 1).
        confidence: in (0, 1).
        seed: of the draw of clusters that fix the thresholds, and of the order of the others.

    Raises:
        ValueError: lengths differ, values are not finite, labels other than right and wrong, fewer
            than two clusters, or a promise that is none.

    Example:
        >>> scores, wrong = [0.1] * 150 + [0.9] * 50, [0] * 150 + [1] * 50
        >>> own = [str(n) for n in range(200)]
        >>> found = risk_threshold(scores, wrong, own, risk=0.1, confidence=0.9)
        >>> found.threshold, found.coverage, found.error_rate
        (0.1, 0.75, 0.0)
    """
    for name, value in (("risk", risk), ("confidence", confidence)):
        check_number(name, value)
        if not 0 < value < 1:
            raise ValueError(f"{name} must lie strictly between 0 and 1, got {value}")
    check_rows(clusters, scores=scores, wrong=wrong)
    score, errors, codes = finite(scores=scores), binary(wrong=wrong), cluster_codes(clusters)
    sizes = np.bincount(codes)
    total, largest = len(sizes), int(sizes.max())
    if total < 2:
        raise ValueError(
            "one cluster alone fixes thresholds or tests them: give answers over several passages"
        )
    fixing = fixing_rows(clusters, seed)
    grid = _grid(score[fixing], errors[fixing], codes[fixing], risk, largest)
    tested, labels = score[~fixing], errors[~fixing]
    owners = np.unique(codes[~fixing], return_inverse=True)[1]
    level = 1 - confidence
    found = None
    for threshold in grid:
        if _p_value(tested <= threshold, labels, owners, risk, largest, seed) > level:
            break
        found = float(threshold)
    base = float(errors.mean())
    if found is None:
        share = (~fixing).mean()
        more = _needed(score, errors, codes, risk, level, largest)
        needed = None if more is None else int(np.ceil(more * len(score) / share))
        return RiskThreshold(None, 0.0, None, risk, confidence, base, len(score), total, needed)
    # Accepting all was tested; of answers beyond all scores seen nothing is known.
    found = min(found, float(score.max()))
    kept = errors[score <= found]
    coverage, rate = len(kept) / len(score), float(kept.mean())
    return RiskThreshold(found, coverage, rate, risk, confidence, base, len(score), total)


def fixing_rows(clusters: Sequence[str], seed: int = SEED) -> np.ndarray:
    """(n,) rows of the clusters that fix thresholds; what else is chosen by them costs nothing."""
    codes = cluster_codes(clusters)
    order = np.random.default_rng(seed).permutation(codes.max() + 1)
    return np.isin(codes, order[: max(1, round(GRID_SHARE * len(order)))])


def _thresholds(score: np.ndarray) -> np.ndarray:
    """Ascending; the last accepts whatever comes."""
    grid = np.quantile(score, np.linspace(STRICTEST, 1, STEPS), method="higher")
    return np.unique(np.r_[grid[:-1], np.inf])


def _grid(
    score: np.ndarray, wrong: np.ndarray, clusters: np.ndarray, risk: float, largest: int
) -> np.ndarray:
    """Thresholds to be tested, strict to lenient, from the one that looks easiest to defend.

    A first step of few answers refutes nothing, and one of too many may have too many errors;
    either would end the sequence at once.
    """
    grid = _thresholds(score)
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

    Exact binomial where every cluster has one answer. Else a bet against it: with sums Z of
    (wrong - risk) over a cluster's accepted answers, whose mean is then not negative, a gambler who
    stakes a share on -Z in one cluster after the other does not gain on average, and by Ville's
    inequality one over the most that was ever held is a p-value. Stakes are averaged over, and
    clusters come in an order drawn beforehand, so that nothing is tuned to the answers. Source:
    Waudby-Smith and Ramdas (2024), Estimating means of bounded random variables by betting.

    Args:
        accepted, wrong: (n,).
        clusters: (n,) key of each answer.
        risk: in (0, 1).
        largest: answers a cluster may have, since all of them may be wrong; None: the most seen.
        seed: of the order.

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
    """The same of columns that were looked at, with clusters as numbers from 0."""
    if largest == 1:
        from scipy.stats import binom

        return float(binom.cdf((keep & errors).sum(), keep.sum(), risk)) if keep.any() else 1.0
    gains = _gains(keep, errors, codes, risk, largest)
    gains = gains[:, np.random.default_rng(seed).permutation(gains.shape[1])]
    held = np.logaddexp.reduce(gains.cumsum(1), axis=0) - np.log(len(BETS))
    return float(np.exp(-max(0.0, held.max())))


def _gains(
    keep: np.ndarray, errors: np.ndarray, clusters: np.ndarray, risk: float, largest: int
) -> np.ndarray:
    """(stakes, clusters) logarithm of the factor by which a stake grows in a cluster."""
    codes = np.unique(clusters, return_inverse=True)[1]
    sums = np.bincount(codes, keep * (errors - risk))
    stakes = BETS / ((1 - risk) * largest)  # all accepted and wrong: the most that is lost
    return np.log1p(-stakes[:, None] * sums)


def _needed(
    score: np.ndarray,
    wrong: np.ndarray,
    clusters: np.ndarray,
    risk: float,
    level: float,
    largest: int,
) -> float | None:
    """How many times these answers would refute the excess; None where no number of them does."""
    tried = [_gains(score <= t, wrong, clusters, risk, largest).sum(1) for t in _thresholds(score)]
    gains = max(tried, key=np.max)
    if gains.max() <= 0:
        return None

    def enough(times: float) -> bool:
        held = np.logaddexp.reduce(times * gains) - np.log(len(gains))
        return bool(held >= -np.log(level))

    low, high = 1.0, 1.0
    while not enough(high):
        low, high = high, 2 * high
    while high - low > 0.01 * low:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
