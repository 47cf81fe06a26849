"""Which depth to mask, and whether another sample of questions would lead to the same choice."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.analysis.prr import normalised_prr, weighted_prr

FEWEST_CLUSTERS = 6
"""Least number of clusters of a setting to be halved. Six clusters have 20 different halves."""
SPLITS = 1000
"""Number of random splits into halves, as in the paper."""


class Sweep(NamedTuple):
    """One variant's scores (D, n) at D depths on one setting, and the answers' quality."""

    scores: np.ndarray
    answers: Labelled


@dataclass(frozen=True)
class DepthSelection:
    """The depth with the highest aggregate PRR, and how stable this choice is on random halves.

    Attributes:
        groups: (C, D) PRR of each setting at each depth.
        aggregate: (D,) mean PRR over the settings.
        chosen: index of the best depth.
        selected: (D,) share of splits in which the first half selects the depth.
        mean_regret: PRR that the first half's choice loses on the second half, averaged over
            splits.
        no_regret: share of splits that lose nothing.
        splits: number of splits in which PRR is defined on both halves.
    """

    groups: Float[np.ndarray, "C D"]
    aggregate: Float[np.ndarray, " D"]
    chosen: int
    selected: Float[np.ndarray, " D"]
    mean_regret: float
    no_regret: float
    splits: int


def depth_selection(sweeps: Sequence[Sweep]) -> DepthSelection:
    """The depth with the highest PRR averaged over settings, with a split-half test over clusters.

    Each of `SPLITS` random splits halves the clusters of every setting. PRR is normalised within
    each half. Source: appendix "Full Benchmark and Depth Sweep" of the paper.

    Raises:
        ValueError: also if there is no setting, numbers of depths differ, a setting has fewer than
            `FEWEST_CLUSTERS` clusters, or no setting has both right and wrong answers.

    Example:
        >>> scores = np.array([[0.5] * 12, [0.1, 0.9] * 6])  # the second depth ranks errors
        >>> sweep = Sweep(scores, Labelled([0, 1] * 6, [n // 2 for n in range(12)]))
        >>> selection = depth_selection([sweep])
        >>> selection.chosen, selection.selected.tolist(), selection.mean_regret
        (1, [0.0, 1.0], 0.0)
    """
    if not sweeps or len({len(sweep.scores) for sweep in sweeps}) != 1:
        raise ValueError(
            "expected the same depths in all settings, got "
            f"{[len(sweep.scores) for sweep in sweeps]} depths"
        )
    for sweep in sweeps:
        for scores in sweep.scores:
            sweep.answers.columns(scores=scores)
    groups = np.array(
        [[normalised_prr(row, s.answers.quality) for row in s.scores] for s in sweeps]
    )
    if np.isnan(groups).all():
        raise ValueError(
            "PRR is undefined in all settings, since the answers of each setting are equally good"
        )
    # Settings with the same clusters are split in the same way, so that halves share no question.
    halves = np.array([_on_halves(sweep) for sweep in sweeps])
    # A half is averaged over the settings whose answers in it are not all equally good. Leave out
    # the split if a half has no such setting.
    halves = halves[:, :, ~np.isnan(halves).all(axis=0).any(axis=(0, 2))]
    if not halves.size:
        raise ValueError(
            "PRR is undefined on a half of every split, since there are too few errors"
        )
    first, second = np.nanmean(halves, axis=0)
    selected = first.argmax(1)
    regret = second.max(1) - second[np.arange(len(second)), selected]
    aggregate = np.nanmean(groups, axis=0)
    return DepthSelection(
        groups=groups,
        aggregate=aggregate,
        chosen=int(aggregate.argmax()),
        selected=np.bincount(selected, minlength=groups.shape[1]) / len(selected),
        mean_regret=float(regret.mean()),
        no_regret=float((regret == 0).mean()),
        splits=len(selected),
    )


def _on_halves(sweep: Sweep) -> Float[np.ndarray, "2 splits D"]:
    """(2, splits, D) PRR on both halves of random splits of the clusters."""
    codes, total = sweep.answers.codes, sweep.answers.n_clusters
    if total < FEWEST_CLUSTERS:
        raise ValueError(
            f"halving a setting needs at least {FEWEST_CLUSTERS} clusters, got {total}: use more "
            "rows"
        )
    rng = np.random.default_rng(sweep.answers.seed)
    in_first = rng.permuted(np.tile(np.arange(total) < total // 2, (SPLITS, 1)), axis=1)[:, codes]
    halves = (half.astype(np.int8) for half in (in_first, ~in_first))
    scores, quality = list(sweep.scores), sweep.answers.quality
    return np.array([weighted_prr(scores, quality, [half]) for half in halves])
