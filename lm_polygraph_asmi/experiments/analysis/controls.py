"""Is the signal special to heads? Perturbation controls, compared by a rule fixed beforehand.

The paper names the test ("if matched perturbations of non-attention components at the same layer
reproduce it") but does not run it. The rule of `verdicts` was fixed before the labels were seen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from lm_polygraph_asmi.analysis.clusters import (
    RESAMPLES,
    SEED,
    Interval,
    percentile_interval,
    two_sided,
)
from lm_polygraph_asmi.analysis.comparison import drawn_prr
from lm_polygraph_asmi.analysis.hypotheses import LEVEL, MARGIN, equivalence, holm
from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.analysis.power import equivalence_size, sample_size
from lm_polygraph_asmi.experiments.analysis.coupling import correlations, interval

MUST_BEAT = ("pseudo_heads", "foreign")
"""Conditions that heads must beat to be special: other parts of the same site, and other content at
the same heads."""


@dataclass(frozen=True)
class ConditionComparison:
    """Heads against one condition on one setting.

    Attributes:
        heads, condition: PRR of each.
        difference: heads minus condition, paired, 95 % over clusters.
        p_above, p_below: of heads being no better, no worse; two-sided, 1 if the difference has
            the other sign.
        p_equivalent: of a difference of at least the margin, by two one-sided tests.
        standard_error: of the difference.
        to_differ: questions needed to show the difference measured here, if it is the true one;
            None if it is 0.
        to_equal: questions needed to show equivalence, if the true difference is 0.
    """

    heads: Interval
    condition: Interval
    difference: Interval
    p_above: float
    p_below: float
    p_equivalent: float
    standard_error: float
    to_differ: int | None
    to_equal: int


def condition_comparisons(
    heads: ArrayLike,
    conditions: Mapping[str, ArrayLike],
    answers: Labelled,
    margin: float = MARGIN,
) -> dict[str, ConditionComparison]:
    """PRR of heads against every condition on the same answers, with shared resamples.

    Args:
        heads: (n,) score under masked heads.
        conditions: name -> (n,) the same score under another perturbation.
        margin: smaller differences of PRR count as equivalent.

    Raises:
        ValueError: also fewer than two clusters, or all answers equally good.

    Example:
        >>> heads, answers = [0.1, 0.9] * 10, Labelled([0, 1] * 10, range(20), resamples=200)
        >>> conditions = {"foreign": [0.9, 0.1] * 10, "the same": heads}
        >>> comparisons = condition_comparisons(heads, conditions, answers)
        >>> comparisons["foreign"].p_above < 0.05, comparisons["the same"].p_equivalent < 0.05
        (True, True)
    """
    scores = {"heads": heads} | {f"condition {name}": score for name, score in conditions.items()}
    value, drawn = drawn_prr(scores, answers)
    if np.isnan(list(value.values())).any() or np.isnan(drawn["heads"]).all():
        raise ValueError("PRR is undefined: all answers equally good, or fewer than two clusters")
    sizes = answers.n_clusters, len(answers)
    intervals = {name: percentile_interval(value[name], drawn[name], sizes[0]) for name in scores}
    comparisons = {}
    for name in conditions:
        difference = value["heads"] - value[f"condition {name}"]
        differences = drawn["heads"] - drawn[f"condition {name}"]
        error = float(np.nanstd(differences, ddof=1))
        comparisons[name] = ConditionComparison(
            intervals["heads"],
            intervals[f"condition {name}"],
            percentile_interval(difference, differences, sizes[0]),
            two_sided(differences, sizes[0]) if difference > 0 else 1.0,
            two_sided(differences, sizes[0]) if difference < 0 else 1.0,
            equivalence(differences, margin, sizes[0]),
            error,
            sample_size(abs(difference), error, *sizes).questions if difference and error else None,
            equivalence_size(margin, error, *sizes) if error else sizes[1],
        )
    return comparisons


@dataclass(frozen=True)
class Verdict:
    """Outcome of the rule on one setting.

    Attributes:
        outcome: "special", "reproduced" or "inconclusive", see `verdicts`.
        condition: the condition that reproduces the signal, or None.
        p_special, p_reproduced: adjusted over settings; NaN if a condition that the rule needs was
            not run.
        questions: needed to decide with a power of 0.8, if the differences measured here are true;
            None if decided, or if the conditions that were run cannot decide.
    """

    outcome: str
    condition: str | None
    p_special: float
    p_reproduced: float
    questions: int | None


def verdicts(groups: Sequence[Mapping[str, ConditionComparison]]) -> list[Verdict]:
    """Is the signal special to heads? The verdict on every setting, by a rule fixed beforehand.

    "reproduced": some condition is equivalent to heads within the margin (two one-sided tests), or
    better; one is enough against the hypothesis. Otherwise "special": heads are better than both
    `MUST_BEAT`, the conditions "pseudo_heads" and "foreign". Otherwise "inconclusive", as with an
    interval that includes 0. p-values are adjusted over settings (Holm), not over conditions, and
    tested at 5 %. Each group is a mapping of `condition_comparisons`, at matched effect.

    Example:
        >>> heads, answers = [0.1, 0.9] * 10, Labelled([0, 1] * 10, range(20), resamples=200)
        >>> beaten = dict.fromkeys(MUST_BEAT, [0.9, 0.1] * 10)
        >>> conditions = beaten, {**beaten, "noise": heads}  # in the second, noise does the same
        >>> groups = [condition_comparisons(heads, scores, answers) for scores in conditions]
        >>> [verdict.outcome for verdict in verdicts(groups)]
        ['special', 'reproduced']
    """
    by_condition = [{n: _reproduced(c) for n, c in comparisons.items()} for comparisons in groups]
    nearest = [min(p_of, key=p_of.__getitem__, default=None) for p_of in by_condition]
    special = holm([_special(comparisons) for comparisons in groups])
    reproduced = holm([min(p_of.values(), default=np.nan) for p_of in by_condition])
    outcomes = []
    for comparisons, condition, p, q in zip(
        groups, nearest, special.tolist(), reproduced.tolist(), strict=True
    ):
        if q < LEVEL:
            outcomes.append(Verdict("reproduced", condition, p, q, None))
        elif p < LEVEL:
            outcomes.append(Verdict("special", None, p, q, None))
        else:
            needed = questions_to_decide(comparisons)
            outcomes.append(Verdict("inconclusive", None, p, q, needed))
    return outcomes


def _special(comparisons: Mapping[str, ConditionComparison]) -> float:
    """p-value of heads being no better than some condition that they must beat."""
    if not set(MUST_BEAT) <= set(comparisons):
        return float("nan")
    return max(comparisons[condition].p_above for condition in MUST_BEAT)


def _reproduced(comparison: ConditionComparison) -> float:
    """p-value of a condition being worse than heads by the margin or more, and no better."""
    return float(np.nanmin([comparison.p_equivalent, comparison.p_below]))


def questions_to_decide(comparisons: Mapping[str, ConditionComparison]) -> int | None:
    """Questions needed to decide a setting with a power of 0.8, if its differences are true.

    The fewest of: to beat all of `MUST_BEAT`; to show one condition better; to show one within the
    margin equivalent. None without a condition.
    """
    sizes = []
    to_beat = [comparisons[name] for name in MUST_BEAT if name in comparisons]
    if len(to_beat) == len(MUST_BEAT) and all(c.difference.value > 0 for c in to_beat):
        sizes.append(max(comparison.to_differ or 0 for comparison in to_beat))
    for comparison in comparisons.values():
        gap = comparison.difference.value
        if gap < 0 and comparison.to_differ:
            sizes.append(comparison.to_differ)
        if abs(gap) < MARGIN:
            sizes.append(comparison.to_equal)
    return min(sizes, default=None)


def double_dissociation(
    opened: tuple[ArrayLike, ArrayLike, ArrayLike],
    closed: tuple[ArrayLike, ArrayLike, ArrayLike],
    clusters: Sequence[str],
    resamples: int = 10_000,
    seed: int = SEED,
) -> Interval:
    """Advantage of heads over a condition with the context, minus that without, same questions.

    PRR(heads) - PRR(condition) with the passage minus the same closed-book; passages are resampled
    once for both. Above 0: the advantage of heads depends on the context.

    NaN if all answers are equally good with or without the context, bounds also with fewer than two
    clusters.

    Args:
        opened, closed: scores (n,) of heads and of the condition, and quality (n,); the same
            questions in the same order.
        clusters: (n,) key of each question's passage.

    Example:
        >>> quality, keys = [1.0, 0.0] * 10, [str(n) for n in range(20)]
        >>> good, bad = [0.1, 0.9] * 10, [0.9, 0.1] * 10
        >>> opened, closed = (good, bad, quality), (bad, bad, quality)  # ahead with context
        >>> double_dissociation(opened, closed, keys, resamples=200).low > 0
        True
    """
    value, drawn = [], []
    for heads, condition, quality in (opened, closed):
        scores = {"heads": heads, "condition": condition}
        # The same clusters and seed give the same resamples.
        answers = Labelled(quality=quality, clusters=clusters, resamples=resamples, seed=seed)
        prr, resampled = drawn_prr(scores, answers)
        value.append(prr["heads"] - prr["condition"])
        drawn.append(resampled["heads"] - resampled["condition"])
    return percentile_interval(value[0] - value[1], drawn[0] - drawn[1], len(set(clusters)))


def corrected_correlation(
    scores: tuple[ArrayLike, ArrayLike],
    again: tuple[ArrayLike, ArrayLike],
    clusters: Sequence[str],
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> tuple[Interval, Interval]:
    """Rank correlation of two scores, plain and corrected for the seed of the masks.

    The correction divides by the root of the product of both scores' correlations with themselves
    under other seeds, so that 1 means identical except for the seed; NaN if a score does not
    correlate with itself. Source: Spearman (1904), correction for attenuation.

    Args:
        scores, again: two arrays (n,) each: both scores, and both under other masks.
        clusters: (n,) key of each row; answers on one passage share a key.

    Example:
        >>> drawn = np.random.default_rng(0).normal(np.arange(100), 20, size=(4, 100))
        >>> a, b, *again = drawn  # four draws of the same
        >>> keys = [str(n) for n in range(100)]
        >>> rho, corrected = corrected_correlation((a, b), tuple(again), keys, resamples=100)
        >>> rho.excludes(1), corrected.excludes(1)
        (True, False)
    """
    rho = correlations([*scores, *again], clusters, resamples, seed)
    reliability = rho[:, 0, 2] * rho[:, 1, 3]
    known = (rho[:, 0, 2] > 0) & (rho[:, 1, 3] > 0)
    root = np.sqrt(np.where(known, reliability, np.nan))
    total = len(set(clusters))
    return interval(rho[:, 0, 1], total), interval(rho[:, 0, 1] / root, total)
