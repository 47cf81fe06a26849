"""A gate: do newly labelled answers support a risk guarantee, or contradict it?

Every test here is a bet, also where each cluster has one answer. A gambler stakes a share of the
capital on each cluster as it is labelled, so that under the hypothesis the capital does not grow on
average. By Ville's inequality, the probability that it *ever* reaches 1 / level is at most the
level. So one may look after every new cluster, and stop or go on as one likes. An exact binomial
test needs fewer answers (29 right ones instead of 43 at risk .1 and confidence .95), but is valid
for one look: with looks each night at a growing file, its errors add up. Sources: Ville (1939),
Étude critique de la notion de collectif; Waudby-Smith and Ramdas (2024), Estimating means of
bounded random variables by betting; Ramdas and others (2023), Game-theoretic statistics and safe
anytime-valid inference.

The capital is that of this look, not the largest of all looks, which would be valid, too. So later
errors take `holds` back, the order of clusters does not matter, and intervals contain the estimate.

Between looks, the guarantee must stay, and clusters must be added whole. They are assumed to come
from one distribution, or at least to fulfil the hypothesis at any time, whatever came before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from lm_polygraph_asmi.analysis.clusters import Interval, binary
from lm_polygraph_asmi.analysis.hypotheses import holm
from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.decisions.risk_control import BETS, RiskThreshold, group_codes, least_wins

LEVEL = 0.05
"""Level of `violated`, of all statements about groups together, and of a fallen coverage."""
SMALL_BETS = BETS**2
"""Shares of the largest stake against a risk that is held: errors far above it are rare, so most
stakes are small."""
PRECISION = 1e-4
"""Of the ends of intervals."""


@dataclass(frozen=True)
class RiskGate:
    """What newly labelled answers say of a guarantee: its risk and confidence.

    Attributes:
        outcome: `holds`: they support the guarantee by themselves, at its confidence; `violated`:
            the error rate of accepted answers is above the risk (level .05); else `inconclusive`.
        answers, clusters: numbers of them.
        left_out: answers that were not counted, since a cluster has more than in the calibration.
        accepted, errors: accepted answers, and wrong ones among them.
        low, high: the error rate of accepted answers is at least `low` (level .05) and at most
            `high` (level 1 - confidence).
        p_holds, p_violated: p-values of "the risk is exceeded" and of "the risk is held".
        coverage: accepted share of these answers, with a 95 % interval that is valid at every look.
        calibrated: accepted share of the calibration answers.
        collapsed: whether the accepted share is smaller than in the calibration (level .05).
        least_holds, least_violated: least numbers of accepted answers that could give either
            outcome: all right, or all wrong, each a cluster of its own.
    """

    outcome: str
    risk: float
    confidence: float
    answers: int
    clusters: int
    left_out: int
    accepted: int
    errors: int
    low: float
    high: float
    p_holds: float
    p_violated: float
    coverage: Interval
    calibrated: float
    collapsed: bool
    least_holds: int
    least_violated: int

    @property
    def error_rate(self) -> float | None:
        """Of the accepted answers; None if there is none."""
        return self.errors / self.accepted if self.accepted else None

    def __str__(self) -> str:
        guaranteed = (
            f"guarantee: at most {100 * self.risk:g}%, confidence {100 * self.confidence:g}%"
        )
        if self.error_rate is None:
            sentence = f"{self.outcome}: none of {self.answers} answers was accepted ({guaranteed})"
        else:
            sentence = (
                f"{self.outcome}: {self.errors} of {self.accepted} accepted answers are wrong, "
                f"{self.error_rate:.1%} [{self.low:.1%}, {self.high:.1%}] ({guaranteed})"
            )
        if self.accepted < min(self.least_holds, self.least_violated):
            sentence += (
                f". At least {self.least_violated} accepted answers, all wrong, or "
                f"{self.least_holds}, all right, are needed"
            )
        elif self.outcome == "inconclusive" and self.accepted < self.least_holds:
            sentence += f". At least {self.least_holds} accepted answers are needed for holds"
        fall = " The accepted share has fallen." if self.collapsed else ""
        return (
            f"{sentence}. Accepted: {self.coverage.value:.0%} [{self.coverage.low:.0%}, "
            f"{self.coverage.high:.0%}] of these answers, {self.calibrated:.0%} of the "
            f"calibration's.{fall}"
        )


@dataclass(frozen=True)
class GroupRisk:
    """The error rate of the accepted answers of one group, compared with a risk.

    Attributes:
        outcome: `below` or `above` the risk, or `inconclusive`. With probability at least .95, all
            statements `below` and `above` of all groups are true together, at every look.
        answers, accepted, errors: numbers of the group.
        p_below, p_above: p-values of "not below" and "not above", adjusted by Holm's method over
            both directions of all groups.
        least_below, least_above: accepted answers that would decide whatever the other groups say:
            so many, all right, or all wrong, each a cluster of its own.
    """

    group: str
    outcome: str
    answers: int
    accepted: int
    errors: int
    p_below: float
    p_above: float
    least_below: int
    least_above: int

    @property
    def too_few(self) -> bool:
        """Whether no labels of so few accepted answers would decide by themselves."""
        return self.accepted < min(self.least_below, self.least_above)

    def __str__(self) -> str:
        sentence = f"{self.outcome}: {self.errors} of {self.accepted} accepted answers are wrong"
        if self.outcome != "inconclusive":
            return sentence
        if self.too_few:
            return (
                f"{sentence}; too few: at least {self.least_above}, all wrong, or "
                f"{self.least_below}, all right, would decide"
            )
        if self.accepted < self.least_below:
            return f"{sentence}; at least {self.least_below}, all right, would be below"
        return sentence


def risk_gate(guarantee: RiskThreshold, accepted: ArrayLike, answers: Labelled) -> RiskGate:
    """Whether newly labelled answers support a guarantee, contradict it, or neither.

    The probability that any look gives `violated` is at most .05 if the risk is held, and that any
    gives `holds` at most 1 - confidence if it is exceeded. A cluster has as many answers as the
    largest of the calibration; its later rows are left out. If that number is not recorded, it is
    that of the new answers, which then must not grow between looks. The coverage is compared with
    the lower end of the calibration's exact 95 % interval, with clusters for answers, by a bet of
    level .025.

    Args:
        guarantee: of `risk_threshold`, with a threshold.
        accepted: (n,), 1 or True = accepted with this threshold.
        answers: the labelled answers, none of which the calibration has seen.

    Raises:
        ValueError: a guarantee without a threshold, another length, or values other than 0 and 1.

    Example:
        >>> guarantee = RiskThreshold(0.3, 0.8, 0.04, 0.1, 0.9, 0.2, 500, 500)
        >>> new = Labelled(wrong=[0] * 50, clusters=[str(n) for n in range(50)])
        >>> gate = risk_gate(guarantee, [1] * 40 + [0] * 10, new)
        >>> gate.outcome, gate.least_holds, gate.collapsed
        ('holds', 35, False)
    """
    new = _Answers(guarantee, accepted, answers)
    errors, n = new.wrong & new.accepted, new.accepted
    level = 1 - guarantee.confidence
    p_holds, p_violated = (side(errors, n, guarantee.risk, new) for side in (_p_below, _p_above))
    outcome = "inconclusive"
    if p_violated <= LEVEL:
        outcome = "violated"
    elif p_holds <= level:
        outcome = "holds"
    every = np.ones(len(n), dtype=bool)
    share = Interval(
        float(n.mean()), _end(_p_above, n, every, new, LEVEL / 2),
        _end(_p_below, n, every, new, LEVEL / 2),
    )  # fmt: skip
    fallen = _p_below(n, every, _least_share(guarantee), new) <= LEVEL / 2
    return RiskGate(
        outcome, guarantee.risk, guarantee.confidence, len(n), new.clusters,
        len(answers) - len(n), int(n.sum()), int(errors.sum()),
        _end(_p_above, errors, n, new, LEVEL), _end(_p_below, errors, n, new, level),
        p_holds, p_violated, share, guarantee.coverage, fallen,
        _least_right(guarantee.risk, level, new.largest),
        _least_wrong(guarantee.risk, LEVEL, new.largest),
    )  # fmt: skip


def risk_by_group(
    guarantee: RiskThreshold, accepted: ArrayLike, groups: Sequence[Any], answers: Labelled
) -> tuple[GroupRisk, ...]:
    """Whether the error rate of accepted answers is below or above the risk, by group.

    A guarantee is of all accepted answers: a group may exceed the risk while it holds. Each group
    is tested in both directions as in `risk_gate`, and Holm's method counts all of these tests,
    also those of groups that are too small. So merge small groups before the first look, and keep
    the groups between looks.

    Args:
        guarantee, accepted, answers: as in `risk_gate`.
        groups: (n,) name of each answer's group, such as a type of question.

    Returns:
        One for each group, by name.

    Example:
        >>> guarantee = RiskThreshold(0.3, 0.8, 0.04, 0.1, 0.9, 0.2, 500, 500)
        >>> new = Labelled(wrong=[0] * 60 + [1] * 5, clusters=[str(n) for n in range(65)])
        >>> for group in risk_by_group(guarantee, [1] * 65, ["who"] * 60 + ["why"] * 5, new):
        ...     print(group.group, group)
        who below: 0 of 60 accepted answers are wrong
        why above: 5 of 5 accepted answers are wrong
    """
    names, member = group_codes(groups, len(answers))
    new = _Answers(guarantee, accepted, answers)
    in_group = np.arange(len(names))[:, None] == member[new.rows]
    n = in_group & new.accepted
    errors = n & new.wrong
    pairs = [
        [side(wrong, of, guarantee.risk, new) for side in (_p_below, _p_above)]
        for wrong, of in zip(errors, n, strict=True)
    ]
    adjusted = holm(np.ravel(pairs)).reshape(-1, 2).tolist()
    first = LEVEL / (2 * len(names))
    least_below = _least_right(guarantee.risk, first, new.largest)
    least_above = _least_wrong(guarantee.risk, first, new.largest)
    return tuple(
        GroupRisk(
            name, _direction(below, above), int(in_group[row].sum()), int(n[row].sum()),
            int(errors[row].sum()), below, above, least_below, least_above,
        )
        for row, (name, (below, above)) in enumerate(zip(names, adjusted, strict=True))
    )  # fmt: skip


def _direction(p_below: float, p_above: float) -> str:
    return "above" if p_above <= LEVEL else "below" if p_below <= LEVEL else "inconclusive"


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
        """p-value of "the sum of `excess` (n,) over a cluster has a mean of at least 0".

        No answer's excess is above `worst`; `bets` (stakes,) are shares of the stake that a cluster
        of such answers would lose.
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


def _least_share(guarantee: RiskThreshold) -> float:
    """Lower end of the exact 95 % interval of the calibration's accepted share, by clusters.

    As if all answers of a cluster were accepted together, which is the widest.
    """
    from scipy.stats import beta

    m, k = guarantee.clusters, guarantee.coverage * guarantee.clusters
    return float(beta.ppf(LEVEL / 2, k, m - k + 1))


def _least_right(risk: float, level: float, largest: int) -> int:
    return least_wins(BETS * risk / ((1 - risk) * largest), level)


def _least_wrong(risk: float, level: float, largest: int) -> int:
    return least_wins(SMALL_BETS * (1 - risk) / (risk * largest), level)
