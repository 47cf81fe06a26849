"""Baseline: effect of the context on the output, from one pass over the prompt without it."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from lm_polygraph_asmi.estimators.base import SourceEstimator
from lm_polygraph_asmi.results.names import require


class WithoutContext(SourceEstimator):
    """Mean over tokens of KL(output without the context || output), in nats.

    The context's tokens are removed from the prompt. Higher = the answer depends more on the
    context; whether that means more uncertain differs between models. No head is masked; the
    settings in its name are those of the run.
    """

    symbol = "Without-context"

    def _dependencies(self) -> list[str]:
        return [*super()._dependencies(), "asmi_without_context_kl"]

    def _token_scores(self, stats: dict[str, Any]) -> list[np.ndarray]:
        return list(require(stats, "asmi_without_context_kl"))


def load_estimator(config: Mapping[str, Any]) -> WithoutContext:
    return WithoutContext(**config)
