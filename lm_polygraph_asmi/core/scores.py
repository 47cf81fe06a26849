"""Line 9 of Algorithm 1: from MI_t and A_t of the tokens to the score of the answer.

Every score of an answer is `aggregate` of the `token_scores` of the tokens that count, with
`discount` as alpha. All tokens count, or all but the one that closes the answer, which callers
leave out (`ASMIConfig.counted`). Estimators call these for benchmark runs, `Scorer` for answers,
and `results.run_groups` for saved statistics. No torch is imported, so that a report does not need
it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from lm_polygraph_asmi.config import ASMIConfig

__all__ = ["adaptive_gate", "aggregate", "discount", "token_scores"]
Value = TypeVar("Value", float, np.ndarray)

_REDUCED: dict[str, Callable[..., Any]] = {"mean": np.mean, "sum": np.sum, "max": np.max}


def adaptive_gate(
    diversity: float, tau: float = ASMIConfig.tau, beta: float = ASMIConfig.beta
) -> float:
    """alpha(x) = sigmoid(beta (tau - div(x))), in (0, 1): near 1 for near-paraphrases.

    It is 0.5 where div = tau; beta is its steepness there. The defaults are the paper's, the same
    for all tasks and models. ValueError: a diversity that is NaN or infinite. Source: section
    "Adaptive semantic weighting" of the paper.

    Example:
        >>> round(adaptive_gate(0.3), 2), round(adaptive_gate(1.0), 4)  # half open, closed
        (0.5, 0.0009)
    """
    if not math.isfinite(diversity):
        raise ValueError(f"diversity must be finite, got {diversity}")
    # tanh form of the sigmoid: no overflow for large beta.
    return 0.5 * (1 + math.tanh(beta * (tau - diversity) / 2))


def discount(config: ASMIConfig, diversity: float | None = None) -> float:
    """alpha, the weight of the semantic discount: 0 for ASMI, 1 for Sem-ASMI, `adaptive_gate` of
    the input's div(x) for Adapt-ASMI."""
    if config.method == "adapt":
        if diversity is None:
            raise ValueError("expected the diversity of sampled answers for Adapt-ASMI, got none")
        return adaptive_gate(diversity, config.tau, config.beta)
    return float(config.method == "sem")


def token_scores(information: Value, agreement: Value, alpha: float = 1.0) -> Value:
    """u_t = MI_t (1 - alpha A_t), nats, in [0, ln S]; higher = more uncertain.

    Source: equations "mi" (alpha 0, ASMI), "sem-mi" (1, Sem-ASMI) and "adapt-mi" (`adaptive_gate`,
    Adapt-ASMI) of the paper.

    Args:
        information: MI_t, nats, of one token or an array.
        agreement: A_t, in [0, 1], of the same shape.
        alpha: weight of the semantic discount, in [0, 1].

    Example:
        >>> token_scores(0.4, 0.5), token_scores(0.4, 0.5, alpha=0.0)
        (0.2, 0.4)
    """
    # 9: MI_t (1 - A_t)
    return information * (1 - alpha * agreement)


def aggregate(
    token_scores: np.ndarray | Sequence[float], aggregation: str = ASMIConfig.aggregation
) -> float:
    """The score of an answer from the (T,) scores of its tokens, in their unit.

    The paper's is the mean (equation "seq-unc"). Most tokens of a long answer are robust, such as
    the later parts of words, so its mean tends to be lower. The sum grows with the length. Which
    of mean, sum and maximum ranks errors best depends on the data.

    Args:
        aggregation: one of `config.AGGREGATIONS`.

    Example:
        >>> aggregate([0.1, 0.3]), aggregate([0.1, 0.3], "max")
        (0.2, 0.3)
    """
    # 9: U <- 1 / T sum over t
    return float(_REDUCED[aggregation](token_scores))
