"""Aggregate the scores of tokens to the score of an answer.

The paper uses the mean. The mean falls with the length of an answer if most tokens are robust, as
closing tokens and later parts of words are; the sum grows with length; the maximum does not depend
on it. Which one ranks errors best depends on the data.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lm_polygraph_asmi.config import ASMIConfig

_REDUCED: dict[str, Callable[..., Any]] = {"mean": np.mean, "sum": np.sum, "max": np.max}


def aggregate(
    token_scores: np.ndarray | Sequence[float], aggregation: str = ASMIConfig.aggregation
) -> float:
    """Aggregate the (T,) scores of tokens to one number, in their unit.

    Args:
        aggregation: one of `config.AGGREGATIONS`.
    """
    return float(_REDUCED[aggregation](token_scores))
