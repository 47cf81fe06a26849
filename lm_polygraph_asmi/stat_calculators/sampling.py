"""LM-Polygraph's sampled answers, with a seed per question and a number that can be set."""

import time
from collections.abc import Mapping
from typing import Any

import torch
from lm_polygraph.stat_calculators import SamplingGenerationCalculator
from lm_polygraph.utils.model import Model

from lm_polygraph_asmi.journal import Journal, environment_key, model_key
from lm_polygraph_asmi.maths import example_seed
from lm_polygraph_asmi.model import attention_of
from lm_polygraph_asmi.stat_calculators.host import causal_model


class SeededSamplingCalculator(SamplingGenerationCalculator):
    """Draws the answers of every question from a generator of its own.

    The host draws them all from one stream, so that they depend on what ran before: on the rows in
    front, on the shard, on the list of estimators. Here they follow from the prompt and `seed`
    alone. Rows of a batch are drawn one by one, so no padding gets into them.

    Args:
        samples_n: answers per question.
        seed: base seed.
        journal: folder in which the answers are kept (`journal.Journal`); None keeps nothing.
    """

    def __init__(self, samples_n: int = 10, seed: int = 0, journal: str | None = None) -> None:
        super().__init__(samples_n)
        self.seed, self.journal = seed, Journal(journal)
        self._model_key: dict[str, str] | None = None

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
        if self._model_key is None:
            self._model_key = environment_key() | model_key(causal_model(model))
        prompt = model.tokenize([text])["input_ids"][0].tolist()
        key = self._model_key | {
            "prompt": prompt,
            "samples": self.samples_n,
            "seed": self.seed,
            "max_new_tokens": max_new_tokens,
            "generation": vars(model.generation_parameters),
            "attention": attention_of(model.model),
        }
        row = self.journal.get(key)
        if row is None:
            start = time.perf_counter()
            devices = range(torch.cuda.device_count())
            with torch.random.fork_rng(devices):
                torch.manual_seed(example_seed(self.seed, prompt))
                drawn = super().__call__({}, [text], model, max_new_tokens)
            row = {name: values[0] for name, values in drawn.items()}
            row["seconds_samples"] = time.perf_counter() - start
            self.journal.put(key, row)
        return row


def load_stat_calculator(config: Mapping[str, Any], _: Any) -> SeededSamplingCalculator:
    """Builder named in a config's `stat_calculators` entry."""
    return SeededSamplingCalculator(**config)
