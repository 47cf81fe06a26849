"""LM-Polygraph's sampled answers, with a seed for each question and any number of samples."""

import time
from collections.abc import Mapping
from typing import Any

import torch
from lm_polygraph.stat_calculators import SamplingGenerationCalculator
from lm_polygraph.utils.model import Model

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.core.identity import model_key
from lm_polygraph_asmi.core.model import attention_of, plain_model
from lm_polygraph_asmi.host.model import prompt_ids
from lm_polygraph_asmi.host.samples import DrawnAtOnce, seeds_of
from lm_polygraph_asmi.results.cache import ResultCache


class SeededSamplingCalculator(SamplingGenerationCalculator):
    """Draws all samples of a question in one batch, each with its own random generator.

    A sample depends only on the prompt, `seed`, and its number. LM-Polygraph draws samples one by
    one from a single stream, so they depend on earlier rows, the shard and the list of estimators.
    Questions are not batched, so nothing is padded, and a prompt is run once for all its samples.
    Encoder-decoders draw one by one, from a stream of the prompt's own.

    Args:
        samples_n: number of answers per question.
        seed: base seed.
        result_cache: folder of the cached answers (`results.cache.ResultCache`); None: no cache.
    """

    def __init__(
        self,
        samples_n: int = ASMIConfig.num_samples,
        seed: int = ASMIConfig.seed,
        result_cache: str | None = None,
    ) -> None:
        super().__init__(samples_n)
        self.seed, self.result_cache = seed, ResultCache(result_cache)

    def __call__(
        self,
        dependencies: Mapping[str, Any],
        texts: list[str],
        model: Model,
        max_new_tokens: int = 100,
    ) -> dict[str, list[Any]]:
        """LM-Polygraph's statistics of sampled answers, and `seconds_samples`."""
        rows = [self._row(text, model, max_new_tokens) for text in texts]
        return {name: [row[name] for row in rows] for name in rows[0]}

    def _row(self, text: str, model: Model, max_new_tokens: int) -> dict[str, Any]:
        prompt = prompt_ids(model, text).tolist()
        key = (self._identify(model) if self.result_cache.folder else {}) | {
            "text": text,
            "prompt": prompt,
            "samples": self.samples_n,
            "drawn": "in one batch",
            "seed": self.seed,
            "max_new_tokens": max_new_tokens,
        }
        row = self.result_cache.get(key)
        if row is None:
            start = time.perf_counter()
            seeds = seeds_of(prompt, self.seed, self.samples_n)
            if model.model_type == "CausalLM":
                model = DrawnAtOnce(model, plain_model(model.model), seeds)
            with torch.random.fork_rng(range(torch.cuda.device_count())):
                torch.manual_seed(seeds[0])
                drawn = super().__call__({}, [text], model, max_new_tokens)
            row = {name: values[0] for name, values in drawn.items()}
            row["seconds_samples"] = time.perf_counter() - start
            self.result_cache.put(key, row)
        return row

    def _identify(self, model: Model) -> dict[str, Any]:
        """Everything that determines generation, except for the prompt.

        The tokenizer is not included, since the prompt's text and token ids depend on it.
        """
        transformer = plain_model(model.model)
        return {
            **model_key(transformer),
            "end": model.tokenizer.eos_token_id,
            "attention": attention_of(transformer),
            "generation": vars(model.generation_parameters),
            # Holds settings that the run does not set, such as end tokens.
            "model_generation": transformer.generation_config.to_json_string(),
        }


def load_stat_calculator(config: Mapping[str, Any], _: Any) -> SeededSamplingCalculator:
    """Builder named in a config's `stat_calculators` entry."""
    return SeededSamplingCalculator(**config)
