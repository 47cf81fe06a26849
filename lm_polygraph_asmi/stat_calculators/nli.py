"""LM-Polygraph's NLI calculator, with text pairs encoded as in the model's training."""

from collections.abc import Mapping
from typing import Any

from lm_polygraph.stat_calculators import SemanticMatrixCalculator

from lm_polygraph_asmi.host.side_models import load_nli_model


def load_stat_calculator(config: Mapping[str, Any], environment: Any) -> SemanticMatrixCalculator:
    """Builder named in a config's `stat_calculators` entry. It loads the model once per run."""
    if not hasattr(environment, "nli_model"):
        environment.nli_model = load_nli_model(**config)
    return SemanticMatrixCalculator(environment.nli_model)
