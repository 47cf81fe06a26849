"""Features of an answer from its unmasked pass, as a row of numbers."""

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from lm_polygraph_asmi.analysis.clusters import finite


def free_features(
    log_likelihood: ArrayLike, entropy: ArrayLike, prompt_tokens: int
) -> Float[np.ndarray, " 11"]:
    """(11,) features of an answer that its unmasked pass gives for free, in nats and tokens.

    In this order: sum, mean, minimum, first and last of the log-likelihood; mean, sum, maximum and
    first of the entropy; number of answer tokens; number of prompt tokens.

    Args:
        log_likelihood, entropy: (T,) of the answer's tokens, with the closing one, nats.
        prompt_tokens: number of the prompt's tokens.

    Example:
        >>> free_features([-0.5, -1.5], [1.0, 2.0], prompt_tokens=20)[:2].tolist()  # sum and mean
        [-2.0, -1.0]
    """
    ll, h = finite(log_likelihood=log_likelihood), finite(entropy=entropy)
    if ll.ndim != 1 or ll.shape != h.shape or not len(ll):
        raise ValueError(
            "expected a log-likelihood and an entropy for each token, and at least one token, got "
            f"{ll.shape} and {h.shape}"
        )
    of_likelihood = [ll.sum(), ll.mean(), ll.min(), ll[0], ll[-1]]
    return np.array([*of_likelihood, h.mean(), h.sum(), h.max(), h[0], len(h), prompt_tokens])
