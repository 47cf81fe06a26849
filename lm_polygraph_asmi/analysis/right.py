"""Decide which answers are right by their quality, and which are empty by their text."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

from lm_polygraph_asmi.validation import check_number

RIGHT = 0.5
"""An answer is right if its quality is at least this, as in the paper."""
ROUNDING = 1e-6
"""A metric from 0 to 1 may be outside by this much, because of rounding."""


def on_scale(quality: Any) -> bool:
    """Whether one quality, or all, lie between 0 and 1, up to rounding."""
    return bool(np.all((np.asarray(quality) >= -ROUNDING) & (np.asarray(quality) <= 1 + ROUNDING)))


def below_right(quality: float, right_from: float | None = None, name: str = "quality") -> bool:
    """Whether an answer of this quality is wrong: below `right_from`, by default `RIGHT`.

    Without `right_from`, a quality outside 0 to 1 raises ValueError. On another scale, such as
    percent, nearly every answer would count as right.
    """
    if right_from is not None:
        check_number("right_from", right_from)
    elif not on_scale(quality):
        raise ValueError(
            f"expected {name} between 0 and 1, got {quality:g}: for another scale, give the "
            "lowest quality of a right answer (--right-from, right_from)"
        )
    return bool(quality < (RIGHT if right_from is None else right_from))


def says_nothing(texts: Sequence[str] | None) -> Bool[np.ndarray, " n"] | None:
    """(n,) True for an answer without a letter or digit; None if texts were not saved."""
    return None if texts is None else np.array([not re.search(r"\w", text) for text in texts])
