"""Baseline: effect of a source on the output, from one pass in which no head reads it."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from lm_polygraph_asmi.estimators.base import SourceEstimator
from lm_polygraph_asmi.results.names import require


class SourceKL(SourceEstimator):
    """Mean over tokens of KL(output without a source || unmasked output), in nats.

    The source's part is removed from all heads of the layer. Higher = the answer depends more on
    the source; whether that means more uncertain differs between models.
    """

    symbol = "Source-KL"

    def _dependencies(self) -> list[str]:
        return [*super()._dependencies(), self._name("asmi_source_kl")]

    def _token_scores(self, stats: dict[str, Any]) -> list[np.ndarray]:
        return list(require(stats, self._name("asmi_source_kl")))


def load_estimator(config: Mapping[str, Any]) -> SourceKL:
    return SourceKL(**config)
