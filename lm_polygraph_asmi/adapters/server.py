"""`polygraph_asmi serve`: OpenAI's routes and `/score` for one model, with the field `asmi`.

One thread runs the model; requests wait in a bounded queue. Errors and logs contain no part of a
prompt, no path and no stack trace.
"""

import asyncio
import json
import logging
import math
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from lm_polygraph_asmi.adapters.contract import (
    AnyScorer,
    Assessment,
    Halted,
    extra,
    for_request,
    halting,
    run,
    scorer_of,
)
from lm_polygraph_asmi.adapters.guard import LOCAL, LOG, ROUTES, Guard, Metrics
from lm_polygraph_asmi.adapters.requests import Completion, ScoreRequest
from lm_polygraph_asmi.adapters.wire import (
    Limits,
    Replies,
    RequestError,
    sendable_length,
    token_fields,
)
from lm_polygraph_asmi.config import STREAMED

with extra("serve"):
    import prometheus_client as prometheus
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

if TYPE_CHECKING:
    from lm_polygraph_asmi.calibration import Decision
    from lm_polygraph_asmi.scoring.result import Score
    from lm_polygraph_asmi.scoring.scorer import Scorer

T = TypeVar("T")
UNBUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Headers of a stream: caches and proxies pass each event on at once."""


class Worker:
    """The thread that runs the model, and its queue."""

    def __init__(self, queue_size: int) -> None:
        self.queue_size, self.pending = queue_size, 0
        self.closing = threading.Event()
        self._halt = threading.Event()  # of the job that runs
        self._thread = ThreadPoolExecutor(1, "asmi")
        self._seconds = 1.0  # moving mean per job

    def check(self) -> None:
        """Raise `Halted` if the job that runs is to halt."""
        if self._halt.is_set() or self.closing.is_set():
            raise Halted

    def submit(self, job: Callable[[], T]) -> tuple["Future[T]", threading.Event]:
        """Queue a job, which calls `check` now and then.

        Returns the job's future, and an event that halts it.

        Raises:
            RequestError: 429, the queue is full.
        """
        if self.pending > self.queue_size:
            wait = str(max(1, math.ceil(self.pending * self._seconds)))
            message = f"the queue is full ({self.queue_size} requests): try again in {wait} s"
            raise RequestError(429, message, code="rate_limit_exceeded", retry_after=wait)
        loop, halt = asyncio.get_running_loop(), threading.Event()

        def timed() -> T:
            self._halt = halt
            self.check()
            start = time.perf_counter()
            try:
                return job()
            finally:
                self._seconds += 0.2 * (time.perf_counter() - start - self._seconds)

        def on_done(_: "Future[T]") -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._job_ended)

        self.pending += 1
        future = self._thread.submit(timed)
        future.add_done_callback(on_done)
        return future, halt

    def _job_ended(self) -> None:
        self.pending -= 1

    def close(self) -> None:
        """Halt all jobs and wait for the thread."""
        self.closing.set()
        self._thread.shutdown(cancel_futures=True)


class Service:
    """Implementation of the routes.

    Args:
        scorer: a `Scorer`, or a `Decider` for decisions.
        name: of the model in requests and replies.
        limits: of requests.
        emit: called with every assessment and its response id.
    """

    def __init__(
        self,
        scorer: AnyScorer,
        name: str,
        limits: Limits,
        emit: Callable[[Assessment, str], None] | None = None,
    ) -> None:
        from lm_polygraph_asmi.model.layers import context_window

        self.base = scorer_of(scorer)
        window = context_window(self.base.model)  # leaves one token for the answer
        prompt = limits.prompt if window is None else min(limits.prompt, window - 1)
        self.name, self.limits = name, replace(limits, prompt=prompt)
        self.emit = emit or (lambda *_: None)
        self.worker = Worker(limits.queue)
        self.scorer = halting(scorer, self.worker.check)
        self.metrics = Metrics(lambda: self.worker.pending)

    @property
    def description(self) -> dict[str, Any]:
        """The model, as the routes of models describe it."""
        return {"id": self.name, "object": "model", "created": 0, "owned_by": "local"}

    def check_model(self, requested: str | None) -> None:
        """Raise if the request names another model."""
        if requested is not None and requested != self.name:
            message = f"expected {self.name!r}, the one model of this server"
            raise RequestError(404, message, "model", "model_not_found")

    async def in_turn(self, request: Request, job: Callable[[], T]) -> T:
        """The result of a job; it is halted if the client disconnects.

        Raises:
            RequestError: the queue is full, or the job failed (see `_as_request_error`).
        """
        future, halt = self.worker.submit(job)
        try:
            return await _unless_disconnected(request, asyncio.wrap_future(future))
        except ValueError as error:
            raise _as_request_error(error) from None
        finally:
            halt.set()

    def _request_scorer(
        self, prompt: Any, stop: Sequence[str] | None, max_new_tokens: int
    ) -> AnyScorer:
        """A scorer for this request; raises if the prompt is too long."""
        from lm_polygraph_asmi.scoring.text import prompt_tokens

        scorer = for_request(self.scorer, stop, max_new_tokens)
        field = "prompt" if isinstance(prompt, str) else "messages"
        tokenizer = self.base.tokenizer
        if field == "messages" and not getattr(tokenizer, "chat_template", None):
            raise RequestError(422, "expected prompt: this model has no chat template", field)
        try:
            length = len(prompt_tokens(tokenizer, prompt))
        except ValueError:
            expected = "a prompt of at least one token"
            if field == "messages":
                expected = "roles in an order that the model's chat template supports"
            raise RequestError(422, f"expected {expected}", field) from None
        if length > self.limits.prompt:
            # Clients know these words, and shorten the prompt.
            expected = f"expected at most {self.limits.prompt} tokens, got {length}"
            message = f"the prompt is too long: {expected}"
            raise RequestError(422, message, field, "context_length_exceeded")
        return scorer

    def _reported(self, result: "Score | Decision", response_id: str) -> dict[str, Any]:
        assessment = Assessment.of(result)
        self.metrics.scored(result, assessment)
        self.emit(assessment, response_id)
        score = getattr(result, "score", None) if hasattr(result, "accept") else result
        tokens = [token_fields(token) for token in score.tokens] if score else []
        return assessment.to_dict() | {"tokens": tokens}

    async def score(self, request: Request) -> Response:
        """Score the answers of a request."""
        content = ScoreRequest.read(await request.body())
        self.check_model(content.model)
        prompt, answers = content.prompt, content.answers
        if len(answers) > self.limits.answers:
            message = f"expected at most {self.limits.answers} answers, got {len(answers)}"
            raise RequestError(422, message, "answer")
        response_id = f"score-{uuid.uuid4().hex}"

        def job() -> list[dict[str, Any]]:
            scorer = self._request_scorer(prompt, None, self.base.config.max_new_tokens)
            for answer in answers:
                length = len(self.base.tokenizer(answer, add_special_tokens=False)["input_ids"])
                if length > self.limits.answer:
                    message = f"expected at most {self.limits.answer} tokens, got {length}"
                    raise RequestError(422, message, "answer")
            reports = []
            for answer in answers:
                self.worker.check()
                reports.append(self._reported(run(scorer, prompt, answer), response_id))
            return reports

        scored = await self.in_turn(request, job)
        data = [{"index": index, "asmi": report} for index, report in enumerate(scored)]
        body = {"id": response_id, "object": "list", "model": self.name, "data": data}
        return JSONResponse(body if content.listed else body | {"asmi": data[0]["asmi"]})

    async def complete(self, request: Request, chat: bool) -> Response:
        """Generate and score an answer, whole or streamed."""
        completion = Completion.read(await request.body(), chat)
        self.check_model(completion.model)
        limit = self.limits.answer
        default = min(self.base.config.max_new_tokens, limit)
        length = completion.max_tokens or default
        if length > limit:
            raise RequestError(422, f"expected at most {limit} tokens, got {length}", "max_tokens")
        replies = Replies(self.name, chat)
        if completion.stream:
            return await self._streamed(completion, length, replies, request)

        def job() -> dict[str, Any]:
            scorer = self._request_scorer(completion.prompt, completion.stop, length)
            result = run(scorer, completion.prompt)
            report = self._reported(result, replies.id)
            return replies.full_answer(scorer_of(scorer), result) | {"asmi": report}

        return JSONResponse(await self.in_turn(request, job))

    async def _streamed(
        self, completion: Completion, length: int, replies: Replies, request: Request
    ) -> StreamingResponse:
        loop = asyncio.get_running_loop()
        parts: asyncio.Queue[Any] = asyncio.Queue()

        def put(part: Any) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(parts.put_nowait, part)

        def job() -> None:
            try:
                scorer = self._request_scorer(completion.prompt, completion.stop, length)
                stream = scorer_of(scorer).stream(completion.prompt)
                put(replies.chunk("", first=True))  # all checks are done
                base = scorer_of(scorer)
                sent, text, unsent = 0, "", []
                for token in stream:
                    self.worker.check()
                    unsent.append(token_fields(token))
                    text += "" if token.id in base.stop_conditions.end_ids else token.text
                    if (sendable := sendable_length(text, base.stop)) > sent:
                        put(replies.chunk(text[sent:sendable]) | {"asmi": {"tokens": unsent}})
                        sent, unsent = sendable, []
                score, result = finished(scorer, completion.prompt, stream.result)
                last = replies.chunk(str(score.answer)[sent:], replies.reason(base, score))
                put(last | {"asmi": self._reported(result, replies.id)})
                if completion.usage:
                    put(replies.chunk() | {"usage": replies.usage(score)})
                put(None)
            except Exception as error:
                put(error)

        _, halt = self.worker.submit(job)
        try:
            first = await _unless_disconnected(request, asyncio.ensure_future(parts.get()))
            if isinstance(first, Exception):
                raise _as_request_error(first) from None
        except BaseException:
            halt.set()
            raise

        async def events() -> AsyncIterator[str]:
            part = first
            try:
                while part is not None:
                    if isinstance(part, Exception):
                        yield _event(_as_request_error(part).content)
                        break
                    yield _event(part)
                    part = await parts.get()
                yield "data: [DONE]\n\n"
            finally:  # also if the client has disconnected
                halt.set()

        return StreamingResponse(events(), headers=UNBUFFERED, media_type="text/event-stream")


def finished(scorer: Any, prompt: Any, streamed: "Score") -> "tuple[Score, Score | Decision]":
    """Score of a streamed answer, and what is reported: the same, or a `Decider`'s decision."""
    base = scorer_of(scorer)
    if base is scorer:
        score = rescored(base, prompt, streamed)
        return score, score
    if scorer.masked:
        score = rescored(base, prompt, streamed)
        return score, scorer.of(score)
    if not scorer.states:
        return streamed, scorer.of(streamed)
    decision = scorer.decide(prompt, [token.id for token in streamed.tokens])
    warnings = (*decision.warnings, *streamed.warnings)
    return streamed, replace(decision, answer=streamed.answer, warnings=warnings)


def rescored(scorer: "Scorer", prompt: Any, streamed: "Score") -> "Score":
    """Score a streamed answer with the scorer's settings, as a passed answer."""
    if all(getattr(scorer.config, name) == only for name, only in STREAMED.items()):
        return streamed
    score = scorer.score(prompt, [token.id for token in streamed.tokens])
    settings = score.settings | {"stop": sorted(scorer.stop)}
    return replace(score, answer=streamed.answer, settings=settings, warnings=streamed.warnings)


def _event(content: Any) -> str:
    """An event in ASCII: some clients also end a line at U+2028 and its like."""
    return f"data: {json.dumps(content, allow_nan=False)}\n\n"


def _as_request_error(error: Exception) -> RequestError:
    """Error reply without the scorer's message, which may quote the prompt."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, Halted):
        return RequestError(503, "the server is shutting down, or the client is gone")
    if isinstance(error, ValueError):
        LOG.warning("a request could not be scored: %s", type(error).__name__)
        fits = "that fit the context window, and messages that the chat template supports"
        return RequestError(422, f"expected a prompt and an answer of at least one token {fits}")
    LOG.error("internal error: %s", type(error).__name__)
    return RequestError(500, "internal error")


async def _unless_disconnected(request: Request, work: "asyncio.Future[T]") -> T:
    """The result of the work; a `RequestError` if the client disconnects before."""

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    disconnected = asyncio.ensure_future(disconnect())
    both: set[asyncio.Future[Any]] = {work, disconnected}
    work.add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise RequestError(499, "the client is gone")
        return work.result()
    finally:
        disconnected.cancel()
        work.cancel()


async def _on_request_error(_: Request, error: Any) -> Response:
    return error.response()


async def _on_error(_: Request, __: Exception) -> Response:
    return RequestError(500, "internal error").response()  # the guard logs its type


async def _on_http(request: Request, error: Any) -> Response:
    """An unknown route, or another method than the route has."""
    headers = dict(error.headers or {})
    if error.status_code == 405 and request.method == "OPTIONS":
        return Response(status_code=204, headers=headers)
    messages = {
        404: f"there is no such route: expected one of {', '.join(ROUTES.values())}",
        405: f"expected the method {headers.get('Allow', 'POST')}",
    }
    reply = RequestError(error.status_code, messages.get(error.status_code, "invalid request"))
    reply.headers |= headers
    return reply.response()


def application(
    service: Service, key: str | None = None, local: bool = True
) -> tuple[Starlette, Guard]:
    """The routes, and the guard around them, which a web server runs.

    Args:
        service: implements the routes.
        key: required by every request but `/health`; None: no key.
        local: without a key, accept only host names of this machine, since a web page could
            otherwise send requests under its own name.
    """

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.worker.close)

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [service.description]})

    async def model(request: Request) -> Response:
        service.check_model(request.path_params["name"])
        return JSONResponse(service.description)

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok", "pending": service.worker.pending})

    async def metrics(_: Request) -> Response:
        text = prometheus.generate_latest(service.metrics.registry)
        return Response(text, media_type=prometheus.CONTENT_TYPE_LATEST)

    app = Starlette(
        lifespan=lifespan,
        routes=[
            Route("/completions", partial(service.complete, chat=False), methods=["POST"]),
            Route("/chat/completions", partial(service.complete, chat=True), methods=["POST"]),
            Route("/score", service.score, methods=["POST"]),
            Route("/models", models),
            Route("/models/{name:path}", model),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        exception_handlers={
            RequestError: _on_request_error, HTTPException: _on_http, Exception: _on_error,
        },
    )  # fmt: skip
    return app, Guard(app, service.limits, key, local, service.metrics)


WARM_UP = "Question: 1 + 1? Answer:"


def serve(
    scorer: AnyScorer,
    name: str,
    host: str,
    port: int,
    limits: Limits,
    key: str | None = None,
    drain: int = 60,
    emit: Callable[[Assessment, str], None] | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl+C; running requests then have `drain` seconds to finish.

    Raises:
        ValueError, RuntimeError, TypeError: before serving: the model cannot be scored, or the
            calibration's settings differ.
    """
    import uvicorn

    first, base = run(scorer, WARM_UP, " 2"), scorer_of(scorer)
    _ = base.stream_engine  # built and checked once, for all requests
    list(for_request(base, None, 2).stream(WARM_UP))
    settings = {name: first.settings[name] for name in ("layer", "attention_in_use")}
    known = settings | base.fingerprints() | {"model": first.model}
    if base is not scorer and (other := scorer.calibration.other_circumstances(known)):
        raise ValueError(f"settings differ from the calibration: {'; '.join(other)}")
    service = Service(scorer, name, limits, emit)
    local = host in (*LOCAL, "::1")
    _, guard = application(service, key, local)
    logging.getLogger("uvicorn.access").disabled = True  # its lines contain requests
    config = uvicorn.Config(
        guard, host=host, port=port, log_config=None, access_log=False, ws="none",
        server_header=False, limit_concurrency=limits.queue + 200, timeout_graceful_shutdown=drain,
    )  # fmt: skip
    LOG.info("serving %s at http://%s:%d", name, host, port)
    uvicorn.Server(config).run()
