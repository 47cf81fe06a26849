"""Draw all samples of a prompt in one generation, each with a random generator of its own.

Both runs and single scores draw their samples here, so that they get the same ones.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

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

from lm_polygraph_asmi.core.maths.masks import example_seed
from lm_polygraph_asmi.core.model.layers import with_cache
from lm_polygraph_asmi.core.model.memory import in_chunks
from lm_polygraph_asmi.core.model.structure import row_of

Result = TypeVar("Result")


class Row(NamedTuple):
    """One sample in the output of a generation."""

    out: Any  # what `generate` returned for the batch
    number: int  # number of the row in the batch
    sequence: Int[Tensor, " N"]  # token ids of prompt and sample, on the CPU
    length: int  # number of the sample's tokens, with the one that ends it
    # States of all prompt tokens but the last, (1, P - 1, D). None: not kept, or part of `out`.
    prompt_states: Tensor | None


def seeds_of(prompt: Sequence[int], seed: int, count: int) -> list[int]:
    """One seed per sample, computed from the prompt's token ids and the sample's number."""
    return [example_seed(seed, [*prompt, number]) for number in range(count)]


def draw(
    generate: Callable[..., Any],
    model: PreTrainedModel,
    prompt: Int[Tensor, "1 P"],
    seeds: list[int],
    read: Callable[[Row], Result],
    states_at: int | None = None,
) -> list[Result]:
    """Draw one sample of the prompt for each seed. A sample does not depend on the others.

    If the model's class has not been tested, samples are drawn one by one, and the prompt is run
    for each. Some classes give other answers in a batch, or if a part of the prompt is cached.

    Args:
        generate: transformers' `generate` of the model, with the settings of sampling.
        model: the transformers model.
        read: returns what is kept of each sample.
        states_at: index of those hidden states of the prompt that `read` needs; None: none.
    """
    tested = (row_of(model) or {}).get("heads") == "by name"
    cache, before = _run_prompt(model, prompt, states_at) if tested else (None, None)

    def draw_some(some: list[int]) -> list[Result]:
        rows = prompt.expand(len(some), -1)
        batch = {"input_ids": rows, "attention_mask": torch.ones_like(rows)}
        if cache is not None:
            repeated = deepcopy(cache)
            repeated.batch_repeat_interleave(len(some))
            batch |= with_cache(model, repeated)
        loop = _OwnStreams(some, prompt.device)
        out = generate(**batch, custom_generate=loop.sample, return_dict_in_generate=True)
        sequences, start = out.sequences.cpu(), prompt.shape[1]
        return [
            read(Row(out, number, sequences[number, : start + length], length, before))
            for number, length in enumerate(loop.lengths)
        ]

    return [*chain.from_iterable(in_chunks(draw_some, seeds, len(seeds) if tested else 1))]


def _run_prompt(
    model: PreTrainedModel, prompt: Int[Tensor, "1 P"], states_at: int | None
) -> tuple[DynamicCache | None, Tensor | None]:
    """Run all of the prompt's tokens but the last, which generation runs.

    Returns the cache of keys and values, and the hidden states with index `states_at` (older
    releases of transformers keep all hidden states during the pass). Both are None if the model
    caches anything else or nothing, or if the prompt is one token; then each generation runs the
    whole prompt.
    """
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    # These classes of layers hold only keys and values.
    plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
    if not plain or prompt.shape[1] == 1:
        return None, None
    kept = [] if states_at is None else [states_at]
    given = {"logits_to_keep": 1, "output_hidden_states": kept or False}
    with torch.no_grad():
        out = model(prompt[:, :-1], **with_cache(model, cache), **given)
    if cache.get_seq_length() == 0:  # the model does not use the cache
        return None, None
    return cache, None if states_at is None else out.hidden_states[states_at]


class DrawnAtOnce:
    """A model of LM-Polygraph, around `inner`, that draws all samples of a prompt at once.

    The first call of `generate` draws them, and each call returns one. So LM-Polygraph itself
    computes the statistics of each sample, as if it were drawn alone.
    """

    def __init__(self, model: Any, inner: PreTrainedModel, seeds: list[int]) -> None:
        self._model, self._inner, self._seeds = model, inner, seeds
        self._drawn: Iterator[SimpleNamespace] | None = None
        # The only layer whose states LM-Polygraph reads.
        self._middle = inner.config.get_text_config().num_hidden_layers // 2

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, input_ids: Int[Tensor, "1 P"], **arguments: Any) -> SimpleNamespace:
        if self._drawn is None:
            generate = partial(self._model.generate, **arguments)
            self._drawn = iter(
                draw(generate, self._inner, input_ids, self._seeds, self._output_of, self._middle)
            )
        return next(self._drawn)

    def _output_of(self, row: "Row") -> SimpleNamespace:
        """What generation would have returned for this row alone, on the CPU."""
        out, alone, middle = row.out, slice(row.number, row.number + 1), self._middle
        steps = [step[middle][alone].cpu() for step in out.hidden_states[: row.length]]
        if row.prompt_states is not None:
            steps[0] = torch.cat([row.prompt_states.cpu(), steps[0]], dim=1)
        return SimpleNamespace(
            sequences=row.sequence[None],
            scores=[step[alone].cpu() for step in out.scores[: row.length]],
            hidden_states=[{middle: step} for step in steps],
        )


class _OwnStreams:
    """Draws the tokens of each row with its own generator, and records where each row ends."""

    def __init__(self, seeds: list[int], device: torch.device) -> None:
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self.lengths: list[int] = []
        """Number of tokens of each row, with the one that ends it."""

    def sample(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        **arguments: Any,
    ) -> Any:
        """Sample as transformers does, which passes its own processors and criteria."""
        generation_config.do_sample = False  # `_choose` leaves one token, so the greedy one is it
        processors = LogitsProcessorList([*logits_processor, self._choose])
        out = model._sample(
            input_ids, processors, stopping_criteria, generation_config, **arguments
        )
        ends = range(input_ids.shape[1] + 1, out.sequences.shape[1] + 1)
        ended = [stopping_criteria(out.sequences[:, :end], None) for end in ends]
        self.lengths = (torch.stack(ended).int().argmax(0) + 1).tolist()  # first end in each row
        return out

    def _choose(self, _: Tensor, scores: Tensor) -> Tensor:
        rows = zip(scores.softmax(-1), self._generators, strict=True)
        drawn = [torch.multinomial(row, 1, generator=generator) for row, generator in rows]
        return torch.full_like(scores, -torch.inf).scatter(1, torch.stack(drawn), 0.0)
