"""ASMI: mutual information of attention subnetworks, unweighted."""

from collections.abc import Mapping
from typing import Any

from lm_polygraph_asmi.estimators.base import MaskedHeadsEstimator


class ASMI(MaskedHeadsEstimator):
    """Mean over tokens of MI_t, in nats; higher = more uncertain. Equations "mi", "seq-unc".

    Example:
        >>> estimator = ASMI(num_masks=50, mask_rate=0.2)
        >>> print(estimator, estimator(stats).round(2))
        ASMI (60%, K=64, S=50, p=0.2) [0.3]
    """

    symbol, method = "ASMI", "asmi"


def load_estimator(config: Mapping[str, Any]) -> ASMI:
    return ASMI(**config)
