"""Checks before every route: the host name, the API key, a body's size and time; errors as JSON;
request metrics.

Plain ASGI, outside FastAPI's own handling, so a refused request costs next to nothing.
`connection.py` bounds what is not a whole request yet: heads, pieces of bodies, slow and idle
clients."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import hmac
import ipaddress
import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unidec.config import Serve
from unidec.serving.connection import HEAD_BYTES, large_head
from unidec.serving.errors import ClientGone, RequestError
from unidec.serving.metrics import Metrics

log = logging.getLogger(__name__)

BODY = "unidec.body"  # key of the scope under which a route finds the request's body
MAX_HEADERS = 200
MAX_PARAMETERS = 50  # of a query string; FastAPI's time is quadratic in them
NO_SNIFFING = (b"x-content-type-options", b"nosniff")


class Guard:
    """ASGI middleware; the application finds the body in `scope[BODY]`.

    Args:
        api_key: required on every path but those in `free`; None: on none.
        routes: paths by which requests are counted; others count as the prefix in `routes` or as
        "other".
        hosts: names that the header Host may hold, besides IP addresses and localhost; None: any.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: Serve,
        metrics: Metrics,
        api_key: str | None,
        free: frozenset[str],
        routes: frozenset[str],
        hosts: frozenset[str] | None = None,
    ) -> None:
        self.app = app
        self.metrics = metrics
        self.free = free
        self.routes = routes
        self.hosts = hosts
        self.max_body = settings.max_body_bytes
        self.seconds = settings.timeout_seconds
        self.key_digest = None if api_key is None else hashlib.sha256(api_key.encode()).digest()
        self.key_env = settings.api_key_env

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun, status = time.perf_counter(), 0

        async def counted_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self.metrics.in_flight.inc()
        try:
            try:
                await self._answer(scope, receive, counted_send)
            except RequestError as error:
                self.metrics.error(error.kind)
                await _refuse(error, receive, counted_send, self.seconds)
        except Exception as error:
            # of uvloop: the client reset it
            if isinstance(error, ClientGone) or "handler is closed" in str(error):
                self.metrics.error("client_gone")
                status = 499  # nginx's code for a client that closed the request
                # uvicorn needs time to notice it; then it expects no answer
                await asyncio.sleep(0.01)
                return
            log.exception("%s %s failed", scope["method"], scope["path"])
            self.metrics.error("internal")
            if status:
                raise  # the answer is half sent: the connection must end
            fix = "ask the server's operator: its log has the cause"
            await _refuse(
                RequestError(500, "internal", "the server failed", fix=fix),
                receive,
                counted_send,
                0,
            )
        finally:
            self.metrics.in_flight.dec()
            route = self._route(scope["path"])
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.request_seconds.labels(route).observe(time.perf_counter() - begun)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        _check_head(scope, headers)
        if self.hosts is not None and not _is_host(headers.get(b"host", b""), self.hosts):
            raise RequestError(
                421,
                "wrong_host",
                "this server does not accept that host name",
                where="header Host",
                got=headers[b"host"].decode("latin-1"),
                expected="localhost, an address, or a name of serve.hosts",
                fix="add the name to serve.hosts",
                close=True,
            )
        if self.key_digest is not None and scope["path"] not in self.free:
            self._check_key(headers)
        scope[BODY] = b""
        if b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0":
            scope[BODY] = await self._body(headers, receive)
        await self.app(scope, receive, send)

    def _check_key(self, headers: dict[bytes, bytes]) -> None:
        """In constant time: the time it takes reveals nothing about the key."""
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer":
            given = headers.get(b"x-api-key", b"")
        assert self.key_digest is not None
        if not hmac.compare_digest(hashlib.sha256(given.strip()).digest(), self.key_digest):
            raise RequestError(
                401,
                "unauthorized",
                "the API key is wrong" if given else "an API key is required",
                where="header Authorization",
                expected="Authorization: Bearer KEY",
                fix=f"the server reads the key from {self.key_env}",
                headers=[(b"www-authenticate", b"Bearer")],
            )

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """The whole body, within bounds of size and time."""
        body = bytearray()
        more = True
        self._check_size(int(headers.get(b"content-length", 0)), "{} bytes")
        try:
            async with asyncio.timeout(self.seconds):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    self._check_size(len(body), f"more than {self.max_body} bytes")
        except TimeoutError:
            raise RequestError(
                408,
                "slow_body",
                "the body did not arrive in time",
                where="body",
                got=f"{len(body)} bytes",
                expected=f"all of it within {self.seconds:g} s",
                fix="send the whole body within the limit",
                close=True,
            ) from None
        return bytes(body)

    def _check_size(self, size: int, got: str) -> None:
        if size > self.max_body:
            raise RequestError(
                413,
                "too_large",
                "the body is too large",
                where="body",
                got=got.format(size),
                close=True,
                expected=f"at most {self.max_body} bytes",
                fix="send the queries in several requests (serve.max_body_bytes)",
            )

    def _route(self, path: str) -> str:
        if path in self.routes:
            return path
        return next((route for route in ("/labels/", "/page/") if path.startswith(route)), "other")


def _check_head(scope: Scope, headers: dict[bytes, bytes]) -> None:
    """Refuse a head that is too large, or that another program may read as a different request."""
    num_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
    if num_bytes > HEAD_BYTES or len(scope["headers"]) > MAX_HEADERS:
        raise large_head(f"at most {HEAD_BYTES} bytes and {MAX_HEADERS} headers")
    num_parameters = scope["query_string"].count(b"&") + 1
    if num_parameters > MAX_PARAMETERS:
        raise RequestError(
            400,
            "large_target",
            "too many parameters",
            where="query string",
            got=f"{num_parameters}",
            expected=f"at most {MAX_PARAMETERS}",
            fix="GET /openapi.json lists the parameters of each path",
        )
    num_hosts = sum(name == b"host" for name, _ in scope["headers"])
    wrong = ""
    # two lengths: request smuggling
    if b"transfer-encoding" in headers and b"content-length" in headers:
        wrong = "both Transfer-Encoding and Content-Length"
    elif num_hosts > 1:
        wrong = "more than one Host"
    elif num_hosts == 0 and scope["http_version"] == "1.1":
        wrong = "no Host"
    if wrong:
        raise RequestError(
            400, "broken_http", wrong, where="headers", fix="send exactly one", close=True
        )


@functools.lru_cache(256)
def _is_host(header: bytes, hosts: frozenset[str]) -> bool:
    """Whether a header Host names this server. An address always does: a web page of a foreign name
    whose DNS entry points here (DNS rebinding) sends that name.
    """
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


async def _refuse(error: RequestError, receive: Receive, send: Send, seconds: float) -> None:
    """Answer with an error; a body that was not read is read and dropped for at most this time.

    A socket closed with unread bytes resets the connection, and the client never sees the answer.
    """
    body = error.body()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        NO_SNIFFING,
    ]
    await send(
        {"type": "http.response.start", "status": error.status, "headers": headers + error.headers}
    )
    if not error.close:
        await send({"type": "http.response.body", "body": body})
        return
    await send({"type": "http.response.body", "body": body, "more_body": True})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while (await receive()).get("more_body", False):
                pass
    await send({"type": "http.response.body", "body": b""})
