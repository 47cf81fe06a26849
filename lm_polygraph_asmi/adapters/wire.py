"""Requests and their limits, replies and errors in OpenAI's format."""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from lm_polygraph_asmi.adapters.contract import extra

with extra("serve"):
    from fastapi.responses import JSONResponse
    from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

if TYPE_CHECKING:
    from lm_polygraph_asmi.scoring.result import Score
    from lm_polygraph_asmi.scoring.scorer import Scorer
    from lm_polygraph_asmi.scoring.tokens import Token

GREEDY = {
    "temperature": 0, "top_p": 1, "n": 1, "best_of": 1, "presence_penalty": 0, "echo": False,
    "frequency_penalty": 0, "logprobs": False, "top_logprobs": 0,
}  # fmt: skip
"""Fields of OpenAI's requests with the only supported value."""
WITHOUT_EFFECT = ("user", "seed", "metadata")
"""Fields without effect on a greedy answer."""


@dataclass(frozen=True)
class Limits:
    """Limits of a server.

    Attributes:
        body: bytes of a request.
        prompt: tokens of a prompt.
        answer: tokens of an answer, generated or passed.
        answers: answers of one request to `/score`.
        queue: requests that may wait for the model.
    """

    body: int = 1_000_000
    prompt: int = 4096
    answer: int = 256
    answers: int = 64
    queue: int = 16


class RequestError(Exception):
    """An error reply: status, what was expected, and the field concerned."""

    def __init__(self, status: int, message: str, param: str | None = None, **headers: str):
        super().__init__(message)
        self.status, self.param = status, param
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    @property
    def content(self) -> dict[str, Any]:
        """The error in OpenAI's format."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.status}
        return {"error": error}

    def response(self) -> JSONResponse:
        """The reply."""
        return JSONResponse(self.content, self.status, self.headers)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


Text = Annotated[str, Field(min_length=1)]


class Part(_Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """A message of a chat."""

    role: Literal["system", "user", "assistant"]
    content: Text | Annotated[list[Part], Field(min_length=1)]

    @field_validator("content")
    @classmethod
    def _as_text(cls, content: str | list[Part]) -> str:
        return content if isinstance(content, str) else "".join(part.text for part in content)


Messages = Annotated[list[Message], Field(min_length=1, max_length=1000)]
Stop = Annotated[str, Field(min_length=1, max_length=64)]


class StreamOptions(_Strict):
    """Options of a streamed answer."""

    include_usage: bool = False


class Generation(_Strict):
    """Common fields of requests for an answer."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _greedy(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        for name, only in GREEDY.items():
            value = fields.get(name)
            supported = isinstance(value, bool) == isinstance(only, bool) and value == only
            if value is not None and not supported:
                raise ValueError(f"{name}: expected {json.dumps(only)}; answers are greedy")
        dropped = {*GREEDY, *WITHOUT_EFFECT}
        return {name: value for name, value in fields.items() if name not in dropped}


class Completion(Generation):
    """A request to `/v1/completions`."""

    prompt: Text

    @property
    def prompt_or_messages(self) -> Any:
        """As `Scorer.score` takes it."""
        return self.prompt


class ChatCompletion(Generation):
    """A request to `/v1/chat/completions`."""

    messages: Messages

    @property
    def prompt_or_messages(self) -> Any:
        """As `Scorer.score` takes it."""
        return [message.model_dump() for message in self.messages]


class ScoreRequest(_Strict):
    """A request to `/score`: a prompt or messages, and one answer or a list of them."""

    model: str | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    answer: Text | Annotated[list[Text], Field(min_length=1)]

    @property
    def prompt_or_messages(self) -> Any:
        """As `Scorer.score` takes it."""
        if (self.prompt is None) == (self.messages is None):
            raise RequestError(422, "expected either prompt or messages", "prompt")
        if self.messages is None:
            return self.prompt
        return [message.model_dump() for message in self.messages]


def token_fields(token: "Token") -> dict[str, Any]:
    """Fields of a token in a reply; u in nats, higher = more fragile."""
    names = ("text", "u", "vote", "alternative", "alternative_share")
    return {name: getattr(token, name) for name in names}


def sendable_length(text: str, stops: Sequence[str]) -> int:
    """Number of characters to send: none of a stop string or of its possible start."""
    if starts := [text.find(stop) for stop in stops if stop in text]:
        return min(starts)
    for start in range(max(0, len(text) - max(map(len, stops), default=0)), len(text)):
        if any(stop.startswith(text[start:]) for stop in stops):
            return start
    return len(text)


class Replies:
    """Replies in OpenAI's format."""

    def __init__(self, model: str, chat: bool) -> None:
        self.chat, self.id = chat, f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.base = {"id": self.id, "created": int(time.time()), "model": model}

    def full_answer(self, scorer: "Scorer", score: "Score") -> dict[str, Any]:
        """A finished answer."""
        text = str(score.answer)
        body = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **body, "logprobs": None, "finish_reason": self.reason(scorer, score)}
        kind = "chat.completion" if self.chat else "text_completion"
        return self.base | {"object": kind, "choices": [choice], "usage": self.usage(score)}

    def chunk(self, text: str | None = None, reason: str | None = None) -> dict[str, Any]:
        """A part of an answer; without a text it has no choice."""
        delta = {"delta": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **delta, "logprobs": None, "finish_reason": reason}
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return self.base | {"object": kind, "choices": [] if text is None else [choice]}

    @staticmethod
    def reason(scorer: "Scorer", score: "Score") -> str:
        """Why the answer ended: "stop" or "length"."""
        closes = scorer.stop_conditions.closes([token.id for token in score.tokens])
        return "stop" if closes else "length"

    @staticmethod
    def usage(score: "Score") -> dict[str, int]:
        """Numbers of tokens."""
        prompt, answer = score.prompt_tokens or 0, len(score.tokens)
        return {"prompt_tokens": prompt, "completion_tokens": answer,
                "total_tokens": prompt + answer}  # fmt: skip
