"""How an answer's score comes of the scores of its tokens.

The paper takes the mean. A mean falls with the length of an answer wherever most of its tokens are
robust, as closing tokens and the later parts of a word are; a sum grows with the length, and a
maximum does not see it. Which of them ranks errors best is a question to data.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lm_polygraph_asmi.config import ASMIConfig

_REDUCED: dict[str, Callable[..., Any]] = {"mean": np.mean, "sum": np.sum, "max": np.max}


def aggregate(
    token_scores: np.ndarray | Sequence[float], aggregation: str = ASMIConfig.aggregation
) -> float:
    """One number of the (T,) scores of tokens, in their unit.

    Args:
        aggregation: one of `config.AGGREGATIONS`.
    """
    return float(_REDUCED[aggregation](token_scores))
