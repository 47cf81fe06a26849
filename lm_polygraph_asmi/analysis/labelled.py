"""Labelled answers as one object, checked once."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from lm_polygraph_asmi.analysis.clusters import (
    RESAMPLES,
    SEED,
    binary,
    check_rows,
    cluster_codes,
)


class Labelled:
    """n answers with correctness labels, quality or both, and their clusters.

    Args:
        wrong: (n,) correctness labels, 1 or True = wrong; None: only the quality is known.
        clusters: (n,) key of each answer; answers on one passage share a key.
        quality: (n,), higher = better; None: 1 - wrong.
        resamples: number of bootstrap resamples of clusters.
        seed: of resamples, folds and other random choices.

    Attributes:
        codes: (n,) number of each answer's cluster, from 0.
        n_clusters: number of clusters.

    Raises:
        ValueError: no answer, neither `wrong` nor `quality`, unequal lengths, a value that is not
            finite, or labels other than 0 and 1.

    Example:
        >>> answers = Labelled(wrong=[0, 1, 1], clusters=["a", "a", "b"])
        >>> len(answers), answers.n_clusters, answers.quality.tolist()
        (3, 2, [1.0, 0.0, 0.0])
    """

    def __init__(
        self,
        wrong: ArrayLike | None = None,
        clusters: Sequence[str] | None = None,
        quality: ArrayLike | None = None,
        resamples: int = RESAMPLES,
        seed: int = SEED,
    ) -> None:
        labels = {"wrong": wrong, "quality": quality}
        known = {name: column for name, column in labels.items() if column is not None}
        check_rows(clusters, **known)
        if clusters is None or not known:
            raise ValueError("expected wrong, quality or both for each cluster key, got neither")
        self.clusters, self.resamples, self.seed = list(clusters), resamples, seed
        self.codes = cluster_codes(clusters)
        self.n_clusters = int(self.codes.max()) + 1
        self._wrong = None if wrong is None else binary(wrong=wrong)
        self._quality = None if quality is None else np.asarray(quality, dtype=float)

    def __len__(self) -> int:
        return len(self.clusters)

    @property
    def wrong(self) -> np.ndarray:
        """(n,) whether each answer is wrong; ValueError if only the quality is known."""
        if self._wrong is None:
            raise ValueError(
                "these answers have no correctness labels: pass wrong, for example quality < 0.5"
            )
        return self._wrong

    @property
    def quality(self) -> np.ndarray:
        """(n,), higher = better."""
        return 1.0 - self.wrong if self._quality is None else self._quality

    def columns(self, /, **named: ArrayLike) -> list[np.ndarray]:
        """Columns as numbers, with a finite value (or row) for each answer.

        Raises:
            ValueError: another length, or a value that is not finite.
        """
        check_rows(self.clusters, **named)
        return [np.asarray(column, dtype=float) for column in named.values()]
