"""What stands before every route: the name asked for, the API key, a body's size and time, errors as JSON.

Plain ASGI, outside FastAPI's own handling: what is refused here costs next to nothing. The connection itself (head,
number, broken HTTP) is bounded in `protocol.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import hmac
import ipaddress
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from unidec.sections import Serve
from unidec.serving.batching import ClientGone
from unidec.serving.errors import RequestError
from unidec.serving.metrics import Metrics

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

BODY = "unidec.body"  # key of the scope under which a route finds the request's body
BODIES_HELD = 32  # times max_body_bytes: bodies of all requests being answered, and answers that wait to be read
LARGE_ANSWER = 65_536  # bytes; what the transport takes without waiting for its reader
NO_SNIFFING = (b"x-content-type-options", b"nosniff")


class Guard:
    """ASGI middleware.

    Args:
        app: what answers; it finds the body in `scope[BODY]`.
        settings: the limits. metrics: where requests and errors are counted.
        api_key: asked for on every path but `free`; None: on none.
        hosts: names by which it may be asked, beside addresses and localhost; None: any.
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
        hosts: frozenset[str] | None = None,
    ) -> None:
        self.app, self.metrics, self.free, self.routes = app, metrics, free, routes
        self.max_body, self.seconds = settings.max_body_bytes, settings.timeout_seconds
        self.key_digest = None if api_key is None else hashlib.sha256(api_key.encode()).digest()
        self.key_env = settings.api_key_env
        self.hosts = hosts
        self.held = 0  # bytes of bodies that are being answered, and of answers that are being read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = time.perf_counter()
        exchange = _Exchange(self, send)
        self.metrics.in_flight.inc()
        try:
            await self._answer(scope, receive, exchange)
        except ClientGone:
            self.metrics.error("client_gone")
            exchange.status = 499  # nginx's code for a client that closed the request
        finally:
            exchange.hold(0)
            self.metrics.in_flight.dec()
            self.metrics.request(self._route(scope["path"]), exchange.status, time.perf_counter() - begun)

    async def _answer(self, scope: Scope, receive: Receive, exchange: _Exchange) -> None:
        """The application's answer, or an error.

        Raises:
            ClientGone: the client closed the connection.
        """
        try:
            headers = dict(scope["headers"])
            if len(headers) < len(scope["headers"]) and _num_hosts(scope) > 1:
                raise _several_hosts()
            if self.hosts is not None and not _is_host(headers.get(b"host", b""), self.hosts):
                raise _misdirected(headers[b"host"])
            if self.key_digest is not None and scope["path"] not in self.free:
                self._check_key(headers)
            body = b""
            if b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0":
                body = await self._body(headers, receive)
                exchange.hold(len(body))
            scope[BODY] = body
            del body  # the route takes it out of the scope
            await self.app(scope, receive, exchange.send)
        except ClientGone:
            raise
        except RequestError as error:
            self.metrics.error(error.kind)
            if not exchange.status:
                await _refuse(error, receive, exchange.send_at_once, self.seconds)
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            self.metrics.error("internal")
            if exchange.status:
                raise  # the answer is half sent: the connection must end
            fix = "ask whoever runs this server: its log says more"
            failed = RequestError(500, "internal", "the server failed", fix=fix)
            await _refuse(failed, receive, exchange.send_at_once, self.seconds)

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many bytes more may be held; one request's always may."""
        return not self.held or self.held + num_bytes <= BODIES_HELD * self.max_body

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
                    chunk, more = message.get("body", b""), message.get("more_body", False)
                    num += len(chunk)
                    if num > self.max_body:
                        raise self._too_large(f"more than {self.max_body} bytes")
                    if not self.has_room(num):
                        raise _too_many_bytes("too many bytes of requests at once", close=more)
                    if not more:
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


class _Exchange:
    """One answer on its way: its status, and the bytes that are held for it."""

    def __init__(self, guard: Guard, send: Send) -> None:
        self.guard, self._send = guard, send
        self.status, self.held = 0, 0
        self.start: Message | None = None

    def hold(self, num_bytes: int) -> None:
        """From now on so many bytes are held, instead of those before."""
        self.guard.held += num_bytes - self.held
        self.held = num_bytes

    async def send_at_once(self, message: Message) -> None:
        """To the server, as it is.

        Raises:
            ClientGone: the client reset the connection a moment ago.
        """
        if message["type"] == "http.response.start":
            self.status = message["status"]
        try:
            await self._send(message)
        except RuntimeError as error:  # of uvloop; asyncio's own loop writes to a closed connection without a word
            if "handler is closed" not in str(error):
                raise
            await asyncio.sleep(0.01)  # uvicorn, called back by then, does not look for the rest of the answer
            raise ClientGone from error

    async def send(self, message: Message) -> None:
        """The head goes with the body; a large answer is held until its reader took most of it.

        Raises:
            RequestError: too much is held already; nothing was sent.
        """
        if message["type"] == "http.response.start":
            self.start = message
            return
        body = message.get("body", b"")
        self.hold(0)
        is_large = len(body) > LARGE_ANSWER
        if is_large and not self.guard.has_room(len(body)):
            raise _too_many_bytes("too many answers wait to be read", close=False)
        if self.start is not None:
            start, self.start = self.start, None
            await self.send_at_once(start)
        if not is_large:
            await self.send_at_once(message)
            return
        self.hold(len(body))
        await self.send_at_once({**message, "more_body": True})
        if not message.get("more_body", False):
            await self.send_at_once({"type": "http.response.body", "body": b""})  # waits for the reader


@functools.lru_cache(256)
def _is_host(header: bytes, hosts: frozenset[str]) -> bool:
    """Whether a header Host names this server. An address always does: a page of a foreign name whose DNS entry points
    here (DNS rebinding) comes with that name."""
    host = header.decode("latin-1").lower().strip()
    name, colon, port = host.rpartition(":")
    name = name if colon and port.isdigit() else host
    if not name or name in hosts or name == "localhost":
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _num_hosts(scope: Scope) -> int:
    return sum(name == b"host" for name, _ in scope["headers"])


def _several_hosts() -> RequestError:
    return RequestError(
        400, "wrong_host", "more than one header Host", where="header Host", got="several", expected="one",
        fix="send the header once", close=True,
    )  # fmt: skip


def _misdirected(header: bytes) -> RequestError:
    return RequestError(
        421, "wrong_host", "this server is not asked by that name", where="header Host", got=header.decode("latin-1"),
        expected="localhost, an address, or a name of serve.hosts", fix="add the name to serve.hosts", close=True,
    )  # fmt: skip


def _too_many_bytes(what: str, close: bool) -> RequestError:
    fix = "try again after Retry-After seconds, with smaller requests"
    return RequestError(503, "overload", what, fix=fix, retry_after=1, close=close)


async def _refuse(error: RequestError, receive: Receive, send: Send, seconds: float) -> None:
    """Answer with an error; a body that was not read is read and dropped for at most so many seconds.

    A socket closed with unread bytes resets the connection, and the answer is lost on its way.
    """
    body = error.body()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), NO_SNIFFING]
    await send({"type": "http.response.start", "status": error.status, "headers": headers + error.headers})
    if not error.close:
        await send({"type": "http.response.body", "body": body})
        return
    await send({"type": "http.response.body", "body": body, "more_body": True})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while (await receive()).get("more_body", False):
                pass
    await send({"type": "http.response.body", "body": b""})
