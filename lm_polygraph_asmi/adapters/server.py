"""`polygraph_asmi serve`: OpenAI's routes and `/score`, over one model, with the field `asmi`.

One thread has the model; requests wait for it in a queue of bounded length. Nothing of a prompt, no
path and no stack trace goes into an error or a log.
"""

import asyncio
import hashlib
import hmac
import json
import logging
import math
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from lm_polygraph_asmi.adapters.contract import Assessment, Halted, extra, for_request

with extra("serve"):
    import prometheus_client as prometheus
    from fastapi import FastAPI, Request, Response
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, StreamingResponse
    from pydantic import BaseModel, ConfigDict, Field, model_validator
    from starlette.exceptions import HTTPException

if TYPE_CHECKING:
    from lm_polygraph_asmi.scoring.call import Scorer
    from lm_polygraph_asmi.scoring.result import Score, Token

LOG = logging.getLogger("lm_polygraph_asmi.serve")
ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/score", "/health", "/metrics")
LOCAL = ("localhost", "127.0.0.1", "[::1]")
BODY_SECONDS = 30
"""So long may the body of a request take to arrive."""
GREEDY = {
    "temperature": 0, "top_p": 1, "n": 1, "best_of": 1, "presence_penalty": 0, "echo": False,
    "frequency_penalty": 0, "logprobs": False, "top_logprobs": 0,
}  # fmt: skip
"""Fields of OpenAI's requests with the only value that this server computes."""
WITHOUT_EFFECT = ("user", "seed", "metadata")
"""Fields that change nothing about a greedy answer."""
T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """What a server takes.

    Attributes:
        body: bytes of a request.
        prompt: tokens of a prompt.
        answer: tokens of an answer, generated or given.
        answers: answers of one request to `/score`.
        queue: requests that may wait for the model while it answers another.
    """

    body: int = 1_000_000
    prompt: int = 4096
    answer: int = 256
    answers: int = 64
    queue: int = 16


class Refusal(Exception):
    """A request that is not answered: status, what was expected, and the field it is about."""

    def __init__(self, status: int, message: str, param: str | None = None, **headers: str):
        super().__init__(message)
        self.status, self.param = status, param
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def response(self) -> JSONResponse:
        """As OpenAI words errors."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.status}
        return JSONResponse({"error": error}, self.status, self.headers)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Part(_Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """A message of a chat."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[str, Field(min_length=1)] | Annotated[list[Part], Field(min_length=1)]


Text = Annotated[str, Field(min_length=1)]
Messages = Annotated[list[Message], Field(min_length=1, max_length=1000)]
Stop = Annotated[str, Field(min_length=1, max_length=64)]


class StreamOptions(_Strict):
    """Of a streamed answer."""

    include_usage: bool = False


class Generation(_Strict):
    """What requests for an answer have in common."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _greedy(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name, only in GREEDY.items():
            value = given.get(name)
            same = isinstance(value, bool) == isinstance(only, bool) and value == only
            if value is not None and not same:
                raise ValueError(f"{name}: expected {json.dumps(only)}; answers are greedy")
        left_out = {*GREEDY, *WITHOUT_EFFECT}
        return {name: value for name, value in given.items() if name not in left_out}


class Completion(Generation):
    """A request to `/v1/completions`."""

    prompt: Text

    @property
    def asked(self) -> Any:
        """As `Scorer.score` takes it."""
        return self.prompt


class ChatCompletion(Generation):
    """A request to `/v1/chat/completions`."""

    messages: Messages

    @property
    def asked(self) -> Any:
        """As `Scorer.score` takes it."""
        return [message.model_dump() for message in self.messages]


class Given(_Strict):
    """A request to `/score`: a prompt or messages, and one answer or a list of them."""

    model: str | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    answer: Text | Annotated[list[Text], Field(min_length=1)]

    @property
    def asked(self) -> Any:
        """As `Scorer.score` takes it."""
        if (self.prompt is None) == (self.messages is None):
            raise Refusal(422, "expected either prompt or messages", "prompt")
        if self.messages is None:
            return self.prompt
        return [message.model_dump() for message in self.messages]


class Worker:
    """The thread that has the model, and the queue before it."""

    def __init__(self, places: int) -> None:
        self.places, self.pending = places, 0
        self.closing = threading.Event()
        self._thread = ThreadPoolExecutor(1, "asmi")
        self._seconds = 1.0  # of a job, a moving mean

    def submit(self, job: Callable[[Callable[[], bool]], T]) -> tuple["Future[T]", threading.Event]:
        """Have a job done in its turn; it is given what says whether to go on.

        Returns the job's future, and an event that halts it.

        Raises:
            Refusal: 429, the queue is full.
        """
        if self.pending > self.places:
            wait = str(max(1, math.ceil(self.pending * self._seconds)))
            message = f"the queue is full ({self.places} requests wait): try again in {wait} s"
            raise Refusal(429, message, retry_after=wait)
        loop, gone = asyncio.get_running_loop(), threading.Event()

        def halted() -> bool:
            return gone.is_set() or self.closing.is_set()

        def timed() -> T:
            if halted():
                raise Halted
            start = time.perf_counter()
            try:
                return job(halted)
            finally:
                self._seconds += 0.2 * (time.perf_counter() - start - self._seconds)

        def done(_: "Future[T]") -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._left)

        self.pending += 1
        future = self._thread.submit(timed)
        future.add_done_callback(done)
        return future, gone

    def _left(self) -> None:
        self.pending -= 1

    def close(self) -> None:
        """Halt what is left, and wait for the thread."""
        self.closing.set()
        self._thread.shutdown(cancel_futures=True)


class Metrics:
    """What `/metrics` reports, in a registry of its own."""

    def __init__(self, worker: Worker) -> None:
        self.registry = kept = prometheus.CollectorRegistry()
        labels = ["route", "status"]
        self.requests = prometheus.Counter("asmi_requests", "Requests.", labels, registry=kept)
        self.seconds = prometheus.Histogram(
            "asmi_request_seconds", "Seconds of a request.", labels[:1], registry=kept
        )
        self.decisions = prometheus.Counter(
            "asmi_decisions", "Scored answers.", ["decision"], registry=kept
        )
        self.tokens = prometheus.Counter("asmi_tokens", "Tokens.", ["kind"], registry=kept)
        pending = prometheus.Gauge(
            "asmi_pending", "Requests that have or await the model.", registry=kept
        )
        pending.set_function(lambda: worker.pending)

    def scored(self, score: "Score", found: Assessment) -> None:
        """Count an answer."""
        self.decisions.labels(found.decision or "none").inc()
        self.tokens.labels("prompt").inc(score.prompt_tokens or 0)
        self.tokens.labels("answer").inc(len(score.tokens))


class Guard:
    """Around the whole application: key, host, size of the body, log, and no exception beyond."""

    def __init__(self, app: Any, limits: Limits, key: str | None, local: bool, metrics: Metrics):
        self.app, self.limits, self.metrics = app, limits, metrics
        self.local = local and key is None
        self._key = None if key is None else _digest(key.encode())

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        start, status = time.perf_counter(), 0
        route = scope["path"] if scope["path"] in ROUTES else "other"

        async def watched(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            headers = dict(scope["headers"])
            self._check(scope["path"], headers)
            if scope["method"] == "POST":
                receive = _again(await self._body(headers, receive), receive)
            await self.app(scope, receive, watched)
        except Exception as error:
            refusal = error if isinstance(error, Refusal) else Refusal(500, "internal error")
            if refusal.status == 500:
                LOG.error("internal error: %s", type(error).__name__)
            if not status:
                await refusal.response()(scope, receive, watched)
        finally:
            seconds = time.perf_counter() - start
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.seconds.labels(route).observe(seconds)
            LOG.info("%s %s %d %.3f s", scope["method"], route, status, seconds)

    def _check(self, path: str, headers: dict[bytes, bytes]) -> None:
        host = headers.get(b"host", b"").decode("latin-1").rsplit(":", 1)
        name = host[0] if len(host) == 2 and host[1].isdigit() else ":".join(host)
        if self.local and name not in LOCAL:
            raise Refusal(400, f"Host: expected one of {', '.join(LOCAL)}")
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        if path != "/health" and self._key and not hmac.compare_digest(_digest(given), self._key):
            message = "expected the header Authorization: Bearer KEY with this server's key"
            raise Refusal(401, message, www_authenticate="Bearer")

    async def _body(self, headers: dict[bytes, bytes], receive: Any) -> bytes:
        """All of the body.

        Raises:
            Refusal: it is too long, or does not come.
        """
        most = self.limits.body
        # A client that still sends reads no reply: some of what is too long is taken and dropped.
        dropped = 8 * most
        message = f"the body is too long: expected at most {most} bytes"
        too_long = Refusal(413, message, connection="close")
        if int(headers.get(b"content-length", b"0")) > dropped:
            raise too_long
        body, length = bytearray(), 0

        async def read() -> None:
            nonlocal length
            more = True
            while more and length <= dropped:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refusal(499, "the client is gone")
                length += len(part := message.get("body", b""))
                body.extend(part if length <= most else b"")
                more = message.get("more_body", False)
            if length > most:
                raise too_long

        try:
            await asyncio.wait_for(read(), BODY_SECONDS)
        except asyncio.TimeoutError:
            message = f"the body did not arrive within {BODY_SECONDS} s"
            raise Refusal(408, message, connection="close") from None
        return bytes(body)


def _digest(key: bytes) -> bytes:
    """Of one length, whatever the key's."""
    return hashlib.sha256(key).digest()


def _again(body: bytes, receive: Any) -> Callable[[], Awaitable[Any]]:
    """Give the body once more, then what really comes: that the client is gone."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Any:
        return left.pop() if left else await receive()

    return replay


class Service:
    """What the routes do.

    Args:
        scorer: model and settings.
        name: the model's, in requests and replies.
        limits: what is taken.
        emit: told of every score and its response id.
    """

    def __init__(
        self,
        scorer: "Scorer",
        name: str,
        limits: Limits,
        emit: Callable[[Assessment, str], None] | None = None,
    ) -> None:
        from lm_polygraph_asmi.model.layers import context_window

        window = context_window(scorer.model)  # with room for a token of the answer
        prompt = limits.prompt if window is None else min(limits.prompt, window - 1)
        self.scorer, self.name, self.limits = scorer, name, replace(limits, prompt=prompt)
        self.emit = emit or (lambda *_: None)
        self.worker = Worker(limits.queue)
        self.metrics = Metrics(self.worker)

    def check_model(self, asked: str | None) -> None:
        """Refuse another model's name."""
        if asked is not None and asked != self.name:
            raise Refusal(404, f"there is one model here: {self.name!r}", "model")

    async def in_turn(self, request: Request, job: Callable[[Callable[[], bool]], T]) -> T:
        """The result of a job; it is halted if the client goes away.

        Raises:
            Refusal: the queue is full, or what `_refused` makes of the job's error.
        """
        future, gone = self.worker.submit(job)
        work = asyncio.wrap_future(future)
        work.add_done_callback(lambda done: done.cancelled() or done.exception())
        left = asyncio.ensure_future(_disconnect(request))
        both: set[asyncio.Future[Any]] = {work, left}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise Refusal(499, "the client is gone")
            return work.result()
        except ValueError as error:
            raise _refused(error) from None
        finally:
            gone.set()
            left.cancel()
            work.cancel()

    def _own(
        self, asked: Any, stop: Sequence[str] | None, room: int, halted: Callable[[], bool]
    ) -> "Scorer":
        """A scorer for this request, once its prompt is known to fit."""
        from lm_polygraph_asmi.scoring.text import prompt_tokens

        own = for_request(self.scorer, stop, room, halted)
        if not isinstance(asked, str):
            if not getattr(own.tokenizer, "chat_template", None):
                raise Refusal(422, "this model has no chat template: expected prompt", "messages")
            if asked[-1]["role"] == "assistant":
                raise Refusal(422, "expected the last message from the user", "messages")
        length, most = len(prompt_tokens(own.tokenizer, _flat(asked))), self.limits.prompt
        if length > most:
            message = f"expected a prompt of at most {most} tokens, got {length}"
            raise Refusal(422, message, "prompt" if isinstance(asked, str) else "messages")
        return own

    def _reported(self, score: "Score", response: str) -> dict[str, Any]:
        found = Assessment.of(score)
        self.metrics.scored(score, found)
        self.emit(found, response)
        return found.to_dict() | {"tokens": [_told(token) for token in score.tokens]}

    async def score(self, given: Given, request: Request) -> Any:
        """Score given answers."""
        self.check_model(given.model)
        asked, several = given.asked, isinstance(given.answer, list)
        answers = given.answer if isinstance(given.answer, list) else [given.answer]
        if len(answers) > self.limits.answers:
            message = f"expected at most {self.limits.answers} answers, got {len(answers)}"
            raise Refusal(422, message, "answer")
        response = f"score-{uuid.uuid4().hex}"

        def job(halted: Callable[[], bool]) -> list[dict[str, Any]]:
            own = self._own(asked, None, self.limits.answer, halted)
            for answer in answers:
                length = len(own.tokenizer(answer, add_special_tokens=False)["input_ids"])
                if length > self.limits.answer:
                    message = f"expected at most {self.limits.answer} tokens, got {length}"
                    raise Refusal(422, message, "answer")
            found = []
            for answer in answers:
                if halted():
                    raise Halted
                found.append(self._reported(own.score(_flat(asked), answer), response))
            return found

        data = [
            {"index": index, "asmi": found}
            for index, found in enumerate(await self.in_turn(request, job))
        ]
        body = {"id": response, "object": "list", "model": self.name, "data": data}
        return body if several else body | {"asmi": data[0]["asmi"]}

    async def complete(self, asked: Completion | ChatCompletion, request: Request) -> Any:
        """Answer, whole or as it is written."""
        self.check_model(asked.model)
        most = self.limits.answer
        room = asked.max_completion_tokens or asked.max_tokens or most
        if room > most:
            raise Refusal(422, f"expected at most {most} tokens, got {room}", "max_tokens")
        stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop
        words = _Words(self.name, chat=isinstance(asked, ChatCompletion))
        if asked.stream:
            return await self._streamed(asked, stop, room, words, request)

        def job(halted: Callable[[], bool]) -> dict[str, Any]:
            own = self._own(asked.asked, stop, room, halted)
            score = own.score(_flat(asked.asked))
            return words.whole(own, score) | {"asmi": self._reported(score, words.id)}

        return await self.in_turn(request, job)

    async def _streamed(
        self,
        asked: Completion | ChatCompletion,
        stop: Sequence[str] | None,
        room: int,
        words: "_Words",
        request: Request,
    ) -> StreamingResponse:
        loop = asyncio.get_running_loop()
        parts: asyncio.Queue[Any] = asyncio.Queue()
        usage = asked.stream_options is not None and asked.stream_options.include_usage

        def put(part: Any) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(parts.put_nowait, part)

        def job(halted: Callable[[], bool]) -> None:
            try:
                own = self._own(asked.asked, stop, room, halted)
                writing = own.stream(_flat(asked.asked))
                put(words.chunk(""))  # all that can be refused is over
                shown, text, waiting = 0, "", []
                for token in writing:
                    if halted():
                        raise Halted
                    waiting.append(_told(token))
                    text += "" if token.id in own.endings.end_ids else token.text
                    if (sure := _sure(text, own.stop)) > shown:
                        put(words.chunk(text[shown:sure]) | {"asmi": {"tokens": waiting}})
                        shown, waiting = sure, []
                score = finished(own, _flat(asked.asked), writing.result)
                reason = words.reason(own, score)
                last = words.chunk(str(score.answer)[shown:], reason)
                put(last | {"asmi": self._reported(score, words.id)})
                if usage:
                    put(words.chunk() | {"usage": words.usage(score)})
                put(None)
            except Exception as error:
                put(error)

        _, gone = self.worker.submit(job)
        left = asyncio.ensure_future(_disconnect(request))
        coming = asyncio.ensure_future(parts.get())
        try:
            await asyncio.wait({coming, left}, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                raise Refusal(499, "the client is gone")
            if isinstance(first := coming.result(), Exception):
                raise _refused(first) from None
        except BaseException:
            gone.set()
            raise
        finally:
            left.cancel()
            coming.cancel()

        async def events() -> AsyncIterator[str]:
            part = first
            try:
                while part is not None:
                    if isinstance(part, Exception):
                        yield _event({"error": _error(_refused(part))})
                        return
                    yield _event(part)
                    part = await parts.get()
                yield "data: [DONE]\n\n"
            finally:  # also where the client has gone away
                gone.set()

        return StreamingResponse(events(), media_type="text/event-stream")


def finished(scorer: "Scorer", prompt: Any, written: "Score") -> "Score":
    """The score of a written answer in the scorer's own settings, as one that was given."""
    if scorer.engine.scope == "response" and scorer.engine.seeded_by == "prompt":
        return written
    score = scorer.score(prompt, [token.id for token in written.tokens])
    settings = score.settings | {"stop": sorted(scorer.stop)}
    return replace(score, answer=written.answer, settings=settings, warnings=written.warnings)


def _flat(asked: Any) -> Any:
    """Messages whose parts are one text."""
    if isinstance(asked, str):
        return asked
    return [
        {
            "role": message["role"],
            "content": message["content"]
            if isinstance(message["content"], str)
            else "".join(part["text"] for part in message["content"]),
        }
        for message in asked
    ]


def _told(token: "Token") -> dict[str, Any]:
    names = ("text", "u", "vote", "alternative", "alternative_share")
    return {name: getattr(token, name) for name in names}


def _sure(text: str, stops: Sequence[str]) -> int:
    """How many characters can be shown: none of a stop string, nor of what may become one."""
    if found := [text.find(stop) for stop in stops if stop in text]:
        return min(found)
    for start in range(max(0, len(text) - max(map(len, stops), default=0)), len(text)):
        if any(stop.startswith(text[start:]) for stop in stops):
            return start
    return len(text)


class _Words:
    """How OpenAI words an answer."""

    def __init__(self, model: str, chat: bool) -> None:
        self.chat, self.id = chat, f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.base = {"id": self.id, "created": int(time.time()), "model": model}

    def whole(self, scorer: "Scorer", score: "Score") -> dict[str, Any]:
        """A finished answer."""
        text = str(score.answer)
        said = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": self.reason(scorer, score)}
        kind = "chat.completion" if self.chat else "text_completion"
        return self.base | {"object": kind, "choices": [choice], "usage": self.usage(score)}

    def chunk(self, text: str | None = None, reason: str | None = None) -> dict[str, Any]:
        """A part of one; without a text it has no choice."""
        delta = {"delta": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **delta, "logprobs": None, "finish_reason": reason}
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return self.base | {"object": kind, "choices": [] if text is None else [choice]}

    @staticmethod
    def reason(scorer: "Scorer", score: "Score") -> str:
        """Why it ended."""
        closes = scorer.endings.closes([token.id for token in score.tokens])
        return "stop" if closes else "length"

    @staticmethod
    def usage(score: "Score") -> dict[str, int]:
        """Tokens."""
        prompt, answer = score.prompt_tokens or 0, len(score.tokens)
        return {"prompt_tokens": prompt, "completion_tokens": answer,
                "total_tokens": prompt + answer}  # fmt: skip


def _event(content: Any) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def _error(refusal: Refusal) -> Any:
    return json.loads(bytes(refusal.response().body))["error"]


def _refused(error: Exception) -> Refusal:
    """What a client is told of an error: messages of the scorer may quote the prompt."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, Halted):
        return Refusal(503, "the server is shutting down, or the client is gone")
    if isinstance(error, ValueError):
        LOG.warning("a request could not be scored: %s", type(error).__name__)
        message = (
            "this prompt and answer cannot be scored: expected a prompt with a token that leaves "
            "room for an answer in the context window, an answer with a token, and messages that "
            "the chat template takes"
        )
        return Refusal(422, message)
    LOG.error("internal error: %s", type(error).__name__)
    return Refusal(500, "internal error")


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _on_refusal(_: Request, error: Any) -> Response:
    return error.response()


async def _on_error(_: Request, __: Exception) -> Response:
    return Refusal(500, "internal error").response()  # what it was, the guard logs


async def _on_http(_: Request, error: Any) -> Response:
    message = "the body is not JSON" if error.status_code == 400 else str(error.detail)
    return Refusal(error.status_code, message, **(error.headers or {})).response()


async def _on_invalid(_: Request, error: Any) -> Response:
    """What was expected where; never what came, which is the prompt."""
    said = []
    for one in error.errors()[:3]:
        where = ".".join(str(part)[:40] for part in one["loc"][1:])
        what = one["msg"].removeprefix("Value error, ")
        if one["type"] == "json_invalid":
            return Refusal(400, f"the body is not JSON: {one['ctx']['error']}").response()
        what = "there is no such field" if one["type"] == "extra_forbidden" else what
        said.append((where, f"{where}: {what}" if where else what))
    return Refusal(422, "; ".join(what for _, what in said), said[0][0] or None).response()


def application(
    service: Service, key: str | None = None, local: bool = True
) -> tuple[FastAPI, Guard]:
    """The routes, and the guard around them, which is what a web server is given.

    Args:
        service: what they do.
        key: asked of every request but `/health`; None for none.
        local: without a key, answer to names of this machine only: a page in a browser could else
            ask by way of its own name.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.worker.close)

    app = FastAPI(
        title="ASMI", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None,
        exception_handlers={
            Refusal: _on_refusal, RequestValidationError: _on_invalid, HTTPException: _on_http,
            Exception: _on_error,
        },
    )  # fmt: skip

    @app.post("/v1/completions")
    async def completions(body: Completion, request: Request) -> Any:
        return await service.complete(body, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatCompletion, request: Request) -> Any:
        return await service.complete(body, request)

    @app.post("/score")
    async def score(body: Given, request: Request) -> Any:
        return await service.score(body, request)

    @app.get("/v1/models")
    async def models() -> Any:
        one = {"id": service.name, "object": "model", "created": 0, "owned_by": "local"}
        return {"object": "list", "data": [one]}

    @app.get("/health")
    async def health() -> Any:
        return {"status": "ok", "pending": service.worker.pending}

    @app.get("/metrics")
    async def metrics() -> Response:
        text = prometheus.generate_latest(service.metrics.registry)
        return Response(text, media_type=prometheus.CONTENT_TYPE_LATEST)

    return app, Guard(app, service.limits, key, local, service.metrics)


WARM_UP = "Question: 1 + 1? Answer:"


def serve(
    scorer: "Scorer",
    name: str,
    host: str,
    port: int,
    limits: Limits,
    key: str | None = None,
    drain: int = 60,
    emit: Callable[[Assessment, str], None] | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl+C: what runs is finished then, for `drain` seconds.

    Raises:
        ValueError, RuntimeError, TypeError: the model cannot be scored, or the calibration run is
            of another score: told before anything is served.
    """
    import uvicorn

    first = scorer.score(WARM_UP, " 2")
    list(for_request(scorer, None, 2).stream(WARM_UP))
    if scorer.reference is not None:
        used = first.settings | {"variant": first.variant, "model": first.model}
        if other := scorer.reference.other_settings(used):
            raise ValueError(f"the calibration run is of another score: {'; '.join(other)}")
    service = Service(scorer, name, limits, emit)
    local = host in (*LOCAL, "::1")
    _, guard = application(service, key, local)
    logging.getLogger("uvicorn.access").disabled = True  # its lines hold what clients ask for
    config = uvicorn.Config(
        guard, host=host, port=port, log_config=None, access_log=False, ws="none",
        server_header=False, limit_concurrency=limits.queue + 200, timeout_graceful_shutdown=drain,
    )  # fmt: skip
    LOG.info("serving %s at http://%s:%d", name, host, port)
    uvicorn.Server(config).run()
