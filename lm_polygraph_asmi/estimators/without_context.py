"""What the context gives to the output: one pass over the prompt without it."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from lm_polygraph_asmi.estimators.base import SourceEstimator
from lm_polygraph_asmi.results.names import require


class WithoutContext(SourceEstimator):
    """Mean over tokens of the KL to the model's output of that without the context, in nats.

    The context's tokens are taken out of the prompt. Higher = the answer hangs more on the context;
    whether that is more uncertain differs between models. No head is masked; settings are those of
    the run it stands in.
    """

    symbol = "Without-context"

    def _dependencies(self) -> list[str]:
        return [*super()._dependencies(), "asmi_without_context_kl"]

    def _token_scores(self, stats: dict[str, Any]) -> list[np.ndarray]:
        return list(require(stats, "asmi_without_context_kl"))


def load_estimator(config: Mapping[str, Any]) -> WithoutContext:
    return WithoutContext(**config)
