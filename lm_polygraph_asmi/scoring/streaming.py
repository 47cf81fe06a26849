"""Score an answer token by token while it is generated."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from lm_polygraph_asmi.model import scoring_session
from lm_polygraph_asmi.scoring.engine import AnswerInProgress
from lm_polygraph_asmi.scoring.generation import restored_config
from lm_polygraph_asmi.scoring.prepared import PreparedModel
from lm_polygraph_asmi.scoring.result import Score
from lm_polygraph_asmi.scoring.text import (
    UNFINISHED,
    Prompt,
    Query,
    parse_request,
    prompt_tokens,
    spans,
)
from lm_polygraph_asmi.scoring.tokens import Token, tokens_of


class Stream(Iterator[Token]):
    """Iterator over scored tokens of an answer being generated; see `lm_polygraph_asmi.stream`.

    Between two tokens the model is in its original state and free for other use. To stop, stop
    iterating; `close` or the end of a `with` block also frees the caches.

    Example:
        >>> tokens = scorer.stream(prompt)
        >>> isinstance(tokens, Stream)
        True
        >>> written = [token.text for token in tokens]
        >>> "".join(written) == tokens.text == tokens.result.scored_text
        True
    """

    def __init__(self, scorer: PreparedModel, prompt: Prompt, ids: Tensor | None = None) -> None:
        """`ids`: prompt of another `generate` call, which then decides length and end."""
        prompt, answer, notes = parse_request(
            prompt if ids is not None else scorer.as_messages(prompt)
        )
        if answer is not None:
            raise ValueError(
                "expected a chat that ends in the user's message, got the assistant's last: only "
                "the model's own answer can be streamed"
            )
        self.scorer, self._engine = scorer, scorer.stream_engine
        self._external = ids is not None
        ids = prompt_tokens(scorer.tokenizer, prompt) if ids is None else ids
        if not self._external:
            notes += scorer.notes_of(prompt, None)
        self._query = Query(prompt, None, notes, ids)
        self._length_limit = scorer.generation.length_limit(ids, scorer.config.max_new_tokens)
        self._gate: tuple[float, float | None, int] | None = None
        self._answer: AnswerInProgress | None = None
        self._closed = self._ended = False
        self._shown_end = 0

    def __iter__(self) -> "Stream":
        return self

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop generating and free the caches; `result` scores the tokens so far."""
        self._closed = True
        if self._answer is not None:
            self._answer.free()

    def __next__(self) -> Token:
        return self._next_token()

    def _next_token(self, token_id: int | None = None) -> Token:
        if self._closed or self._ended:
            self.close()
            raise StopIteration
        scorer, prompt_ids = self.scorer, self._query.prompt_ids
        try:
            with scoring_session(scorer.model, scorer.config.attention):
                if self._answer is None:
                    with restored_config(scorer.model):
                        self._gate = scorer.gate_of(self._query.prompt, prompt_ids, None)
                    self._answer = self._engine.start_stream(scorer.model, prompt_ids)
                stats = self._answer.step(token_id)
        except BaseException:
            self.close()
            raise
        assert self._gate is not None
        ids = self._answer.ids
        if not self._external:
            self._ended = len(ids) == self._length_limit or scorer.stop_conditions.closes(ids)
        text, _ = spans(scorer.tokenizer, prompt_ids.tolist(), ids)
        end = len(text)
        if not self._ended:  # the last character may be incomplete
            end = max(self._shown_end, len(text.rstrip(UNFINISHED)))
        span, self._shown_end = (self._shown_end, end), end
        gate = self._gate[0]
        (token,) = tokens_of(stats, text, [span], gate, scorer.tokenizer)
        return token

    @property
    def text(self) -> str:
        """The answer so far."""
        ids = [] if self._answer is None else self._answer.ids
        return spans(self.scorer.tokenizer, self._query.prompt_ids.tolist(), ids)[0] if ids else ""

    @property
    def result(self) -> Score:
        """The `Score` of the tokens generated so far.

        Raises:
            ValueError: there are none.
        """
        if self._answer is None or not self._answer.ids or self._gate is None:
            raise ValueError("expected at least one generated token, got none")
        answer = self._answer
        score = self.scorer.result(self._query, answer.statistics(), self._gate)
        if not self._external:
            return score
        return replace(score, settings=score.settings | {"prompt_format": "token ids"})


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

    def __init__(self, scorer: PreparedModel, shown: Callable[[Token], None]) -> None:
        self.scorer, self.shown = scorer, shown
        self.stream: Stream | None = None

    def put(self, value: Tensor) -> None:
        """Take the prompt's token ids, (P,) or (1, P), then one token per call."""
        ids = value.reshape(-1).tolist()
        if self.stream is None:
            if value.ndim > 1 and len(value) > 1:
                raise ValueError(f"expected one prompt, got a batch of {len(value)}")
            prompt = str(self.scorer.tokenizer.decode(ids))
            self.stream = Stream(self.scorer, prompt, torch.tensor(ids))
            return
        for token in ids:
            self.shown(self.stream._next_token(token))

    def end(self) -> None:
        """Finish the answer; `stream.result` is its score."""
        if self.stream is not None:
            self.stream.close()
