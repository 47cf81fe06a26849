"""Score the tokens of a `generate` call."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from lm_polygraph_asmi.scoring.scorer import Scorer, Stream
from lm_polygraph_asmi.scoring.text import Request
from lm_polygraph_asmi.scoring.tokens import Token


class Streamer(BaseStreamer):
    """Score the tokens of a `generate` call: `model.generate(..., streamer=this)`.

    One prompt per call, greedy or sampled. Each token costs one model step more than `stream`. The
    call decides stop strings, end tokens and length.

    Args:
        scorer: with the model that generates.
        shown: called with each new `Token`.

    Raises:
        ValueError: `put` got several prompts; else as `stream`.

    Example:
        >>> words = []
        >>> streamer = Streamer(scorer, shown=lambda token: words.append(token.text))
        >>> ids = scorer.tokenizer(prompt, return_tensors="pt").input_ids
        >>> _ = scorer.model.generate(ids, max_new_tokens=3, do_sample=False, streamer=streamer)
        >>> "".join(words) == streamer.stream.result.scored_text
        True
    """

    def __init__(self, scorer: Scorer, shown: Callable[[Token], None]) -> None:
        self.scorer, self.shown = scorer, shown
        self.stream: Stream | None = None

    def put(self, value: Tensor) -> None:
        """Take the prompt's token ids, (P,) or (1, P), then one token per call."""
        ids = value.reshape(-1).tolist()
        if self.stream is None:
            if value.ndim > 1 and len(value) > 1:
                raise ValueError(f"expected one prompt, got a batch of {len(value)}")
            prompt = str(self.scorer.tokenizer.decode(ids))
            self.stream = Stream(self.scorer, Request(prompt), torch.tensor(ids))
            return
        for token in ids:
            self.shown(self.stream._next_token(token))

    def end(self) -> None:
        """Finish the answer; `stream.result` is its score."""
        if self.stream is not None:
            self.stream.close()
