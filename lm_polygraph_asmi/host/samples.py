"""All samples of a prompt in one generation, each with a random generator of its own."""

from collections.abc import Iterator
from copy import deepcopy
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from lm_polygraph_asmi.core.model.forwards import with_cache
from lm_polygraph_asmi.core.model.memory import in_chunks
from lm_polygraph_asmi.core.model.structure import row_of

_KEYS_AND_VALUES = (DynamicLayer, DynamicSlidingWindowLayer)
"""Kinds of cached layers that hold nothing else."""


class DrawnAtOnce:
    """A model of LM-Polygraph, around `inner`, that draws all samples of a prompt at its first call
    of `generate` and returns one per call.

    The statistics of each are then LM-Polygraph's own, as those of a sample drawn by itself. A
    model whose class has not been tested draws them one by one, and reads the prompt for each: some
    answer otherwise in a batch, or after a part of the prompt.
    """

    def __init__(self, model: Any, inner: PreTrainedModel, seeds: list[int]) -> None:
        self._model, self._inner, self._seeds = model, inner, seeds
        self._drawn: Iterator[SimpleNamespace] | None = None
        config: Any = model.model.config
        # The only layer whose states LM-Polygraph reads.
        self._middle = getattr(config, "text_config", config).num_hidden_layers // 2

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, **arguments: Any) -> SimpleNamespace:
        if self._drawn is None:
            self._drawn = self._draw(**arguments)
        return next(self._drawn)

    def _draw(self, input_ids: Int[Tensor, "1 P"], **arguments: Any) -> Iterator[SimpleNamespace]:
        tested = (row_of(self._inner) or {}).get("heads") == "by name"
        cache, states = self._run_prompt(input_ids) if tested else (None, [])

        def draw(seeds: list[int]) -> list[SimpleNamespace]:
            rows = input_ids.expand(len(seeds), -1)
            batch = {"input_ids": rows, "attention_mask": torch.ones_like(rows)}
            if cache is not None:
                own = deepcopy(cache)
                own.batch_repeat_interleave(len(seeds))
                batch |= with_cache(self._inner, own)
            loop = _OwnStreams(seeds, input_ids.device)
            out = self._model.generate(**arguments | batch, custom_generate=loop.sample)
            return [self._cut(out, row, length, states) for row, length in enumerate(loop.lengths)]

        return chain.from_iterable(in_chunks(draw, self._seeds, len(self._seeds) if tested else 1))

    def _run_prompt(self, prompt: Int[Tensor, "1 P"]) -> tuple[DynamicCache | None, list[Tensor]]:
        """Keys and values of all tokens but the last, which generation runs; their middle states.

        None if the model keeps anything else: then each generation runs the prompt.
        """
        cache = DynamicCache(config=self._inner.config.get_text_config(decoder=True))
        plain = all(type(layer) in _KEYS_AND_VALUES for layer in cache.layers)
        if not plain or prompt.shape[1] == 1:
            return None, []
        given = {"logits_to_keep": 1, "output_hidden_states": True}
        with torch.no_grad():
            out = self._inner(prompt[:, :-1], **with_cache(self._inner, cache), **given)
        if cache.get_seq_length() == 0:  # the model knows no cache
            return None, []
        return cache, [out.hidden_states[self._middle].cpu()]

    def _cut(self, out: Any, row: int, length: int, states: list[Tensor]) -> SimpleNamespace:
        """What generation returns for one row of a batch alone, off the device."""
        own = slice(row, row + 1)
        end = out.sequences.shape[1] - len(out.scores) + length
        steps = [step[self._middle][own].cpu() for step in out.hidden_states[:length]]
        steps[0] = torch.cat([*states, steps[0]], dim=1)  # of the whole prompt
        return SimpleNamespace(
            sequences=out.sequences[own, :end].cpu(),
            scores=[step[own].cpu() for step in out.scores[:length]],
            hidden_states=[{self._middle: step} for step in steps],
        )


class _OwnStreams:
    """Draws each row's tokens with a generator of its own, and notes where each row ends."""

    def __init__(self, seeds: list[int], device: torch.device) -> None:
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self.lengths: list[int] = []
        """Tokens of each row, with the one that ends it."""

    def sample(
        self, model: Any, input_ids: Tensor, logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList, generation_config: Any, **arguments: Any,
    ) -> Any:  # fmt: skip
        """transformers' sampling, which passes its own processors and criteria."""
        generation_config.do_sample = False  # takes the only token that `_choose` leaves
        processors = LogitsProcessorList([*logits_processor, self._choose])
        out = model._sample(
            input_ids, processors, stopping_criteria, generation_config, **arguments
        )
        ends = range(input_ids.shape[1] + 1, out.sequences.shape[1] + 1)
        ended = [stopping_criteria(out.sequences[:, :end], None) for end in ends]
        self.lengths = (torch.stack(ended).int().argmax(0) + 1).tolist()  # the first of each row
        return out

    def _choose(self, _: Tensor, scores: Tensor) -> Tensor:
        rows = zip(scores.softmax(-1), self._generators, strict=True)
        drawn = [torch.multinomial(row, 1, generator=generator) for row, generator in rows]
        return torch.full_like(scores, -torch.inf).scatter(1, torch.stack(drawn), 0.0)
