"""Prediction Rejection Ratio as LM-Polygraph defines it, fast enough to be resampled."""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Num
from numpy.typing import ArrayLike

from lm_polygraph_asmi.analysis.clusters import (
    CURVE_RESAMPLES,
    PRR_RESAMPLES,
    ROWS_AT_ONCE,
    finite,
    ordered,
    tied_order,
)
from lm_polygraph_asmi.analysis.labelled import Labelled


class PRR(NamedTuple):
    """A `normalised_prr`, and its bootstrap standard error over answers. NaN if undefined."""

    value: float
    standard_error: float


class Rejection:
    """Rows in the order in which one score rejects them, for many samples of these rows.

    Rows with equal scores are replaced by their mean, which is the average over all their orders.
    So a constant score has the area of random rejection, whatever the order of the rows. NaN raises
    ValueError, since it would be sorted as the most uncertain.

    Args:
        uncertainty: (n,) the score.
        values: (n,) values that are averaged over the kept rows: the quality, or errors for a
            risk-coverage curve.
    """

    def __init__(self, uncertainty: ArrayLike, values: Float[np.ndarray, " n"]) -> None:
        scores = ordered(uncertainty=uncertainty)
        if not scores.size:
            raise ValueError("expected at least one answer, got none")
        if len(values) != len(scores):
            raise ValueError(f"{len(scores)} scores for {len(values)} answers: one each")
        self.order, self.starts = tied_order(scores)
        self.tied = len(self.starts) < len(self.order)
        self.values = values[self.order]
        self.falls = -np.diff(self.values, append=0)

    def area(
        self, counts: Int[np.ndarray, "b n"], total: Float[np.ndarray, " b"]
    ) -> Float[np.ndarray, " b"]:
        """(b,) mean value of the kept rows, averaged over all levels of rejection.

        Args:
            counts: (b, n) how often each row is in each of b samples.
            total: (b,) sum of the values of each sample.
        """
        count, mean = counts.take(self.order, axis=1), self.values
        if self.tied:
            summed, count = self._by_group(count * mean), self._by_group(count)
            mean = np.divide(summed, count, out=np.zeros_like(summed), where=count > 0)
            total = summed.sum(1)  # makes the area of a single group exactly that of chance
        kept = count.cumsum(1, dtype=int)
        number = kept[:, -1]
        # The row at place i is kept at levels i to n. So it adds its value times H_n - H_(i - 1),
        # where H are harmonic numbers. `skipped` sums these H over the rows up to the end of each
        # group; over all rows, this is n H_n - n.
        skipped = _sums_of_harmonics(int(number.max()).bit_length()).take(kept)
        lost = (
            np.einsum("bg,bg->b", mean, np.diff(skipped, axis=1, prepend=0))
            if self.tied
            else skipped @ self.falls  # the same, by summation by parts
        )
        return (total + (total / number * skipped[:, -1] - lost)) / number

    def kept(
        self, counts: Int[np.ndarray, "b n"], number: Num[np.ndarray, "b m"]
    ) -> Float[np.ndarray, "b m"]:
        """(b, m) mean value of the least uncertain rows of each sample; `counts`: see `area`.

        `number` (b, m) is how many rows are kept: above 0, at most all, and perhaps fractional. If
        the limit falls between rows of equal scores, an equal part of each is kept.
        """
        count = counts.take(self.order, axis=1)
        group, summed = np.zeros((2, len(counts), len(self.starts) + 1))
        self._by_group(count).cumsum(1, out=group[:, 1:])
        self._by_group(count * self.values).cumsum(1, out=summed[:, 1:])
        return (
            np.array([np.interp(*row) for row in zip(number, group, summed, strict=True)]) / number
        )

    def _by_group(self, ranked: Num[np.ndarray, "b n"]) -> Num[np.ndarray, "b groups"]:
        """Sums over rows of equal scores. `np.add` turns small integers into larger types."""
        return np.add.reduceat(ranked, self.starts, axis=1) if self.tied else ranked


@cache
def _sums_of_harmonics(bits: int) -> Float[np.ndarray, " m"]:
    """Sums of the harmonic numbers from H_0 to H_(m - 1), for every m of at most `bits` bits."""
    harmonic = np.r_[0, np.cumsum(1 / np.arange(1, 1 << bits))]
    return np.r_[0, harmonic.cumsum()]


def has_contrast(quality: ArrayLike) -> bool:
    """Whether some answers are better than others by more than rounding, on any scale."""
    values = finite(quality=quality)
    return bool(len(values) and np.ptp(values) > 1e-12 * np.abs(values).max())


def weighted_prr(
    scores: Sequence[ArrayLike], quality: ArrayLike, samples: Iterable[np.ndarray]
) -> Float[np.ndarray, "samples M"]:
    """Normalised PRR of M scores on many samples of the same n rows.

    `samples` are arrays of counts (b, n), such as those of `Labelled.draws`. The result has a row
    for each sample and a column for each score. It is NaN if all rows of a sample are equally good.
    """
    qualities = finite(quality=quality)
    # PRR does not depend on the scale. On this scale, a few errors are not lost in rounding.
    contrast = has_contrast(qualities)
    if contrast:
        qualities = (qualities - qualities.min()) / np.ptp(qualities)
    orders = [Rejection(score, qualities) for score in scores]
    oracle = Rejection(-qualities, qualities)
    ranked = oracle.values
    parts = []
    for sample in samples:
        pieces = min(len(sample), max(1, sample.size // ROWS_AT_ONCE))
        for counts in np.array_split(sample, pieces):
            total = counts @ qualities
            best, random = oracle.area(counts, total), total / counts.sum(1)
            present = counts.take(oracle.order, axis=1) > 0
            first, last = present.argmax(1), len(ranked) - 1 - present[:, ::-1].argmax(1)
            span = np.where(contrast & (ranked[first] > ranked[last]), best - random, np.nan)
            areas = [order.area(counts, total) for order in orders]
            parts.append(np.stack([(area - random) / span for area in areas], 1))
    return np.concatenate(parts)


def normalised_prr(uncertainty: ArrayLike, quality: ArrayLike) -> float:
    """Area between rejection by `uncertainty` and random rejection, divided by that of the oracle.

    1 = errors rejected first, 0 = chance, negative = worse than chance. NaN if all answers are
    equally good. It is LM-Polygraph's `prr_normalized` with two exact values: the random baseline
    is the mean quality (LM-Polygraph: the mean of 1000 shuffles), and equal scores count as their
    mean (LM-Polygraph: in file order). An uncertainty may be infinite, but not NaN.

    Example:
        >>> normalised_prr([0.1, 0.2, 0.9], quality=[1.0, 1.0, 0.0])  # the wrong one rejected first
        1.0
    """
    all_rows = np.ones((1, len(np.asarray(quality))), dtype=int)
    return float(weighted_prr([uncertainty], quality, [all_rows])[0, 0])


def prr_draws(
    scores: Sequence[ArrayLike], answers: Labelled, default: int = PRR_RESAMPLES
) -> Float[np.ndarray, "resamples M"]:
    """PRR of M scores (n,) on the same bootstrap resamples of clusters: (resamples, M).

    NaN if all rows of a resample are equally good. A score may be infinite, but not NaN. `default`
    is the number of resamples, unless `answers` has one.

    Example:
        >>> good, bad = [0.1, 0.9] * 10, [0.9, 0.1] * 10
        >>> drawn = prr_draws([good, bad], Labelled([0, 1] * 10, range(20), resamples=100))
        >>> drawn.shape, bool((drawn[:, 0] > 0).all()), bool((drawn[:, 1] < 0).all())
        ((100, 2), True, True)
    """
    number, known = answers.number(default), answers.known
    arrays = [ordered(uncertainty=score) for score in scores]
    columns = {array.tobytes(): array for array in arrays}
    missing = [key for key in columns if len(known.get(("PRR", key), ())) < number]
    if missing:
        samples = answers.draws(default)
        drawn = weighted_prr([columns[key] for key in missing], answers.quality, samples)
        known.update({("PRR", key): prr for key, prr in zip(missing, drawn.T, strict=True)})
    return np.stack([known["PRR", array.tobytes()][:number] for array in arrays], 1)


def prr_with_error(uncertainty: ArrayLike, answers: Labelled) -> PRR:
    """Normalised PRR and its bootstrap standard error over examples, as in the paper's tables.

    Clusters are ignored. An uncertainty may be infinite, not NaN.

    Example:
        >>> score, wrong = [0.1, 0.3, 0.2, 0.9], [0, 0, 1, 1]
        >>> few, many = (
        ...     prr_with_error(score * n, Labelled(wrong * n, range(4 * n))) for n in (10, 40)
        ... )
        >>> round(few.standard_error / many.standard_error)  # four times the answers, half the SE
        2
    """
    (error,) = standard_errors([uncertainty], answers)
    return PRR(normalised_prr(uncertainty, answers.quality), error)


def standard_errors(scores: Sequence[ArrayLike], answers: Labelled) -> list[float]:
    """Bootstrap standard errors of the PRR of several scores, on the same resamples of answers."""
    if len(answers) < 2 or not has_contrast(answers.quality):
        return [float("nan")] * len(scores)
    drawn = weighted_prr(scores, answers.quality, answers.independent.draws(CURVE_RESAMPLES))
    # PRR is undefined if all answers of a resample are equally good. These are left out.
    return [float(np.nanstd(column, ddof=1)) for column in drawn.T]
