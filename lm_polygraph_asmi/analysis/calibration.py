"""Probability of error by isotonic fits, and its calibration on held-out answers."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from lm_polygraph_asmi.analysis.clusters import binary, finite
from lm_polygraph_asmi.analysis.labelled import Labelled

SMALLEST_STEP = 25
"""Fewest answers of a step of the calibration; a plain isotonic fit has steps of one."""
DRAWS = 1000
"""Draws of errors from calibrated probabilities."""


class Step(NamedTuple):
    """Answers of a calibration that share a probability of error.

    Attributes:
        start: the lowest of their scores, nats.
        n, errors: answers, and wrong ones among them.
    """

    start: float
    n: int
    errors: int


def calibrate(scores: ArrayLike, wrong: ArrayLike) -> list[Step]:
    """Steps of an isotonic fit, merged with neighbours until each has `SMALLEST_STEP` answers.

    They are by increasing score, and their error rates increase, too. Fewer answers in total form
    one step.

    Example:
        >>> calibrate([0.1] * 25 + [0.9] * 25, [0] * 20 + [1] * 5 + [1] * 20 + [0] * 5)
        [Step(start=0.1, n=25, errors=5), Step(start=0.9, n=25, errors=20)]
    """
    score, errors = finite(scores=scores), binary(wrong=wrong).astype(float)
    if not score.size:
        raise ValueError("there is no answer to calibrate on")
    if score.shape != errors.shape:
        raise ValueError(f"{len(score)} scores for {len(errors)} answers: one each")
    distinct, group, sizes = np.unique(score, return_inverse=True, return_counts=True)
    sums = np.bincount(group, errors)
    fitted = _isotonic(sums / sizes, sizes)
    steps: list[Step] = []
    for part in np.split(np.arange(len(fitted)), 1 + np.flatnonzero(np.diff(fitted))):
        step = Step(float(distinct[part[0]]), int(sizes[part].sum()), int(sums[part].sum()))
        steps = _joined(steps, step) if steps and steps[-1].n < SMALLEST_STEP else [*steps, step]
    if len(steps) > 1 and steps[-1].n < SMALLEST_STEP:
        steps = _joined(steps[:-1], steps[-1])
    return steps


def _isotonic(rates: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The function that scikit-learn uses, called directly for a thousand fits."""
    from scipy.optimize import isotonic_regression  # a second to import

    return isotonic_regression(rates, weights=sizes).x


def _joined(steps: list[Step], step: Step) -> list[Step]:
    last = steps[-1]
    return [*steps[:-1], Step(last.start, last.n + step.n, last.errors + step.errors)]


def step_at(steps: Sequence[Step], score: float) -> Step:
    """The step that contains a score; the first for a score below all."""
    return steps[max(0, bisect_right([step.start for step in steps], score) - 1)]


def probability_at(steps: Sequence[Step], score: float) -> float:
    """Error rate of the score's step, with one more answer that is wrong at the overall rate.

    So no probability is 0 or 1, and a large step hardly changes. If all answers are right, or all
    wrong, that one counts as half wrong. ValueError for a score that is not finite, or no step.

    Example:
        >>> steps = [Step(0.1, 25, 5), Step(0.9, 25, 20)]  # half of all answers are wrong
        >>> round(probability_at(steps, 2.0), 2)  # (20 + 0.5) / (25 + 1)
        0.79
    """
    finite(score=score)
    if not steps:
        raise ValueError("there is no step: calibrate on at least one answer")
    overall = sum(step.errors for step in steps) / sum(step.n for step in steps)
    step = step_at(steps, score)
    return (step.errors + (overall if 0 < overall < 1 else 0.5)) / (step.n + 1)


def held_out_probability(
    scores: ArrayLike, answers: Labelled
) -> tuple[np.ndarray, np.ndarray] | None:
    """(n,) probabilities of error from answers of other clusters: by the score, and the base rate.

    Five folds of whole clusters, each calibrated on the other four. None with a single cluster, or
    if the other folds are too small for two steps.

    Example:
        >>> answers = Labelled([0, 1] * 50, [n // 2 for n in range(100)])  # two in a cluster
        >>> chance, base = held_out_probability([0.1, 0.9] * 50, answers)
        >>> chance[:2].round(2).tolist(), base[:2].tolist()  # the base rate is the same for both
        ([0.01, 0.99], [0.5, 0.5])
    """
    from sklearn.model_selection import GroupKFold

    (score,), errors = answers.columns(scores=scores), answers.wrong
    folds = min(5, answers.n_clusters)
    if folds < 2:
        return None
    calibrated, base = np.empty(len(score)), np.empty(len(score))
    for fitted, held_out in GroupKFold(folds).split(score, groups=answers.codes):
        if len(fitted) < 2 * SMALLEST_STEP:
            return None
        steps = calibrate(score[fitted], errors[fitted])
        calibrated[held_out] = [probability_at(steps, value) for value in score[held_out]]
        base[held_out] = errors[fitted].mean()
    return calibrated, base


def held_out_brier(scores: ArrayLike, answers: Labelled) -> tuple[float, float] | None:
    """Brier scores of both probabilities of `held_out_probability`; None where it returns None.

    Mean squared difference of probability and outcome, in [0, 1]; lower = better.

    Example:
        >>> answers = Labelled([0, 1] * 50, [n // 2 for n in range(100)])
        >>> calibrated, base = held_out_brier([0.1, 0.9] * 50, answers)
        >>> round(calibrated, 4), base  # a coin's is 0.25
        (0.0001, 0.25)
    """
    chances = held_out_probability(scores, answers)
    if chances is None:
        return None
    calibrated, base = (float(np.mean((chance - answers.wrong) ** 2)) for chance in chances)
    return calibrated, base


@dataclass(frozen=True)
class Reliability:
    """Probabilities of error compared with error rates.

    Attributes:
        chance: (g,) distinct probabilities, ascending.
        n: (g,) answers of each.
        rate: (g,) isotonic fit of the errors: the calibrated probabilities.
        band: (2, g) pointwise 95 % range of that fit if the probabilities are calibrated.
        brier: mean squared difference of probability and outcome: miscalibration - discrimination
            + uncertainty.
        miscalibration: reduction of `brier` by using `rate`; lower = better.
        discrimination: reduction from `uncertainty` by using `rate`; higher = better.
        uncertainty: the Brier score of a constant error rate.
        p_value: of a miscalibration as large as this, if the probabilities are calibrated.
    """

    chance: np.ndarray
    n: np.ndarray
    rate: np.ndarray
    band: np.ndarray
    brier: float
    miscalibration: float
    discrimination: float
    uncertainty: float
    p_value: float


def reliability(chance: ArrayLike, answers: Labelled, draws: int = DRAWS) -> Reliability:
    """Reliability diagram of probabilities by isotonic regression, with consistency bands.

    The curve is an isotonic fit of the errors on the probabilities, without bins. For the band,
    errors are drawn as if the probabilities were calibrated: each error's distance from its
    probability keeps its size, and whole clusters get random signs, so that dependent answers stay
    dependent. In simulations, the band covered the curve of calibrated probabilities at 92 % of
    points with 40 clusters of 6 answers, at 95 % with 200; the test kept its level of 5 %.
    Sources: Dimitriadis, Gneiting and Jordan (2021), Stable reliability diagrams for probabilistic
    classifiers; for the signs, Cameron, Gelbach and Miller (2008), Bootstrap-based improvements for
    inference with clustered errors.

    Args:
        chance: (n,) in [0, 1], from other answers than these: see `held_out_probability`.
        draws: of errors, for the band and the p-value.

    Raises:
        ValueError: also fewer than two clusters.

    Example:
        >>> chance, wrong = [0.1] * 5 + [0.9] * 5, [0, 0, 0, 0, 1, 0, 1, 1, 1, 1]
        >>> diagram = reliability(chance, Labelled(wrong, list("abcdefghij")))
        >>> diagram.rate.round(2).tolist()  # one of five was wrong, and four of five: not 0.1, 0.9
        [0.2, 0.8]
        >>> round(diagram.miscalibration, 2)  # 0.1 squared
        0.01
    """
    (p_wrong,), errors = answers.columns(chance=chance), answers.wrong.astype(float)
    if p_wrong.min() < 0 or p_wrong.max() > 1:
        raise ValueError("probabilities must lie in [0, 1]")
    if answers.n_clusters < 2:
        raise ValueError("expected at least two clusters for a band, got one")
    distinct, group, sizes = np.unique(p_wrong, return_inverse=True, return_counts=True)
    # Sums by cluster and probability: signs of clusters then move them in one product.
    excess = np.zeros((answers.n_clusters, len(distinct)))
    np.add.at(excess, (answers.codes, group.ravel()), errors - p_wrong)

    def fit(rates: np.ndarray) -> tuple[np.ndarray, float]:
        """Isotonic fit of the groups' rates, and by how much it lowers the Brier score."""
        fitted = _isotonic(rates, sizes)
        gain = (rates - distinct) ** 2 - (rates - fitted) ** 2
        return fitted, float(sizes @ gain / len(p_wrong))

    rate, miscalibration = fit(distinct + excess.sum(0) / sizes)
    signs = np.random.default_rng(answers.seed).choice([-1.0, 1.0], size=(draws, len(excess)))
    drawn = [fit(distinct + signed / sizes) for signed in signs @ excess]
    low, high = np.percentile([fitted for fitted, _ in drawn], [2.5, 97.5], axis=0)
    as_large = sum(gain >= miscalibration - 1e-12 for _, gain in drawn)
    brier = float(np.mean((p_wrong - errors) ** 2))
    uncertainty = float(errors.mean() * (1 - errors.mean()))
    return Reliability(
        distinct, sizes, rate, np.clip([low, high], 0, 1), brier, miscalibration,
        uncertainty + miscalibration - brier, uncertainty, (1 + as_large) / (1 + draws),
    )  # fmt: skip


def debiased_calibration_error(chance: ArrayLike, wrong: ArrayLike, bins: int = 10) -> float:
    """Root mean square gap between probability and error rate, minus its expected value by chance.

    Bins of equal size; from the squared gap of a bin with error rate y, subtract y (1 - y) /
    (n - 1), its mean without any gap. Lower = better, at least 0. It takes answers as independent,
    so with large clusters it is above 0 even for calibrated probabilities: `reliability` has a
    test that respects clusters. Source: Kumar, Liang and Ma (2019), Verified uncertainty
    calibration.

    Args:
        chance: (n,) in [0, 1], from other answers than these, at least two.
        bins: largest number of bins; fewer if one would have fewer than two answers.

    Example:
        >>> debiased_calibration_error([0.5] * 100, [0, 1] * 50)
        0.0
        >>> round(debiased_calibration_error([0.9] * 100, [0, 1] * 50, bins=1), 1)  # 0.9 for 0.5
        0.4
    """
    p, errors = finite(chance=chance), binary(wrong=wrong).astype(float)
    if p.shape != errors.shape:
        raise ValueError(f"{len(p)} probabilities for {len(errors)} answers: one each")
    if len(p) < 2:
        raise ValueError(f"expected at least two answers, got {len(p)}")
    if p.min() < 0 or p.max() > 1:
        raise ValueError("probabilities must lie in [0, 1]")
    total = 0.0
    for rows in np.array_split(np.argsort(p, kind="stable"), max(1, min(bins, len(p) // 2))):
        rate = errors[rows].mean()
        gap = (p[rows].mean() - rate) ** 2 - rate * (1 - rate) / (len(rows) - 1)
        total += len(rows) * gap
    return float(np.sqrt(max(0.0, total / len(p))))
