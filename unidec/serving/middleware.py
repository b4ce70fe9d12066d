"""Checks before every route: the host name, the API key, a body's size and time; errors as JSON;
request metrics.

Plain ASGI, outside FastAPI's own handling, so refusing a request is cheap. Incomplete requests
(an unfinished head, an idle connection) are left to uvicorn and, on a network, to a reverse
proxy."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import time
from dataclasses import dataclass, field

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unidec.config import Serve
from unidec.serving.prometheus import Metrics
from unidec.serving.request_error import ClientGone, RequestError

log = logging.getLogger(__name__)

BODY = "unidec.body"  # key of the scope under which a route finds the request's body
MAX_TARGET = 16_384  # bytes of path and query string
MAX_HEAD = 65_536  # bytes of all headers
MAX_HEADERS = 200
MAX_PARAMETERS = 50  # of a query string; FastAPI's time is quadratic in their number
_NO_SNIFFING = (b"x-content-type-options", b"nosniff")
_PREFIXES = ("/labels/", "/page/")  # requests below each prefix are counted together


@dataclass
class Guard:
    """ASGI middleware; the application finds the body in `scope[BODY]`.

    Attributes:
        api_key: required on every path except those in `free`; None: never required.
        routes: paths by which requests are counted; others count as their prefix or as "other".
        hosts: names that the header Host may hold, besides IP addresses and localhost; None: any.
    """

    app: ASGIApp
    settings: Serve
    metrics: Metrics
    api_key: str | None
    free: frozenset[str]
    routes: frozenset[str]
    hosts: frozenset[str] | None
    in_flight: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.metrics.in_flight.set_function(lambda: self.in_flight)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = time.perf_counter()
        status = 0

        async def counted_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"].append(_NO_SNIFFING)
            await send(message)

        self.in_flight += 1
        try:
            try:
                await self._answer(scope, receive, counted_send)
            except RequestError as error:
                self.metrics.error(error.kind)
                await _refuse(error, receive, counted_send, self.settings.timeout_seconds)
        except Exception as error:
            # uvloop's message if the client reset the connection
            if isinstance(error, ClientGone) or "handler is closed" in str(error):
                self.metrics.error("client_gone")
                status = 499  # nginx's code for a client that closed the request
                # by then uvicorn has noticed it and expects no answer
                await asyncio.sleep(0.01)
                return
            log.exception("%s %s failed", scope["method"], scope["path"])
            self.metrics.error("internal")
            if status:
                raise  # the answer is half sent: the connection must end
            failed = RequestError(
                500,
                "internal",
                "the server failed",
                fix="ask the server's operator: its log has the cause",
            )
            await _refuse(failed, receive, counted_send, 0)
        finally:
            self.in_flight -= 1
            route = self._route(scope["path"])
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.request_seconds.labels(route).observe(time.perf_counter() - begun)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        _check_head(scope)
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
        if self.api_key is not None and scope["path"] not in self.free:
            self._check_key(headers, self.api_key.encode())
        if self.in_flight > self.settings.max_connections:
            raise RequestError(
                503,
                "overload",
                "too many requests at once",
                expected=f"at most {self.settings.max_connections}",
                fix="retry after Retry-After seconds",
                retry_after=1,
                close=True,
            )
        scope[BODY] = b""
        if b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0":
            scope[BODY] = await self._body(headers, receive)
        await self.app(scope, receive, send)

    def _check_key(self, headers: dict[bytes, bytes], api_key: bytes) -> None:
        """Compares in constant time, so that timing reveals nothing about the key."""
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer":
            given = headers.get(b"x-api-key", b"")
        if not hmac.compare_digest(given.strip(), api_key):
            raise RequestError(
                401,
                "unauthorized",
                "the API key is wrong" if given else "an API key is required",
                where="header Authorization",
                expected="Authorization: Bearer KEY",
                fix=f"the server reads the key from {self.settings.api_key_env}",
                headers={"www-authenticate": "Bearer"},
            )

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """Read the whole body, within limits of size and time."""
        body = bytearray()
        more = True
        declared = int(headers.get(b"content-length", 0))
        self._check_size(declared, f"{declared} bytes")
        try:
            async with asyncio.timeout(self.settings.timeout_seconds):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    self._check_size(len(body), "more")
        except TimeoutError:
            raise RequestError(
                408,
                "slow_body",
                "the body did not arrive in time",
                where="body",
                got=f"{len(body)} bytes",
                expected=f"all of it within {self.settings.timeout_seconds:g} s",
                fix="send the whole body within the limit",
                close=True,
            ) from None
        return bytes(body)

    def _check_size(self, size: int, got: str) -> None:
        limit = self.settings.max_body_bytes
        if size > limit:
            raise RequestError(
                413,
                "too_large",
                "the body is too large",
                where="body",
                got=got,
                expected=f"at most {limit} bytes",
                fix="send the queries in several requests (serve.max_body_bytes)",
                close=True,
            )

    def _route(self, path: str) -> str:
        if path in self.routes:
            return path
        return next(filter(path.startswith, _PREFIXES), "other")


def _check_head(scope: Scope) -> None:
    """Refuse a head that is too large, or that another program may read as a different request (the
    server's parser refuses a request with two lengths).
    """
    if len(scope["raw_path"]) + len(scope["query_string"]) > MAX_TARGET:
        raise RequestError(
            414,
            "large_target",
            "the address is too long",
            where="path and query string",
            expected=f"at most {MAX_TARGET} bytes",
            fix="shorten it",
            close=True,
        )
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
    given = scope["headers"]
    num_bytes = sum(len(name) + len(value) for name, value in given)
    if num_bytes > MAX_HEAD or len(given) > MAX_HEADERS:
        raise RequestError(
            431,
            "large_head",
            "the request headers are too large",
            where="headers",
            expected=f"at most {MAX_HEAD} bytes and {MAX_HEADERS} headers",
            fix="send fewer headers",
            close=True,
        )
    num_hosts = sum(name == b"host" for name, _ in given)
    if num_hosts > 1 or (num_hosts == 0 and scope["http_version"] == "1.1"):
        raise RequestError(
            400,
            "broken_http",
            "not exactly one Host header",
            where="headers",
            got=num_hosts,
            fix="send exactly one",
            close=True,
        )


def _is_host(header: bytes, hosts: frozenset[str]) -> bool:
    """Whether a Host header names this server. IP addresses are always accepted: in a DNS rebinding
    attack, the browser sends the attacker's host name.
    """
    host = header.decode("latin-1").lower().strip()
    name, colon, port = host.rpartition(":")
    name = name if colon and port.isdigit() else host
    if name in hosts or name in ("", "localhost"):
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


async def _refuse(error: RequestError, receive: Receive, send: Send, seconds: float) -> None:
    """Answer with an error; an unread body is read and dropped for at most `seconds`.

    A socket closed with unread bytes resets the connection, and the client never sees the answer.
    """
    body = error.body()
    headers = Response(body, error.status, error.headers, "application/json").raw_headers
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": error.close})
    if not error.close:
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while (await receive()).get("more_body", False):
                pass
    await send({"type": "http.response.body", "body": b""})
