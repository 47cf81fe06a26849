"""Generate answers: one greedy answer, or several sampled ones."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteriaList,
)

from lm_polygraph_asmi.core.model import scoring_session
from lm_polygraph_asmi.core.model.devices import execution_device
from lm_polygraph_asmi.core.model.structure import context_window
from lm_polygraph_asmi.host.samples import draw, seeds_of
from lm_polygraph_asmi.host.stopping import StopConditions

TEMPERATURE = 0.5  # temperature of sampled answers, as in the paper
SAMPLING = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 50, "top_p": 1.0}
"""Settings of sampled answers, as in LM-Polygraph except for the temperature."""
SHORTEST = 2  # least number of tokens of a sampled answer, as in LM-Polygraph


@dataclass
class Generation:
    """Generates answers. Each includes the tokens that end it."""

    model: PreTrainedModel
    stop_conditions: StopConditions

    def greedy(self, prompt_ids: Int[Tensor, " P"], max_new_tokens: int) -> list[int]:
        """The greedy answer."""
        ids, generate = self._prepared(prompt_ids, max_new_tokens, 0, do_sample=False)
        with scoring_session(self.model):
            sequences = generate(input_ids=ids, attention_mask=torch.ones_like(ids))
        return self._answer(sequences[0, len(prompt_ids) :])

    def sampled(
        self, prompt_ids: Int[Tensor, " P"], max_new_tokens: int, count: int, seed: int
    ) -> list[list[int]]:
        """`count` sampled answers, the same as in a run with this seed and `TEMPERATURE`."""
        ids, generate = self._prepared(prompt_ids, max_new_tokens, SHORTEST, **SAMPLING)
        seeds = seeds_of(prompt_ids.tolist(), seed, count)
        with scoring_session(self.model):
            rows = draw(generate, self.model, ids, seeds, lambda row: row.sequence)
        return [self._answer(row[len(prompt_ids) :]) for row in rows]

    def _answer(self, ids: Int[Tensor, " T"]) -> list[int]:
        """The answer among the tokens `ids` generated after a prompt."""
        return self.stop_conditions.response(ids.tolist(), batch_size=2)

    def _prepared(
        self, prompt_ids: Int[Tensor, " P"], most: int, least: int, **options: Any
    ) -> tuple[Int[Tensor, "1 P"], Callable[..., Any]]:
        """The prompt on the model's device, and transformers' `generate` with all its settings.

        An answer has at least `least` and at most `most` tokens. Raises ValueError: the prompt
        fills the context window.
        """
        length, window = len(prompt_ids), context_window(self.model.config)
        if window is not None and window <= length:
            raise ValueError(
                f"expected a prompt shorter than the model's context window of {window} tokens, "
                f"got {length} tokens: shorten the prompt"
            )
        ends = sorted(self.stop_conditions.end_ids)
        most = most if window is None else min(most, window - length)
        # Set every generation setting here, since the model's own config may sample.
        config = GenerationConfig(
            max_new_tokens=most,
            min_new_tokens=min(least, most),
            num_beams=1,
            repetition_penalty=1.0,
            eos_token_id=ends or None,
            # Padding is removed later. The tokenizer's own pad token may be unknown to the model.
            pad_token_id=(ends or [0])[0],
            **options,
        )

        # The criterion of transformers would also stop at a stop string that begins in the prompt.
        def ended(ids: Tensor, _: Any, **__: Any) -> Tensor:
            rows = ids[:, length:].tolist()  # several if answers are sampled
            return torch.tensor(list(map(self.stop_conditions.closes, rows)), device=ids.device)

        # Transformers fills unset values from `model.generation_config`. Replace it in a copy,
        # which shares all modules, so that other threads do not see the change.
        model: Any = copy.copy(self.model)
        model.generation_config = config
        stops = StoppingCriteriaList([ended])
        generate = partial(model.generate, generation_config=config, stopping_criteria=stops)
        return prompt_ids[None].to(execution_device(model.get_input_embeddings())), generate
