"""The answers of a finished run as token ids, to run its model on them again."""

from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lm_polygraph_asmi.model import UnmaskedPass, readout
from lm_polygraph_asmi.results.runs import Run
from lm_polygraph_asmi.scoring.text import prompt_tokens

SAME_MODEL, SAME_MODEL_16_BITS = 0.05, 0.2
"""Largest median difference of an answer's log-likelihoods from the saved ones, in nats.

Another device sums in another order. SmolLM2-135M-Instruct, 24 answers of the demo: in bfloat16,
SDPA in the place of eager attention moves the median of an answer by .01 nats, at most .06; other
rows in the batch by .06 at most, float32 weights by .05. In float32 all stay below .0001.
"""


class Answer(NamedTuple):
    """One answer, a row of a run: ids of prompt and response, and what the run saved.

    `log_likelihood` (T,) is of each response token, nats.
    """

    row: int
    input_ids: Int[Tensor, " N"]
    prompt_length: int
    log_likelihood: np.ndarray

    def check_model(self, model: PreTrainedModel, unmasked: UnmaskedPass) -> None:
        """Raise ValueError unless the model reproduces the answer's saved likelihood."""
        tokens = self.input_ids[self.prompt_length :]
        log_probs = readout(model, unmasked.final_hidden)
        recomputed = log_probs.gather(-1, tokens[:, None].to(log_probs.device))[:, 0].cpu().numpy()
        difference = float(np.median(np.abs(recomputed - self.log_likelihood)))
        most = SAME_MODEL if model.dtype.itemsize > 2 else SAME_MODEL_16_BITS
        if not difference <= most:
            raise ValueError(
                f"row {self.row} has another likelihood with this model than in the run (median "
                f"difference per token {difference:.2g} nats): load the run's model, with its dtype"
            )


def settings_of(run: Run, depth: float) -> dict[str, Any]:
    """Settings of ASMI at a depth of a run."""
    rows = run.at(depth)
    if not rows:
        depths = ", ".join(f"{used['depth']:g}" for used in run.settings()) or "none"
        raise ValueError(f"{run.path} has no ASMI score at depth {depth:g}; its depths: {depths}")
    return dict(rows[0]["settings"])


def answers_of(run: Run, tokenizer: PreTrainedTokenizerBase) -> list[Answer]:
    """All answers of a run; ValueError unless its prompts are as many tokens as in the run."""
    names = ("input_texts", "asmi_tokens", "asmi_prompt_length", "asmi_log_likelihood")
    if missing := run.lacks(names):
        raise ValueError(f"{run.path} lacks {', '.join(missing)}: expected a run of ASMI")
    chat = bool(run.recorded("config").get("instruct"))
    answers = []
    for row, (text, tokens, length, likelihood) in enumerate(
        zip(*(run.stats[name] for name in names), strict=True)
    ):
        prompt = prompt_tokens(tokenizer, [{"role": "user", "content": text}] if chat else text)
        if len(prompt) != length:
            raise ValueError(
                f"prompt {row} of {run.path} has {length} tokens in the run, {len(prompt)} with "
                "this tokenizer: load the run's model"
            )
        ids = torch.cat([prompt, torch.as_tensor(np.asarray(tokens), dtype=prompt.dtype)])
        answers.append(Answer(row, ids, int(length), np.asarray(likelihood, dtype=float)))
    return answers
