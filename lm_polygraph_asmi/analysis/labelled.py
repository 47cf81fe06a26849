"""Labelled answers, checked once, as one object."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike

from lm_polygraph_asmi.analysis.clusters import (
    FEW_CLUSTERS,
    FEW_ERRORS,
    SEED,
    Clustered,
    binary,
    check_rows,
)

FOLDS = 5


class Labelled(Clustered):
    """n answers with correctness labels, quality or both, and their clusters.

    Statistics computed on one object share the resamples of clusters, which are drawn once.

    Args:
        wrong: (n,) correctness labels, 1 or True = wrong. None: only the quality is known.
        quality: (n,), higher = better. None: 1 - wrong.
        clusters, resamples, seed: as in `Clustered`.

    Example:
        >>> answers = Labelled(wrong=[0, 1, 1], clusters=["a", "a", "b"])
        >>> len(answers), answers.n_clusters, answers.quality.tolist()
        (3, 2, [1.0, 0.0, 0.0])
        >>> answers.take([1, 2]).clusters
        ['a', 'b']
    """

    def __init__(
        self,
        wrong: ArrayLike | None = None,
        clusters: Sequence[Any] | None = None,
        quality: ArrayLike | None = None,
        resamples: int | None = None,
        seed: int = SEED,
    ) -> None:
        labels = {"wrong": wrong, "quality": quality}
        known = {name: column for name, column in labels.items() if column is not None}
        check_rows(clusters, **known)
        if not known:
            raise ValueError("expected wrong, quality or both for each cluster key, got neither")
        super().__init__(clusters, resamples, seed)
        self._wrong = None if wrong is None else binary(wrong=wrong)
        self._quality = None if quality is None else np.asarray(quality, dtype=float)

    @property
    def wrong(self) -> Bool[np.ndarray, " n"]:
        """(n,) whether each answer is wrong. ValueError if only the quality is known."""
        if self._wrong is None:
            raise ValueError(
                "these answers have no correctness labels: pass wrong, for example quality < 0.5"
            )
        return self._wrong

    @property
    def quality(self) -> Float[np.ndarray, " n"]:
        """(n,), higher = better."""
        return 1.0 - self.wrong if self._quality is None else self._quality

    @property
    def too_few(self) -> bool:
        """Whether clusters, right or wrong answers are so few that `FEW` applies to intervals."""
        errors = int(self.wrong.sum())
        return self.n_clusters < FEW_CLUSTERS or min(errors, len(self) - errors) < FEW_ERRORS

    def take(self, rows: ArrayLike) -> "Labelled":
        """The answers with these row numbers, or where these (n,) booleans are True."""
        places = np.arange(len(self))[np.asarray(rows)]
        wrong, quality = (
            None if column is None else column[places] for column in (self._wrong, self._quality)
        )
        clusters = [self.clusters[place] for place in places]
        return Labelled(wrong, clusters, quality, self.resamples, self.seed)

    def folds(self) -> Int[np.ndarray, " n"]:
        """(n,) fold of each answer, 0 to 4.

        All answers of a cluster are in one fold, and errors are spread evenly over the folds.
        Raises ValueError if there are too few clusters for each fold to have right and wrong
        answers.
        """
        fewest = min(len(set(self.codes[self.wrong == kind])) for kind in (False, True))
        if fewest < FOLDS:
            raise ValueError(
                f"{FOLDS} folds need right and wrong answers in at least {FOLDS} clusters each, "
                f"got {fewest}: use more rows"
            )
        return self.once(_spread, self.wrong, self.codes, np.array(self.seed))


def _spread(wrong: np.ndarray, codes: np.ndarray, seed: np.ndarray) -> np.ndarray:
    from sklearn.model_selection import StratifiedGroupKFold  # a second to import

    folds = np.empty(len(wrong), dtype=int)
    split = StratifiedGroupKFold(FOLDS, shuffle=True, random_state=int(seed))
    for number, (_, test) in enumerate(split.split(wrong, wrong, codes)):
        folds[test] = number
    return folds
