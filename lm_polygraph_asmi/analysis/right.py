"""Which answers are right, by their quality and text."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

from lm_polygraph_asmi.validation import check_number

RIGHT = 0.5
"""Quality from which an answer counts as right, as in the paper."""
ROUNDING = 1e-6
"""How far a metric of 0 to 1 may lie outside by rounding."""


def on_scale(quality: Any) -> bool:
    """Whether one or all qualities lie between 0 and 1, up to rounding."""
    return bool(np.all((np.asarray(quality) >= -ROUNDING) & (np.asarray(quality) <= 1 + ROUNDING)))


def below_right(quality: float, right_from: float | None = None, name: str = "quality") -> bool:
    """Whether an answer of this quality is wrong: below `right_from`, by default `RIGHT`.

    Without `right_from`, ValueError for a quality outside 0 to 1: on another scale, such as
    percent, nearly every answer would count as right.
    """
    if right_from is not None:
        check_number("right_from", right_from)
    elif not on_scale(quality):
        raise ValueError(
            f"expected {name} between 0 and 1, got {quality:g}: on another scale, say from where "
            "an answer is right (--right-from, right_from)"
        )
    return bool(quality < (RIGHT if right_from is None else right_from))


def says_nothing(texts: Sequence[str] | None) -> Bool[np.ndarray, " n"] | None:
    """(n,) whether an answer has no letter and no digit. None if texts were not saved."""
    return None if texts is None else np.array([not re.search(r"\w", text) for text in texts])
