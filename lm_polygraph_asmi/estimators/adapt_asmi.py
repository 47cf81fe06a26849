"""Adapt-ASMI: Sem-ASMI whose discount depends on the diversity of sampled answers."""

from collections.abc import Mapping
from typing import Any

from lm_polygraph_asmi.estimators.base import MaskedHeadsEstimator
from lm_polygraph_asmi.results.names import DIVERSITY_AT


class AdaptASMI(MaskedHeadsEstimator):
    """Mean over tokens of MI_t (1 - alpha(x) A_t), in nats; higher = more uncertain.

    Equation "adapt-mi". alpha(x) = sigmoid(beta (tau - div(x))), with tau and beta of the config.
    It is near 1 if the sampled answers paraphrase each other, and near 0 if they differ. The
    config's `gate_token` selects the hidden states that div(x) compares.

    Example:
        >>> AdaptASMI(num_masks=50, mask_rate=0.2)(stats).round(2)  # div = tau: half the discount
        array([0.2])
    """

    symbol, method = "Adapt-ASMI", "adapt"

    def _dependencies(self) -> list[str]:
        return [*super()._dependencies(), DIVERSITY_AT[self.config.gate_token]]

    def _diversity(self, example: Mapping[str, Any]) -> float:
        return float(example[DIVERSITY_AT[self.config.gate_token]])


def load_estimator(config: Mapping[str, Any]) -> AdaptASMI:
    return AdaptASMI(**config)
