"""Sem-ASMI: ASMI with a discount for disagreement among near-synonyms."""

from collections.abc import Mapping
from typing import Any

from lm_polygraph_asmi.estimators.base import MaskedHeadsEstimator


class SemASMI(MaskedHeadsEstimator):
    """Mean over tokens of MI_t (1 - A_t), in nats; higher = more uncertain. Equation "sem-mi".

    Example:
        >>> SemASMI(num_masks=50, mask_rate=0.2)(stats).round(2)
        array([0.1])
    """

    symbol, method = "Sem-ASMI", "sem"


def load_estimator(config: Mapping[str, Any]) -> SemASMI:
    return SemASMI(**config)
