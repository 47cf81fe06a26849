"""How an answer's score comes of the scores of its tokens.

The paper takes the mean. A mean falls with the length of an answer wherever most of its tokens are
robust, as closing tokens and the later parts of a word are; a sum grows with the length, and a
maximum does not see it. Which of them ranks errors best is a question to data.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

MEAN = "mean"
"""The paper's; what settings mean that do not name an aggregation, as those of older runs."""

_REDUCED: dict[str, Callable[..., Any]] = {MEAN: np.mean, "sum": np.sum, "max": np.max}


def aggregate(token_scores: np.ndarray | Sequence[float], aggregation: str = MEAN) -> float:
    """One number of the (T,) scores of tokens, in their unit.

    Args:
        aggregation: one of `config.AGGREGATIONS`.
    """
    return float(_REDUCED[aggregation](token_scores))


def aggregated_by(used: Mapping[str, Any]) -> list[str]:
    """What a name says of an aggregation other than the paper's: `["aggregation=sum"]`, or []."""
    aggregation = used.get("aggregation", MEAN)
    return [] if aggregation == MEAN else [f"aggregation={aggregation}"]
