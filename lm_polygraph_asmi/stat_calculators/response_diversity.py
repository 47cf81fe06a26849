"""The calculator for Adapt-ASMI: diversity of the sampled responses."""

import logging
import time
from collections.abc import Mapping
from typing import Any

from lm_polygraph.stat_calculators import StatCalculator
from lm_polygraph.utils.model import Model

from lm_polygraph_asmi.core.engine import diversity_of
from lm_polygraph_asmi.estimators.base import require
from lm_polygraph_asmi.host.model import maskable_model, prompt_ids
from lm_polygraph_asmi.host.stopping import StopConditions
from lm_polygraph_asmi.results.names import DIVERSITY, DIVERSITY_AT

log = logging.getLogger("lm_polygraph")


class ResponseDiversityCalculator(StatCalculator):
    """Computes div(x) of the responses that LM-Polygraph sampled.

    Each of the `sample_tokens` is embedded by `hidden_states[L // 2]`, at its last and at its
    second-last token (`StopConditions.embedded`). LM-Polygraph's own `sample_embeddings` are of the
    second-last token in batches of one, but of a pad token in larger batches.

    Args:
        attention: attention implementation; None: the model's.
        structure: names of modules, as in `ASMIConfig`.
    """

    def __init__(self, attention: str | None = None, structure: str | None = None) -> None:
        super().__init__()
        self.attention, self.structure = attention, structure

    @staticmethod
    def meta_info() -> tuple[list[str], list[str]]:
        return list(DIVERSITY), ["sample_tokens"]

    def __call__(
        self,
        dependencies: Mapping[str, Any],
        texts: list[str],
        model: Model,
        max_new_tokens: int = 100,
    ) -> dict[str, list[Any]]:
        """The statistics `results.names.DIVERSITY`, with one entry per example.

        If there are fewer than two non-empty responses, returns `engine.NO_EVIDENCE` and warns.
        """
        transformer = maskable_model(model, self.structure)
        stop_conditions = StopConditions.of(model)
        rows = []
        for place, (text, samples) in enumerate(
            zip(texts, require(dependencies, "sample_tokens"), strict=True)
        ):
            start = time.perf_counter()
            answers = [
                stop_conditions.response(tokens, len(texts)) for tokens in samples if len(tokens)
            ]
            responses = [
                stop_conditions.embedded(answers, gate_token, max_new_tokens)
                for gate_token in DIVERSITY_AT
            ]
            number = len(responses[0])
            if number < 2:
                log.warning(
                    "Adapt-ASMI: %d of %d sampled responses are non-empty, expected >= 2; this "
                    "example gets no semantic discount",
                    number,
                    len(samples),
                )
            prompt = prompt_ids(model, text, dependencies, place)
            diversities = diversity_of(
                transformer, prompt, *responses, attention=self.attention, structure=self.structure
            )
            rows.append(
                {
                    **dict(zip(DIVERSITY_AT.values(), diversities, strict=True)),
                    "asmi_num_responses": number,
                    "asmi_diversity_seconds": time.perf_counter() - start,
                }
            )
        return {name: [row[name] for row in rows] for name in DIVERSITY}


def load_stat_calculator(
    config: Mapping[str, Any], environment: Any
) -> ResponseDiversityCalculator:
    """Builder named in a config's `stat_calculators` entry; checks the model at once."""
    calculator = ResponseDiversityCalculator(**config)
    maskable_model(environment.model, calculator.structure)
    return calculator
