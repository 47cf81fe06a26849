"""Do newly labelled answers support a risk guarantee, or contradict it?

Every test is a bet: a share of the capital is staked on each cluster, so that under the hypothesis
the capital does not grow on average. By Ville's inequality, the probability that it *ever* reaches
1 / level is at most the level: one may look after every new cluster. The capital is that of this
look, so the order of clusters does not matter; they must be added whole. Source: Waudby-Smith and
Ramdas (2024), Estimating means of bounded random variables by betting.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from lm_polygraph_asmi.analysis.clusters import binary
from lm_polygraph_asmi.analysis.hypotheses import holm
from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.decisions.risk_control import BETS, RiskThreshold, least_wins

LEVEL = 0.05
"""Level of `violated`, and of all statements about groups together."""
SMALL_BETS = BETS**2
"""Shares of the largest stake against a risk that is held: errors far above it are rare, so most
stakes are small."""
PRECISION = 1e-4
"""Of the ends of intervals."""


@dataclass(frozen=True)
class RiskGate:
    """What newly labelled answers say of a guarantee.

    `holds`: they support it by themselves, at its confidence; `violated`: the error rate of
    accepted answers is above the risk (level .05); else `inconclusive`.
    """

    outcome: str
    guarantee: RiskThreshold
    answers: int
    clusters: int
    left_out: int  # answers not counted, since a cluster has more than in the calibration
    accepted: int
    errors: int  # accepted answers that are wrong
    low: float  # the error rate of accepted answers is at least this (level .05)
    high: float  # and at most this (level 1 - confidence)
    p_holds: float  # p-value of "the risk is exceeded"
    p_violated: float  # of "the risk is held"

    @property
    def least_holds(self) -> int:
        """How many accepted answers, all right, each a cluster of its own, would give `holds`."""
        rule, largest = self.guarantee, self.guarantee.largest or 1
        gains = BETS * rule.risk / ((1 - rule.risk) * largest)
        return least_wins(gains, 1 - rule.confidence)

    def __str__(self) -> str:
        found = f"none of {self.answers} answers was accepted"
        if self.accepted:
            found = (
                f"{self.errors} of {self.accepted} accepted answers are wrong, "
                f"{self.errors / self.accepted:.1%} [{self.low:.1%}, {self.high:.1%}]"
            )
        least = ""
        if self.outcome == "inconclusive" and self.accepted < self.least_holds:
            least = f" At least {self.least_holds} accepted answers are needed for holds."
        return (
            f"{self.outcome}: {found} (guarantee: {self.guarantee.bound}).{least} Accepted: "
            f"{self.accepted / self.answers:.0%} of these answers, {self.guarantee.coverage:.0%} "
            "of the calibration's."
        )


@dataclass(frozen=True)
class GroupRisk:
    """The error rate of the accepted answers of one group: `below` or `above` the risk, or neither.

    With probability at least .95, all such statements of all groups are true together, at every
    look; the p-values, of "not below" and "not above", are adjusted by Holm's method.
    """

    group: str
    outcome: str
    answers: int
    accepted: int
    errors: int
    p_below: float
    p_above: float

    def __str__(self) -> str:
        return f"{self.outcome}: {self.errors} of {self.accepted} accepted answers are wrong"


def risk_gate(guarantee: RiskThreshold, accepted: ArrayLike, answers: Labelled) -> RiskGate:
    """Whether newly labelled answers, (n,) `accepted` or not, support a guarantee or contradict it.

    The probability that any look gives `violated` is at most .05 if the risk is held, and that any
    gives `holds` at most 1 - confidence if it is exceeded. A cluster has as many answers as the
    largest of the calibration; its later rows are left out.

    Example:
        >>> guarantee = RiskThreshold(0.3, 0.8, 0.04, 0.1, 0.9, 0.2, 500, 500)
        >>> new = Labelled(wrong=[0] * 50, clusters=range(50))
        >>> gate = risk_gate(guarantee, [1] * 40 + [0] * 10, new)
        >>> gate.outcome, gate.least_holds
        ('holds', 35)
    """
    new = _Answers(guarantee, accepted, answers)
    errors, n, level = new.wrong & new.accepted, new.accepted, 1 - guarantee.confidence
    p_holds, p_violated = (side(errors, n, guarantee.risk, new) for side in (_p_below, _p_above))
    outcome = "violated" if p_violated <= LEVEL else "inconclusive"
    if outcome != "violated" and p_holds <= level:
        outcome = "holds"
    return RiskGate(
        outcome, guarantee, len(n), new.clusters, len(answers) - len(n), int(n.sum()),
        int(errors.sum()), _end(_p_above, errors, n, new, LEVEL),
        _end(_p_below, errors, n, new, level), p_holds, p_violated,
    )  # fmt: skip


def risk_by_group(
    guarantee: RiskThreshold, accepted: ArrayLike, groups: Sequence[Any], answers: Labelled
) -> tuple[GroupRisk, ...]:
    """Whether the error rate of accepted answers is below or above the risk, by (n,) groups.

    A group may exceed the risk while the guarantee, of all, holds. Merge small groups before the
    first look, since Holm's method counts all tests, and keep the groups between looks.

    Example:
        >>> guarantee = RiskThreshold(0.3, 0.8, 0.04, 0.1, 0.9, 0.2, 500, 500)
        >>> new = Labelled(wrong=[0] * 60 + [1] * 5, clusters=range(65))
        >>> for group in risk_by_group(guarantee, [1] * 65, ["who"] * 60 + ["why"] * 5, new):
        ...     print(group.group, group)
        who below: 0 of 60 accepted answers are wrong
        why above: 5 of 5 accepted answers are wrong
    """
    if len(groups) != len(answers):
        raise ValueError(f"groups has {len(groups)} values for {len(answers)} answers: one each")
    names, member = np.unique(np.asarray(list(map(str, groups))), return_inverse=True)
    new = _Answers(guarantee, accepted, answers)
    in_group = np.arange(len(names))[:, None] == member[new.rows]
    n = in_group & new.accepted
    errors = n & new.wrong
    pairs = [
        [side(wrong, of, guarantee.risk, new) for side in (_p_below, _p_above)]
        for wrong, of in zip(errors, n, strict=True)
    ]
    adjusted = holm(np.ravel(pairs)).reshape(-1, 2).tolist()
    return tuple(
        GroupRisk(
            str(name),
            "above" if above <= LEVEL else "below" if below <= LEVEL else "inconclusive",
            int(in_group[row].sum()), int(n[row].sum()), int(errors[row].sum()), below, above,
        )
        for row, (name, (below, above)) in enumerate(zip(names, adjusted, strict=True))
    )  # fmt: skip


class _Answers:
    """New answers, of each cluster the first `largest` in the order of rows."""

    def __init__(self, guarantee: RiskThreshold, accepted: ArrayLike, answers: Labelled) -> None:
        if guarantee.threshold is None:
            raise ValueError(f"expected a guarantee with a threshold, got one without: {guarantee}")
        answers.columns(accepted=accepted)
        order = np.argsort(answers.codes, kind="stable")
        _, starts, counts = np.unique(answers.codes[order], return_index=True, return_counts=True)
        earlier = np.empty(len(order), dtype=int)  # rows before it in its cluster
        earlier[order] = np.arange(len(order)) - np.repeat(starts, counts)
        single = 1 if guarantee.single else None
        self.largest = guarantee.largest or single or int(counts.max())
        self.rows = np.flatnonzero(earlier < self.largest)
        self.codes, self.clusters = answers.codes[self.rows], len(counts)
        self.accepted = binary(accepted=accepted)[self.rows]
        self.wrong = answers.wrong[self.rows]

    def p_value(self, excess: np.ndarray, worst: float, bets: np.ndarray) -> float:
        """p-value of "the sum of `excess` (n,), at most `worst`, over a cluster has a mean >= 0".

        `bets` (stakes,) are shares of the stake that a cluster of the worst answers would lose.
        """
        sums, times = np.unique(np.bincount(self.codes, excess, self.clusters), return_counts=True)
        gains = np.log1p(-bets[:, None] / (worst * self.largest) * sums) @ times
        return float(np.exp(-max(0.0, np.logaddexp.reduce(gains) - np.log(len(bets)))))


def _p_below(hits: np.ndarray, of: np.ndarray, share: float, new: _Answers) -> float:
    """p-value of "hits are at least this share of the rows `of`"; never rises with the share."""
    return new.p_value(hits - share * of, 1 - share, BETS)


def _p_above(hits: np.ndarray, of: np.ndarray, share: float, new: _Answers) -> float:
    """p-value of "hits are at most this share of the rows `of`"; never falls with the share."""
    return new.p_value(share * of - hits, share, SMALL_BETS)


def _end(
    side: Callable[..., float], hits: np.ndarray, of: np.ndarray, new: _Answers, level: float
) -> float:
    """End of the interval of a share: the outermost share that the test does not reject."""
    upper = side is _p_below
    low, high = 0.0, 1.0
    while high - low > PRECISION:
        middle = (low + high) / 2
        rejected = side(hits, of, middle, new) <= level
        low, high = (low, middle) if rejected == upper else (middle, high)
    return high if upper else low
