"""LM-Polygraph's sampled answers, with a seed per question and a configurable number."""

import time
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from jaxtyping import Int
from lm_polygraph.stat_calculators import SamplingGenerationCalculator
from lm_polygraph.utils.model import Model
from torch import Tensor
from transformers import DynamicCache

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.host.model import causal_model
from lm_polygraph_asmi.maths import example_seed
from lm_polygraph_asmi.model import attention_of, structure_of
from lm_polygraph_asmi.model.forwards import with_cache
from lm_polygraph_asmi.results.cache import ResultCache, model_key, tokenizer_key


class SeededSamplingCalculator(SamplingGenerationCalculator):
    """Samples the answers of each question with a random generator of its own.

    They depend only on the prompt and `seed`. LM-Polygraph samples all from one stream, so that its
    answers depend on earlier rows, the shard and the list of estimators. Rows of a batch are
    sampled one by one, without padding; a prompt is run once for all its answers. For one-token
    answers `sample_embeddings` is the state of the prompt's last token; LM-Polygraph takes a mean
    over the prompt.

    Args:
        samples_n: answers per question.
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
        """LM-Polygraph's statistics, and `seconds_samples`."""
        rows = [self._row(text, model, max_new_tokens) for text in texts]
        return {name: [row[name] for row in rows] for name in rows[0]}

    def _row(self, text: str, model: Model, max_new_tokens: int) -> dict[str, Any]:
        prompt = model.tokenize([text])["input_ids"][0].tolist()
        key = (self._identify(model) if self.result_cache.kept else {}) | {
            "prompt": prompt,
            "samples": self.samples_n,
            "seed": self.seed,
            "max_new_tokens": max_new_tokens,
        }
        row = self.result_cache.get(key)
        if row is None:
            start = time.perf_counter()
            devices = range(torch.cuda.device_count())
            with torch.random.fork_rng(devices):
                torch.manual_seed(example_seed(self.seed, prompt))
                cached = _PromptCached(model, torch.tensor([prompt], device=model.device()))
                drawn = super().__call__({}, [text], cached, max_new_tokens)
            row = {name: values[0] for name, values in drawn.items()}
            row["seconds_samples"] = time.perf_counter() - start
            self.result_cache.put(key, row)
        return row

    def _identify(self, model: Model) -> dict[str, Any]:
        """Everything that determines generation, except the prompt."""
        transformer = causal_model(model)
        return {
            **model_key(transformer),
            **tokenizer_key(model.tokenizer),
            "attention": attention_of(transformer),
            "generation": vars(model.generation_parameters),
            # Supplies what the run does not set, such as end tokens.
            "model_generation": transformer.generation_config.to_json_string(),
        }


class _PromptCached:
    """A LM-Polygraph model that generates after one prompt and caches its keys and values."""

    def __init__(self, model: Model, prompt: Int[Tensor, "1 P"]) -> None:
        self._model = model
        structure = structure_of(causal_model(model))
        # Layers without keys and values have another state: then the prompt is run again.
        self._cache = DynamicCache() if len(structure.heads) == structure.num_layers else None
        if self._cache is not None and prompt.shape[1] > 1:  # generation runs the last token
            with torch.no_grad():
                inner = causal_model(model)
                inner(prompt[:, :-1], **with_cache(inner, self._cache), logits_to_keep=1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, **arguments: Any) -> Any:
        if self._cache is None:
            return self._model.generate(**arguments)
        return self._model.generate(
            **with_cache(causal_model(self._model), deepcopy(self._cache)), **arguments
        )


def load_stat_calculator(config: Mapping[str, Any], _: Any) -> SeededSamplingCalculator:
    """Builder named in a config's `stat_calculators` entry."""
    return SeededSamplingCalculator(**config)
