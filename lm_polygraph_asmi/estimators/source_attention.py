"""Baseline: attention of the layer to a source."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from lm_polygraph_asmi.estimators.base import SourceEstimator
from lm_polygraph_asmi.results.names import require


class SourceAttention(SourceEstimator):
    """Attention on the source's tokens, mean over tokens and heads of the layer, in [0, 1].

    Higher = more attention; whether that means more uncertain differs between models.
    """

    symbol = "Source-attention"

    def _dependencies(self) -> list[str]:
        return [*super()._dependencies(), self._name("asmi_source_attention")]

    def _token_scores(self, stats: dict[str, Any]) -> list[np.ndarray]:
        return list(require(stats, self._name("asmi_source_attention")))


def load_estimator(config: Mapping[str, Any]) -> SourceAttention:
    return SourceAttention(**config)
