"""Prediction Rejection Ratio as LM-Polygraph defines it, fast enough to be resampled."""

import warnings
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import DegenerateDataWarning, bootstrap


class PRR(NamedTuple):
    """A normalised PRR with its standard error over examples; both NaN where undefined."""

    value: float
    standard_error: float


def _area(order: np.ndarray, quality: np.ndarray) -> float:
    """Mean quality of the kept examples, averaged over all rejection levels."""
    kept = np.arange(1, len(quality) + 1)
    return float(np.mean(np.cumsum(quality[order]) / kept))


def normalised_prr(uncertainty: ArrayLike, quality: ArrayLike) -> float:
    """Area between rejection by `uncertainty` and random rejection, over that of the oracle.

    1 = examples rejected in the order of their errors, 0 = uninformative, negative = errors are
    ranked the wrong way. LM-Polygraph's `prr_normalized` with the exact value of its random
    baseline (mean quality) where the host averages 1000 shuffles, and without its min-max scaling
    of quality, which cancels. NaN when all examples have the same quality.

    Args:
        uncertainty: higher = more uncertain.
        quality: higher = better; continuous.
    """
    uncertainty, quality = np.asarray(uncertainty), np.asarray(quality, dtype=float)
    random = quality.mean()
    oracle = _area(np.argsort(-quality), quality)
    if np.isclose(oracle, random):
        return float("nan")
    return (_area(np.argsort(uncertainty), quality) - random) / (oracle - random)


def prr_with_error(
    uncertainty: ArrayLike, quality: ArrayLike, resamples: int = 1000, seed: int = 20260711
) -> PRR:
    """Normalised PRR and its bootstrap standard error over examples, as in the paper's tables."""
    value = normalised_prr(uncertainty, quality)
    if np.isnan(value) or len(np.asarray(quality)) < 2:
        return PRR(value, float("nan"))
    with warnings.catch_warnings():
        # A resample of equally good answers has no PRR; it is left out of the standard error.
        warnings.simplefilter("ignore", DegenerateDataWarning)
        result = bootstrap(
            (uncertainty, quality),
            normalised_prr,
            paired=True,
            vectorized=False,
            n_resamples=resamples,
            method="percentile",
            random_state=np.random.default_rng(seed),
        )
    return PRR(value, float(np.nanstd(result.bootstrap_distribution, ddof=1)))
