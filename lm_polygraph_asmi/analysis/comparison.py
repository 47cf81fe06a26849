"""Paired comparisons of methods on the same answers."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Num
from numpy.typing import ArrayLike

from lm_polygraph_asmi.analysis.clusters import (
    Interval,
    binary,
    bootstrap_interval,
    check_rows,
    ordered,
    percentile_interval,
)
from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.analysis.prr import normalised_prr, prr_draws


def prr_intervals(
    scores: Mapping[str, ArrayLike],
    answers: Labelled,
    differences: Iterable[tuple[str, str]] = (),
) -> tuple[dict[str, Interval], dict[tuple[str, str], Interval]]:
    """PRR of every method, and PRR differences (first minus second), with 95 % intervals.

    Returns the PRR by method, and the difference by pair of methods. A positive difference means
    that the first is better. All methods share the resamples, so that common variation cancels in a
    difference. Values are NaN if all answers are equally good. Ends of intervals are also NaN with
    fewer than two clusters. Source: appendix "Head-to-Head Significance" of the paper (B = 10,000).

    Example:
        >>> scores = {"knows": [0.1, 0.9] * 10, "constant": [0.5] * 20}
        >>> answers = Labelled([0, 1] * 10, range(20), resamples=100)
        >>> intervals, paired = prr_intervals(scores, answers, [("knows", "constant")])
        >>> str(intervals["knows"]), paired["knows", "constant"].excludes(0)
        ('+1.00 [+1.00, +1.00]', True)
    """
    columns = answers.columns(**scores)
    prr = [normalised_prr(column, answers.quality) for column in columns]
    drawn = np.full((1, len(columns)), np.nan)
    if answers.n_clusters > 1 and not np.isnan(prr).any():
        drawn = prr_draws(columns, answers)
    # For each method, PRR on all rows, followed by PRR on the resamples, so differences are paired.
    prr_of = {
        name: np.r_[all_rows, resampled]
        for name, all_rows, resampled in zip(scores, prr, drawn.T, strict=True)
    }

    def interval(values: np.ndarray) -> Interval:
        return percentile_interval(values[0], values[1:], answers.n_clusters)

    intervals = {name: interval(values) for name, values in prr_of.items()}
    return intervals, {(a, b): interval(prr_of[a] - prr_of[b]) for a, b in differences}


def auroc(score: ArrayLike, wrong: ArrayLike) -> float:
    """Probability that a wrong answer scores higher than a right one. Ties count half.

    1 = all errors score highest, 0.5 = chance. NaN if there are no wrong or no right answers. A
    score may be infinite, but not NaN.

    Example:
        >>> auroc([0.1, 0.2, 0.9], wrong=[0, 0, 1])
        1.0
    """
    scores, errors = ordered(score=score), binary(wrong=wrong)
    if scores.shape != errors.shape or not len(errors):
        raise ValueError(
            f"expected one score for each answer, and at least one answer, got {scores.shape} for "
            f"{errors.shape}"
        )
    if errors.all() or not errors.any():
        return float("nan")
    right, of_errors = np.sort(scores[~errors]), scores[errors]
    below = right.searchsorted(of_errors, "left") + right.searchsorted(of_errors, "right")
    return float(below.mean() / (2 * len(right)))


class BootstrapAUROC:
    """Computes `auroc` of one score on many resamples of the same rows."""

    def __init__(self, score: Num[np.ndarray, " n"], wrong: Bool[np.ndarray, " n"]) -> None:
        right = np.flatnonzero(~wrong)
        self.right, self.errors = right[score[right].argsort()], np.flatnonzero(wrong)
        ranked, of_errors = score[self.right], score[self.errors]
        self.below = ranked.searchsorted(of_errors, "left")
        self.up_to = ranked.searchsorted(of_errors, "right")

    def __call__(self, counts: Int[np.ndarray, "b n"]) -> Float[np.ndarray, " b"]:
        """(b,) AUROC of samples with counts (b, n); NaN without wrong or without right answers."""
        right = np.zeros((len(counts), len(self.right) + 1), dtype=int)
        counts.take(self.right, axis=1).cumsum(1, out=right[:, 1:])
        errors = counts.take(self.errors, axis=1)
        # Twice the number of right answers below each error, counting those with equal scores once.
        below = right.take(self.below, axis=1) + right.take(self.up_to, axis=1)
        pairs = 2 * errors.sum(1) * right[:, -1]
        in_order = np.einsum("bg,bg->b", errors, below)
        return np.divide(in_order, pairs, out=np.full(len(pairs), np.nan), where=pairs > 0)


def auroc_interval(score: ArrayLike, answers: Labelled) -> Interval:
    """Error-detection AUROC with its interval over clusters. 1 = perfect, 0.5 = chance.

    NaN if there are no wrong or no right answers. The ends are also NaN with fewer than two
    clusters.

    Example:
        >>> score, wrong = [0.1, 0.3, 0.2, 0.9] * 10, [0, 0, 1, 1] * 10
        >>> interval = auroc_interval(score, Labelled(wrong, range(40)))
        >>> interval.value, interval.excludes(0.5)  # three of four pairs are in order
        (0.75, True)
    """
    (column,) = answers.columns(score=score)
    detection = BootstrapAUROC(column, answers.wrong)
    return bootstrap_interval(auroc(column, answers.wrong), detection, answers)


def auroc_difference(first: ArrayLike, second: ArrayLike, answers: Labelled) -> Interval:
    """AUROC of the first score minus that of the second, on the same resamples.

    Positive = the first is better. NaN as in `auroc_interval`.

    Example:
        >>> answers = Labelled([0, 1] * 10, range(20))
        >>> str(auroc_difference([0.1, 0.9] * 10, [0.5] * 20, answers))  # 1 minus chance
        '+0.50 [+0.50, +0.50]'
    """
    a, b = answers.columns(first=first, second=second)
    area_a, area_b = (BootstrapAUROC(column, answers.wrong) for column in (a, b))
    value = auroc(a, answers.wrong) - auroc(b, answers.wrong)
    return bootstrap_interval(value, lambda c: area_a(c) - area_b(c), answers)


class McNemar(NamedTuple):
    """Errors that only one of two scores flags, if both flag equally many answers.

    Attributes:
        only_first, only_second: wrong answers that only this score flags.
        both: wrong answers that both flag.
        flagged: number of answers that each score flags.
        p_value: exact, two-sided p-value of "only_first = only_second". If ties made these
            fractions, they are rounded.
    """

    only_first: float
    only_second: float
    both: float
    flagged: int
    p_value: float


def mcnemar(first: ArrayLike, second: ArrayLike, wrong: ArrayLike, flagged: int) -> McNemar:
    """Whether one score flags errors that the other misses, at a matched flag rate.

    If only some of several answers with equal scores can be flagged, each is flagged in part, so
    that counts are means over all orders of ties. Source: appendix "The Distinct-Signal Analysis"
    of the paper, which does not report its flag rate.

    Args:
        flagged: number of most uncertain answers that each score flags, 0 to n.

    Raises:
        ValueError: also if a score is constant.

    Example:
        >>> mcnemar([9, 1, 2, 0], [1, 9, 2, 0], wrong=[1, 1, 0, 0], flagged=1)  # one error each
        McNemar(only_first=1.0, only_second=1.0, both=0.0, flagged=1, p_value=1.0)
    """
    from scipy.stats import binomtest  # a second to import, and few tables need it

    errors = binary(wrong=wrong)
    check_rows(range(len(errors)), first=first, second=second)
    if not 0 <= flagged <= len(errors):
        raise ValueError(f"flagged must lie in 0 ... {len(errors)}, got {flagged}")

    def flags(values: ArrayLike) -> np.ndarray:
        score = np.asarray(values, dtype=float)
        if np.ptp(score) == 0:
            raise ValueError("a constant score cannot choose answers to flag")
        _, group, sizes = np.unique(-score, return_inverse=True, return_counts=True)
        before = sizes.cumsum() - sizes
        return (np.clip(flagged - before, 0, sizes) / sizes)[group]

    a, b = flags(first)[errors], flags(second)[errors]
    only_a, only_b = float((a * (1 - b)).sum()), float((b * (1 - a)).sum())
    counts = round(only_a), round(only_b)
    p_value = binomtest(counts[0], sum(counts)).pvalue if sum(counts) else 1.0
    return McNemar(only_a, only_b, float((a * b).sum()), flagged, float(p_value))
