"""Generate answers: one greedy, or several sampled."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteriaList,
)

from lm_polygraph_asmi.core.maths.masks import example_seed
from lm_polygraph_asmi.core.model import scoring_session
from lm_polygraph_asmi.core.model.devices import execution_device
from lm_polygraph_asmi.core.model.structure import context_window
from lm_polygraph_asmi.host.stopping import StopConditions

TEMPERATURE = 0.5
"""Of sampled answers, the paper's."""


@dataclass
class Generation:
    """Generates answers, each including the tokens that end it."""

    model: PreTrainedModel
    stop_conditions: StopConditions

    def greedy(self, prompt_ids: Int[Tensor, " P"], max_new_tokens: int) -> list[int]:
        """The greedy answer."""
        return self._generate(prompt_ids, max_new_tokens, do_sample=False)[0]

    def sampled(
        self, prompt_ids: Int[Tensor, " P"], max_new_tokens: int, count: int, seed: int
    ) -> list[list[int]]:
        """`count` answers at temperature 0.5; they depend only on prompt and seed."""
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            torch.manual_seed(example_seed(seed, prompt_ids.tolist()))
            sampling = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 50, "top_p": 1.0}
            return self._generate(
                prompt_ids, max_new_tokens, num_return_sequences=count, **sampling
            )

    def _generate(
        self, prompt_ids: Int[Tensor, " P"], max_new_tokens: int, **options: Any
    ) -> list[list[int]]:
        """Answers of the model, each including the tokens that ended it."""
        length, window = len(prompt_ids), context_window(self.model.config)
        if window is not None and window <= length:
            raise ValueError(
                f"expected a prompt shorter than the model's context window {window}, got {length} "
                "tokens"
            )
        ends = sorted(self.stop_conditions.end_ids)
        # All generation settings are set here; a model's own config may sample.
        config = GenerationConfig(
            max_new_tokens=max_new_tokens
            if window is None
            else min(max_new_tokens, window - length),
            num_beams=1,
            repetition_penalty=1.0,
            eos_token_id=ends or None,
            # Left out again; a tokenizer's own may be no token of the model's.
            pad_token_id=(ends or [0])[0],
            **options,
        )

        # By `StopConditions`: transformers' criterion also counts a stop string that begins in the
        # prompt.
        def ended(ids: Tensor, _: Any, **__: Any) -> Tensor:
            rows = ids[:, length:].tolist()  # several if answers are sampled
            return torch.tensor(list(map(self.stop_conditions.closes, rows)), device=ids.device)

        # Transformers fills unset values from the model's own settings, which stay as they are for
        # other threads: the copy shares all modules.
        model: Any = copy.copy(self.model)
        model.generation_config = config
        ids = prompt_ids[None].to(execution_device(self.model.get_input_embeddings()))
        with scoring_session(self.model):
            sequences = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([ended]),
            )
        rows = sequences[:, length:].tolist()
        return [self.stop_conditions.response(row, batch_size=2) for row in rows]
