"""The stat calculator of all ASMI estimators: runs the engine inside LM-Polygraph."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from lm_polygraph.stat_calculators import StatCalculator
from lm_polygraph.utils.model import Model

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.host.model import causal_model, check_greedy, prompt_ids
from lm_polygraph_asmi.host.stopping import StopConditions
from lm_polygraph_asmi.results.names import masked_head_stats, require
from lm_polygraph_asmi.scoring.engine import Engine
from lm_polygraph_asmi.stat_calculators.greedy import MEMORY


class MaskedHeadsCalculator(StatCalculator):
    """Scores the greedy response under S head masks at one layer per depth.

    Returns the statistics of `lm_polygraph_asmi.results.names`. Needs only LM-Polygraph's
    `greedy_tokens`; reuses the key-value cache of generation if there is one.

    Args:
        config, **engine: as for `scoring.engine.Engine`.

    Raises:
        TypeError: unknown setting.
        ValueError: setting out of range, or `special_tokens` "plain".
    """

    def __init__(self, config: ASMIConfig | None = None, **engine: Any) -> None:
        super().__init__()
        self.engine = Engine(config, **engine)
        if self.engine.config.special_tokens != "control":
            raise ValueError(
                "special_tokens 'plain' needs texts that this package tokenizes, as in score; a "
                "benchmark's are tokenized by LM-Polygraph: leave the setting out"
            )

    @staticmethod
    def meta_info() -> tuple[list[str], list[str]]:
        return masked_head_stats(), ["greedy_tokens"]

    def __call__(
        self,
        dependencies: Mapping[str, Any],
        texts: list[str],
        model: Model,
        max_new_tokens: int = 100,
    ) -> dict[str, list[Any]]:
        """Statistics of a batch, with one entry per example.

        Raises:
            TypeError: the heads of the model cannot be masked.
            ValueError: a response is empty or beyond the context window.
            FloatingPointError: NaN or infinite logits.
        """
        transformer = causal_model(model)
        stop_conditions = StopConditions.of(model)
        caches = dependencies.get(MEMORY) or [None] * len(texts)
        examples = []
        for row, (text, tokens) in enumerate(
            zip(texts, require(dependencies, "greedy_tokens"), strict=True)
        ):
            prompt = prompt_ids(model, text, row, dependencies)
            response = stop_conditions.response(tokens, len(texts))
            example = self.engine.score(transformer, prompt, response, caches[row])
            example["asmi_closing"] = stop_conditions.closes(response)
            example["asmi_token_texts"] = _token_texts(model.tokenizer, example)
            examples.append(example)
        return {name: [example[name] for example in examples] for name in examples[0]}


def _token_texts(tokenizer: Any, example: Mapping[str, Any]) -> dict[int, str]:
    """Texts of the token ids in the statistics, for readers of saved files."""
    named = ("asmi_tokens", "asmi_top_token", "asmi_candidates")
    ids = {
        token
        for name, values in example.items()
        if name.startswith(named) and not name.startswith("asmi_candidate_")
        for token in np.unique(values).tolist()
    }
    return {token: tokenizer.decode([token]) for token in sorted(ids)}


def load_stat_calculator(config: Mapping[str, Any], environment: Any) -> MaskedHeadsCalculator:
    """Builder named in a config's `stat_calculators` entry; checks the model at once."""
    calculator = MaskedHeadsCalculator(**config)
    model = causal_model(environment.model)
    check_greedy(environment.model)
    calculator.engine.check_model(model)
    return calculator
