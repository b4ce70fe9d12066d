"""What stands before every route: the API key, how large a body may be and how long it may take, errors as JSON.

Plain ASGI, outside FastAPI's own handling: what is refused here costs next to nothing. The connection itself (head,
number, broken HTTP) is bounded in `protocol.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from unidec.ops.serving.batching import ClientGone
from unidec.ops.serving.errors import RequestError
from unidec.ops.serving.metrics import Metrics
from unidec.sections import Serve

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

BODY = "unidec.body"  # key of the scope under which a route finds the request's body
BODIES_HELD = 32  # times max_body_bytes: bodies of all requests being answered
LINGER_SECONDS = 1.0  # a refused body is read on for so long, that its sender sees the answer
LINGER_BODIES = 32
NO_SNIFFING = (b"x-content-type-options", b"nosniff")


class Guard:
    """ASGI middleware.

    Args:
        app: what answers; it finds the body in `scope[BODY]`.
        settings: the limits. metrics: where requests and errors are counted.
        api_key: asked for on every path but `free`; None: on none.
        routes: paths by which requests are counted; longer ones count as the one that they begin with, else "other".
    """

    def __init__(
        self,
        app: App,
        settings: Serve,
        metrics: Metrics,
        api_key: str | None,
        free: frozenset[str],
        routes: frozenset[str],
    ) -> None:
        self.app, self.metrics, self.free, self.routes = app, metrics, free, routes
        self.max_body, self.seconds = settings.max_body_bytes, settings.timeout_seconds
        self.key_digest = None if api_key is None else hashlib.sha256(api_key.encode()).digest()
        self.key_env = settings.api_key_env
        self.held = 0  # bytes of bodies of requests that are not answered yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun, held, status = time.perf_counter(), 0, 0

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self.metrics.in_flight.inc()
        try:
            headers = dict(scope["headers"])
            if self.key_digest is not None and scope["path"] not in self.free:
                self._check_key(headers)
            body = b""
            if b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0":
                body = await self._body(headers, receive)
            held = len(body)
            self.held += held
            scope[BODY] = body
            await self.app(scope, receive, sent)
        except RequestError as error:
            self.metrics.error(error.kind)
            if not status:
                await _refuse(error, receive, sent, LINGER_BODIES * self.max_body)
        except ClientGone:
            self.metrics.error("client_gone")
            status = 499  # as nginx counts it; nobody reads it
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            self.metrics.error("internal")
            if status:
                raise  # the answer is half sent: the connection must end
            fix = "ask whoever runs this server: its log says more"
            await _refuse(RequestError(500, "internal", "the server failed", fix=fix), receive, sent, 0)
        finally:
            self.held -= held
            self.metrics.in_flight.dec()
            self.metrics.request(self._route(scope["path"]), status, time.perf_counter() - begun)

    def _check_key(self, headers: dict[bytes, bytes]) -> None:
        """In constant time: how long it takes says nothing about the key."""
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer":
            given = headers.get(b"x-api-key", b"")
        assert self.key_digest is not None
        if not hmac.compare_digest(hashlib.sha256(given.strip()).digest(), self.key_digest):
            raise RequestError(
                401, "unauthorized", "the API key is wrong" if given else "an API key is needed",
                where="header Authorization", expected="Authorization: Bearer KEY",
                fix=f"the key stands in {self.key_env} where the server runs",
                headers=[(b"www-authenticate", b"Bearer")],
            )  # fmt: skip

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """The whole body, within bounds of size and time."""
        declared = headers.get(b"content-length")
        if declared is not None and int(declared) > self.max_body:
            raise self._too_large(f"{int(declared)} bytes")
        chunks: list[bytes] = []
        num = 0
        try:
            async with asyncio.timeout(self.seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    chunk = message.get("body", b"")
                    num += len(chunk)
                    if num > self.max_body:
                        raise self._too_large(f"more than {self.max_body} bytes")
                    if self.held + num > BODIES_HELD * self.max_body:
                        fix = "try again, with smaller requests"
                        raise RequestError(
                            503, "overload", "too many bytes of requests at once", fix=fix, retry_after=1, close=True
                        )
                    if not message.get("more_body", False):
                        return b"".join([*chunks, chunk]) if chunks else chunk
                    chunks.append(chunk)
        except TimeoutError:
            raise RequestError(
                408, "slow_body", "the body did not come to its end", where="body", got=f"{num} bytes",
                expected=f"all of it within {self.seconds:g} s", fix="send it at once", close=True,
            ) from None  # fmt: skip

    def _too_large(self, got: str) -> RequestError:
        return RequestError(
            413, "too_large", "the body is too large", where="body", got=got, expected=f"at most {self.max_body} bytes",
            fix="send the queries in several requests (serve.max_body_bytes)", close=True,
        )  # fmt: skip

    def _route(self, path: str) -> str:
        if path in self.routes:
            return path
        return next((route for route in ("/labels/", "/page/") if path.startswith(route)), "other")


async def _refuse(error: RequestError, receive: Receive, send: Send, linger_bytes: int) -> None:
    """Answer with an error; where the body was not read, read it on for a while before the connection ends.

    A socket closed with unread bytes resets the connection, and the answer is lost on its way.
    """
    body = error.body()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), NO_SNIFFING]
    await send({"type": "http.response.start", "status": error.status, "headers": headers + error.headers})
    if not error.close:
        await send({"type": "http.response.body", "body": body})
        return
    await send({"type": "http.response.body", "body": body, "more_body": True})
    num = 0
    try:
        async with asyncio.timeout(LINGER_SECONDS):
            while num <= linger_bytes:
                message = await receive()
                num += len(message.get("body", b""))
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b""})
