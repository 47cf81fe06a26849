"""Limits of requests; replies and errors in OpenAI's format."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lm_polygraph_asmi.adapters.contract import extra

with extra("serve"):
    from starlette.responses import JSONResponse

if TYPE_CHECKING:
    from lm_polygraph_asmi.calibration import Decision
    from lm_polygraph_asmi.scoring.result import Score
    from lm_polygraph_asmi.scoring.scorer import Scorer
    from lm_polygraph_asmi.scoring.tokens import Token


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
    """An error reply.

    Args:
        status: of HTTP.
        message: what was expected, and what came.
        param: the field concerned; the message then starts with it.
        code: OpenAI's name of the error, if it has one.
        **headers: of the reply, with underscores.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        **headers: str,
    ) -> None:
        super().__init__(f"{param}: {message}" if param else message)
        self.status, self.param, self.code = status, param, code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    @property
    def content(self) -> dict[str, Any]:
        """The error in OpenAI's format."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """The reply."""
        return JSONResponse(self.content, self.status, self.headers)


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

    def full_answer(self, scorer: "Scorer", result: "Score | Decision") -> dict[str, Any]:
        """A finished answer."""
        text = str(result.answer)
        body = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice = {
            "index": 0,
            **body,
            "logprobs": None,
            "finish_reason": self.reason(scorer, result),
        }
        kind = "chat.completion" if self.chat else "text_completion"
        return self.base | {"object": kind, "choices": [choice], "usage": self.usage(result)}

    def chunk(
        self, text: str | None = None, reason: str | None = None, first: bool = False
    ) -> dict[str, Any]:
        """A part of an answer; without a text it has no choice.

        In a chat, the first part has the role; clients join what several parts have.
        """
        role = {"role": "assistant"} if first else {}
        content = {} if reason and not text else {"content": text}
        body: dict[str, Any] = {"delta": role | content} if self.chat else {"text": text}
        choice = {"index": 0, **body, "logprobs": None, "finish_reason": reason}
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return self.base | {"object": kind, "choices": [] if text is None else [choice]}

    @staticmethod
    def reason(scorer: "Scorer", result: "Score | Decision") -> str:
        """Why the answer ended: "stop" or "length"."""
        closes = scorer.stop_conditions.closes(result.ids)
        return "stop" if closes else "length"

    @staticmethod
    def usage(result: "Score | Decision") -> dict[str, int]:
        """Numbers of tokens."""
        prompt, answer = result.prompt_tokens or 0, len(result.ids)
        return {"prompt_tokens": prompt, "completion_tokens": answer,
                "total_tokens": prompt + answer}  # fmt: skip
