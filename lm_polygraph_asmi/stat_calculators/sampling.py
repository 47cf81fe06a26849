"""LM-Polygraph's sampled answers, with a seed per question and a number that can be set."""

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
from lm_polygraph_asmi.model import attention_of, model_state, structure_of
from lm_polygraph_asmi.results.cache import ModelKeys, ResultCache, tokenizer_key


class SeededSamplingCalculator(SamplingGenerationCalculator):
    """Draws the answers of every question from a generator of its own.

    The host draws them all from one stream, so that they depend on what ran before: on the rows in
    front, on the shard, on the list of estimators. Here they follow from the prompt and `seed`
    alone. Rows of a batch are drawn one by one, so no padding gets into them, and a prompt is run
    once for all its answers. Of the statistics, `sample_embeddings` differs from the host's for
    one-token answers: it is the state of the prompt's last token, where the host takes a mean over
    the prompt.

    Args:
        samples_n: answers per question.
        seed: base seed.
        result_cache: folder in which the answers are kept (`result_cache.ResultCache`); None keeps
            nothing.
    """

    def __init__(
        self,
        samples_n: int = ASMIConfig.num_samples,
        seed: int = ASMIConfig.seed,
        result_cache: str | None = None,
    ) -> None:
        super().__init__(samples_n)
        self.seed, self.result_cache = seed, ResultCache(result_cache)
        self._keys = ModelKeys()

    def __call__(
        self,
        dependencies: Mapping[str, Any],
        texts: list[str],
        model: Model,
        max_new_tokens: int = 100,
    ) -> dict[str, list[Any]]:
        """The host's statistics, and `seconds_samples`."""
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
                behind = _BehindPrompt(model, torch.tensor([prompt], device=model.device()))
                drawn = super().__call__({}, [text], behind, max_new_tokens)
            row = {name: values[0] for name, values in drawn.items()}
            row["seconds_samples"] = time.perf_counter() - start
            self.result_cache.put(key, row)
        return row

    def _identify(self, model: Model) -> dict[str, Any]:
        """All that governs generation but the prompt."""
        transformer = causal_model(model)
        return {
            **self._keys.of(transformer, model_state(transformer)),
            **tokenizer_key(model.tokenizer),
            "attention": attention_of(transformer),
            "generation": vars(model.generation_parameters),
            # What the run does not set comes from here, end tokens among it.
            "model_generation": transformer.generation_config.to_json_string(),
        }


class _BehindPrompt:
    """A LM-Polygraph model that generates behind one prompt, whose keys and values it keeps."""

    def __init__(self, model: Model, prompt: Int[Tensor, "1 P"]) -> None:
        self._model = model
        found = structure_of(causal_model(model))
        # Layers without keys and values keep a state of their own: there the prompt runs again.
        self._cache = DynamicCache() if len(found.sites) == found.num_layers else None
        if self._cache is not None and prompt.shape[1] > 1:  # generation itself runs the last token
            with torch.no_grad():
                model.model(prompt[:, :-1], past_key_values=self._cache, logits_to_keep=1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, **arguments: Any) -> Any:
        if self._cache is None:
            return self._model.generate(**arguments)
        return self._model.generate(past_key_values=deepcopy(self._cache), **arguments)


def load_stat_calculator(config: Mapping[str, Any], _: Any) -> SeededSamplingCalculator:
    """Builder named in a config's `stat_calculators` entry."""
    return SeededSamplingCalculator(**config)
