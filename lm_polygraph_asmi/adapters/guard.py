"""Wraps all routes: key, host, body size, metrics, log, and a reply for every exception."""

import asyncio
import hashlib
import hmac
import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from lm_polygraph_asmi.adapters.contract import Assessment, extra
from lm_polygraph_asmi.adapters.wire import Limits, RequestError

with extra("serve"):
    import prometheus_client as prometheus

if TYPE_CHECKING:
    from lm_polygraph_asmi.calibration import Decision
    from lm_polygraph_asmi.scoring.result import Score

LOG = logging.getLogger("lm_polygraph_asmi.serve")
ROUTES = {
    "/completions": "/v1/completions", "/chat/completions": "/v1/chat/completions",
    "/models": "/v1/models", "/score": "/score", "/health": "/health", "/metrics": "/metrics",
}  # fmt: skip
"""Each route as the application knows it, and as it is published."""
LOCAL = ("localhost", "127.0.0.1", "[::1]")
BODY_SECONDS = 30
"""Timeout for the body of a request."""


class Metrics:
    """Metrics of `/metrics`, in a separate registry."""

    def __init__(self, pending: Callable[[], int]) -> None:
        self.registry = registry = prometheus.CollectorRegistry()
        labels = ["route", "status"]
        self.requests = prometheus.Counter("asmi_requests", "Requests.", labels, registry=registry)
        self.seconds = prometheus.Histogram(
            "asmi_request_seconds", "Seconds of a request.", labels[:1], registry=registry
        )
        self.decisions = prometheus.Counter(
            "asmi_decisions", "Scored answers.", ["decision"], registry=registry
        )
        self.tokens = prometheus.Counter("asmi_tokens", "Tokens.", ["kind"], registry=registry)
        waiting = prometheus.Gauge(
            "asmi_pending", "Requests that use or await the model.", registry=registry
        )
        waiting.set_function(pending)

    def scored(self, result: "Score | Decision", assessment: Assessment) -> None:
        """Count a scored answer."""
        self.decisions.labels(assessment.decision or "none").inc()
        self.tokens.labels("prompt").inc(result.prompt_tokens or 0)
        self.tokens.labels("answer").inc(len(result.ids))


class Guard:
    """Wraps the application: key, host, body size, log, and a reply for every exception."""

    def __init__(self, app: Any, limits: Limits, key: str | None, local: bool, metrics: Metrics):
        self.app, self.limits, self.metrics = app, limits, metrics
        self.local = local and key is None
        self._key = None if key is None else _digest(key.encode())

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        start, status = time.perf_counter(), 0
        path = canonical(scope["path"])
        scope = scope | {"path": path, "raw_path": path.encode()}
        route = ROUTES.get("/models" if path.startswith("/models/") else path, "other")

        async def send_and_record(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            headers = dict(scope["headers"])
            self._check(path, headers)
            if scope["method"] == "POST":
                receive = _replay(await self._body(headers, receive), receive)
            await self.app(scope, receive, send_and_record)
        except Exception as error:
            reply = (
                error if isinstance(error, RequestError) else RequestError(500, "internal error")
            )
            if reply.status == 500:
                LOG.error("internal error: %s", type(error).__name__)
            if not status:
                await reply.response()(scope, receive, send_and_record)
        finally:
            seconds = time.perf_counter() - start
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.seconds.labels(route).observe(seconds)
            LOG.info("%s %s %d %.3f s", scope["method"], route, status, seconds)

    def _check(self, path: str, headers: dict[bytes, bytes]) -> None:
        host = headers.get(b"host", b"").decode("latin-1").rsplit(":", 1)
        name = host[0] if len(host) == 2 and host[1].isdigit() else ":".join(host)
        if self.local and name not in LOCAL:
            raise RequestError(400, f"Host: expected one of {', '.join(LOCAL)}")
        origin = headers.get(b"origin")
        if self._key is None and origin is not None:
            page = re.fullmatch(r"https?://(.*?)(:\d+)?", origin.decode("latin-1"))
            if page is None or page[1] not in (*LOCAL, name):
                raise RequestError(403, "Origin: expected no web page of another machine")
        key = re.sub(b"^bearer ", b"", headers.get(b"authorization", b""), flags=re.IGNORECASE)
        if path != "/health" and self._key and not hmac.compare_digest(_digest(key), self._key):
            message = "expected the header Authorization: Bearer KEY with this server's key"
            raise RequestError(401, message, code="invalid_api_key", www_authenticate="Bearer")

    async def _body(self, headers: dict[bytes, bytes], receive: Any) -> bytes:
        """Read the whole body.

        Raises:
            RequestError: too long, or not received in time.
        """
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            message = "expected a body without Content-Encoding"
            raise RequestError(415, message, connection="close")
        limit = self.limits.body
        # A client that is still sending reads no reply, so part of a long body is read and dropped.
        drop_limit = 8 * limit
        message = f"the body is too long: expected at most {limit} bytes"
        too_long = RequestError(413, message, connection="close")
        if int(headers.get(b"content-length", b"0")) > drop_limit:
            raise too_long
        body, length = bytearray(), 0

        async def read() -> None:
            nonlocal length
            more = True
            while more and length <= drop_limit:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise RequestError(499, "the client is gone")
                length += len(part := message.get("body", b""))
                body.extend(part if length <= limit else b"")
                more = message.get("more_body", False)
            if length > limit:
                raise too_long

        try:
            await asyncio.wait_for(read(), BODY_SECONDS)
        except asyncio.TimeoutError:
            message = f"the body did not arrive within {BODY_SECONDS} s"
            raise RequestError(408, message, connection="close") from None
        return bytes(body)


def canonical(path: str) -> str:
    """The path without `/v1` and superfluous slashes, which base URLs of clients get wrong."""
    parts = [part for part in path.split("/") if part]
    while parts[:1] == ["v1"]:
        parts = parts[1:]
    return "/" + "/".join(parts)


def _digest(key: bytes) -> bytes:
    """Hash of a key, of fixed length."""
    return hashlib.sha256(key).digest()


def _replay(body: bytes, receive: Any) -> Callable[[], Awaitable[Any]]:
    """Replay the body, then pass on what the client sends (its disconnect)."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Any:
        return messages.pop() if messages else await receive()

    return replay
