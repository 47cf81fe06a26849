"""The calculator of all ASMI estimators, which runs the engine inside LM-Polygraph."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lm_polygraph.stat_calculators import StatCalculator
from lm_polygraph.utils.model import Model

from lm_polygraph_asmi.config import ASMIConfig, depth_key
from lm_polygraph_asmi.core.engine import Engine
from lm_polygraph_asmi.core.model import unembedding
from lm_polygraph_asmi.core.statistics import AnswerStatistics
from lm_polygraph_asmi.estimators.base import require
from lm_polygraph_asmi.host.model import check_greedy, maskable_model, prompt_ids
from lm_polygraph_asmi.host.releases import warn_of_untested
from lm_polygraph_asmi.host.special_tokens import SpecialTokens
from lm_polygraph_asmi.host.stopping import StopConditions
from lm_polygraph_asmi.inputs import Prompt, texts_of
from lm_polygraph_asmi.results.cache import ResultCache
from lm_polygraph_asmi.results.names import MASKED_HEADS

log = logging.getLogger("lm_polygraph")


class MaskedHeadsCalculator(StatCalculator):
    """Scores the greedy response under S head masks at one layer per depth.

    It returns the statistics of `lm_polygraph_asmi.results.names`, and needs only LM-Polygraph's
    `greedy_tokens`.

    Args:
        config, details, **settings: see `core.engine.Engine`.
        result_cache: folder of a `results.cache.ResultCache`; None: nothing is stored.
        depths: relative depths of the masked layers, each in (0, 1); None: the config's depth.

    Raises:
        TypeError: a setting is unknown.
        ValueError: a setting is invalid.
    """

    def __init__(
        self,
        config: ASMIConfig | None = None,
        *,
        depths: Sequence[float] | float | None = None,
        details: bool = False,
        result_cache: str | Path | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        config = (config or ASMIConfig()).replace(**settings)
        self._special: SpecialTokens | None = None
        self._warned = False
        self.depths = [each.depth for each in config.at_depths(depths)]
        store = None if result_cache is None else ResultCache(result_cache)
        self.engine = Engine(config, details=details, store=store)
        warn_of_untested()

    @staticmethod
    def meta_info() -> tuple[list[str], list[str]]:
        return list(MASKED_HEADS), ["greedy_tokens"]

    def __call__(
        self,
        dependencies: Mapping[str, Any],
        texts: list[str],
        model: Model,
        max_new_tokens: int = 100,
    ) -> dict[str, list[Any]]:
        """Statistics of a batch, with one entry per example.

        Raises:
            TypeError: the model's heads cannot be masked.
            ValueError: a response is empty or exceeds the context window.
            FloatingPointError: logits do not give a distribution, as in `readout`.
        """
        self._name_control_tokens(texts, model)
        transformer = maskable_model(model, self.engine.config.structure)
        stop_conditions = StopConditions.of(model)
        examples = []
        for row, (text, tokens) in enumerate(
            zip(texts, require(dependencies, "greedy_tokens"), strict=True)
        ):
            prompt = prompt_ids(model, text, dependencies, row)
            response = list(map(int, stop_conditions.response(tokens, len(texts))))
            example = by_name(self.engine.score(transformer, prompt, response, depths=self.depths))
            example["asmi_closing"] = stop_conditions.closes(response)
            example["asmi_token_texts"] = _token_texts(model.tokenizer, example)
            examples.append(example)
        return {name: [example[name] for example in examples] for name in examples[0]}

    def _name_control_tokens(self, prompts: Sequence[Prompt], model: Model) -> None:
        """Log one warning, for the first prompt in which a special token is spelled out."""
        special = self._special = self._special or SpecialTokens(model.tokenizer)
        texts = (text for prompt in prompts for _, text in texts_of(prompt))
        spelled = None if self._warned else next(filter(special.spelled, texts), None)
        if spelled is not None:
            self._warned = True
            token, start = special.spelled(spelled)[0]
            log.warning(
                "A prompt has %r at character %d, which the tokenizer reads as a control token: "
                "%r. Later prompts are not reported. If it is meant as text, change the data; if "
                "it belongs to a chat, pass the messages' texts, with instruct=true.",
                token,
                start,
                spelled[max(0, start - 20) : start + 20],
            )


def by_name(depths: Sequence[AnswerStatistics]) -> dict[str, Any]:
    """Statistics of an answer at each depth, by their names in a saved run (`results.names`).

    `asmi_closing` and `asmi_token_texts` are not included, since they need a tokenizer.
    """
    first = depths[0]
    return {
        "asmi": {depth_key(each.settings.config.depth): each.masked() for each in depths},
        "asmi_entropy": first.entropy,
        "asmi_log_likelihood": first.log_likelihood,
        "asmi_tokens": first.tokens,
        "asmi_prompt_length": first.prompt_length,
        "asmi_seconds": first.unmasked_seconds + sum(each.masked_seconds for each in depths),
        "asmi_reused_depths": sum(each.reused for each in depths),
    }


def _token_texts(tokenizer: Any, example: Mapping[str, Any]) -> dict[int, str]:
    """Texts of all token ids in the statistics, so that saved files can be read."""
    named = [example["asmi_tokens"]]
    for masked in example["asmi"].values():
        named += [masked[name] for name in ("top_token", "candidates") if name in masked]
    ids = np.unique(np.concatenate([np.ravel(values) for values in named])).tolist()
    return {token: tokenizer.decode([token]) for token in ids}


def load_stat_calculator(config: Mapping[str, Any], environment: Any) -> MaskedHeadsCalculator:
    """Builder named in a config's `stat_calculators` entry. It checks the model at once."""
    calculator = MaskedHeadsCalculator(**config)
    model = maskable_model(environment.model, calculator.engine.config.structure)
    check_greedy(environment.model)
    with calculator.engine.session(model) as f:  # raises if the model lacks the attention
        unembedding(f)
        for depth in calculator.depths:
            log.info("ASMI uses %s", calculator.engine.settings(model, depth).to_dict())
    return calculator
