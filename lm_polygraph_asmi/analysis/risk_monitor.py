"""Do newly labelled answers support a risk guarantee, or contradict it?

Every test is a bet. On each cluster, a share of the capital is staked. If the hypothesis is true,
the capital does not grow on average. Then, by Ville's inequality, the probability that it *ever*
reaches 1 / level is at most the level, so one may look after every new cluster. The capital does
not depend on the order of clusters, but each cluster must be added whole. Source: Waudby-Smith and
Ramdas (2024), Estimating means of bounded random variables by betting.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from lm_polygraph_asmi.analysis.clusters import binary
from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.analysis.risk_control import BETS, RiskThreshold, least_wins

LEVEL = 0.05
"""Level of the test that gives `violated`."""
SMALL_BETS = BETS**2
"""Stakes against "the risk is held", as shares of the largest stake that cannot lose everything.

Most of them are small, since an error rate far above the risk is rare."""
ENDS = 10_000
"""Ends of an interval are multiples of 1 / ENDS."""

Outcome = Literal["holds", "violated", "inconclusive"]


@dataclass(frozen=True)
class RiskMonitor:
    """What newly labelled answers say about a guarantee.

    `outcome` is "violated" if the error rate of accepted answers is shown to be above the risk
    (level .05), "holds" if the new answers alone support the guarantee at its confidence, and
    "inconclusive" otherwise.
    """

    outcome: Outcome
    guarantee: RiskThreshold
    answers: int
    clusters: int
    left_out: int  # answers of a cluster beyond `guarantee.largest`, which are not counted
    accepted: int
    errors: int  # accepted answers that are wrong
    low: float  # lower bound of the error rate of accepted answers (level .05)
    high: float  # upper bound of this error rate (level 1 - confidence)
    p_holds: float  # p-value of "the risk is exceeded"
    p_violated: float  # p-value of "the risk is held"
    unlabelled: int = 0  # accepted answers without a label, which are not counted
    without_decision: int = 0  # answers without a decision, which count as abstained
    failed: int = 0  # rows without an answer, which are not counted
    blank: int = 0  # empty answers, which are never accepted and not counted
    share: float = 1.0  # accepted share of all decided answers, with or without a label
    most: int = 1  # largest number of answers in a cluster, with or without a label

    @property
    def least_holds(self) -> int:
        """Least number of accepted answers that can give "holds": all right, one per cluster."""
        rule = self.guarantee
        gains = BETS * rule.risk / ((1 - rule.risk) * rule.largest)
        return least_wins(gains, 1 - rule.confidence)

    def __str__(self) -> str:
        errors = (
            f"{self.errors} of {self.accepted} accepted answers are wrong, "
            f"{self.errors / self.accepted:.1%} [{self.low:.1%}, {self.high:.1%}]"
            if self.accepted
            else f"none of {self.answers} answers was accepted"
        )
        least = ""
        if self.outcome == "inconclusive" and self.accepted < self.least_holds:
            least = f" At least {self.least_holds} accepted answers are needed for holds."
        if self.most > self.guarantee.largest:
            least += (
                f" A cluster has {self.most} answers, more than the {self.guarantee.largest} of "
                f"the guarantee, which is void for them: {self.left_out} are left out."
            )
        accepts = (
            "All of these answers are accepted ones, so the accepted share is unknown"
            if self.share == 1
            else f"Accepted: {self.share:.0%} of these answers"
        )
        counts = {
            "Without a decision, so counted as abstained: {}.": self.without_decision,
            "Left out {} accepted answers without a label: those with one must be a random part "
            "of all.": self.unlabelled,
            "Left out {} rows that failed.": self.failed,
            "Left out {} empty answers: they are never accepted.": self.blank,
        }
        first = (
            f"{self.outcome}: {errors} (guarantee: {self.guarantee.promise}).{least} {accepts}; "
            f"{self.guarantee.coverage:.0%} of the calibration's."
        )
        return "\n".join([first, *(line.format(n) for line, n in counts.items() if n)])


def risk_monitor(guarantee: RiskThreshold, accepted: ArrayLike, answers: Labelled) -> RiskMonitor:
    """Test whether newly labelled answers support a guarantee, or contradict it.

    One may look after every new cluster. If the risk is held, the probability that any look gives
    `violated` is at most .05. If the risk is exceeded, the probability that any look gives `holds`
    is at most 1 - confidence.

    Args:
        guarantee: must have a threshold.
        accepted: (n,) booleans, one for each of `answers`.
        answers: labels and clusters. Only the first `guarantee.largest` answers of a cluster
            count.

    Example:
        >>> guarantee = RiskThreshold(0.3, 0.8, 0.04, 0.1, 0.9, 0.2, 500, 500)
        >>> new = Labelled(wrong=[0] * 50, clusters=range(50))
        >>> monitor = risk_monitor(guarantee, [1] * 40 + [0] * 10, new)
        >>> monitor.outcome, monitor.least_holds
        ('holds', 35)
    """
    import pandas as pd

    if guarantee.threshold is None:
        raise ValueError(
            "expected a guarantee with a threshold, got none, so that no answer is accepted and "
            "there is nothing to check: calibrate with more labels if they are in order, or else "
            f"begin with other answers and labels. {guarantee.limits}".rstrip()
        )
    answers.columns(accepted=accepted)  # raises ValueError unless there is one for each answer
    earlier = pd.Series(answers.codes).groupby(answers.codes).cumcount().to_numpy()
    rows = np.flatnonzero(earlier < guarantee.largest)
    codes, kept = answers.codes[rows], binary(accepted=accepted)[rows]
    errors, level = answers.wrong[rows] & kept, 1 - guarantee.confidence

    def at_least(share: float) -> float:
        """p-value of "at least this share of accepted answers is wrong"; falls with the share."""
        return _p_value(codes, errors - share * kept, (1 - share) * guarantee.largest, BETS)

    def at_most(share: float) -> float:
        """p-value of "at most this share of accepted answers is wrong"; rises with the share."""
        return _p_value(codes, share * kept - errors, share * guarantee.largest, SMALL_BETS)

    p_holds, p_violated = at_least(guarantee.risk), at_most(guarantee.risk)
    supported: Outcome = "holds" if p_holds <= level else "inconclusive"
    # The interval ends at the outermost shares that the tests do not reject.
    ends = range(1, ENDS)
    return RiskMonitor(
        outcome="violated" if p_violated <= LEVEL else supported,
        guarantee=guarantee,
        answers=len(rows),
        clusters=answers.n_clusters,
        left_out=len(answers) - len(rows),
        accepted=int(kept.sum()),
        errors=int(errors.sum()),
        low=bisect_left(ends, True, key=lambda end: at_most(end / ENDS) > LEVEL) / ENDS,
        high=(1 + bisect_left(ends, True, key=lambda end: at_least(end / ENDS) <= level)) / ENDS,
        p_holds=p_holds,
        p_violated=p_violated,
    )


def _p_value(
    codes: Int[np.ndarray, " n"],
    excess: Float[np.ndarray, " n"],
    worst: float,
    bets: Float[np.ndarray, " stakes"],
) -> float:
    """p-value of "the sum of `excess` over a cluster has a mean of at least 0".

    `worst` is the largest possible sum. `bets` are stakes, as shares of the stake that would lose
    everything in a cluster with this sum.
    """
    sums, times = np.unique(np.bincount(codes, excess), return_counts=True)
    gains = np.log1p(-bets[:, None] / worst * sums) @ times
    return float(np.exp(-max(0.0, np.logaddexp.reduce(gains) - np.log(len(bets)))))
