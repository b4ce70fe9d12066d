"""HTTP at the edge: what of a connection is bounded before any request is known.

uvicorn's fast protocol (httptools) reads a head of any size, waits for its end for ever, and answers broken HTTP in
plain text. Here a head has a size and a time, a body a time, connections a number; whatever is refused is answered in
the house's JSON. Without httptools uvicorn's h11 serves: it bounds the head's size itself, and nothing else.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

PHRASES = {
    400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large", 503: "Service Unavailable",
}  # fmt: skip
# a chunked body of single bytes takes five bytes more for each ("1\r\nx\r\n"); more than that carries nothing
FRAMING = 6
LINGER_SECONDS = 1.0


@dataclass(frozen=True)
class ConnectionLimits:
    """What one connection, and all together, may take.

    Attributes:
        head_bytes: request line and headers, also what stands between and after the chunks of a body.
        head_fields: headers of a request.
        head_seconds: from the first byte (of a new connection: from its begin) to the end of the head.
        body_seconds: from there to the end of the body; also for a body that was refused already and is read to its end
            so that the client sees the answer.
        connections: at once.
    """

    head_bytes: int = 65_536
    head_fields: int = 100
    head_seconds: float = 10.0
    body_seconds: float = 10.0
    connections: int = 1024


def answer_bytes(status: int, what: str, *, got: str, expected: str, fix: str, retry_after: int | None = None) -> bytes:
    """A whole HTTP answer that ends the connection: {"error": {"what", "where", "got", "expected", "fix"}}."""
    error = {"what": what, "where": "connection", "got": got, "expected": expected, "fix": fix}
    body = json.dumps({"error": error}).encode()
    head = f"HTTP/1.1 {status} {PHRASES[status]}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    if retry_after is not None:
        head += f"retry-after: {retry_after}\r\n"
    return f"{head}connection: close\r\n\r\n".encode() + body


def http_protocol(limits: ConnectionLimits | None = None) -> type[asyncio.Protocol] | Literal["h11"]:
    """What `uvicorn.Config(http=...)` takes: a protocol with these limits; "h11" where httptools is not installed."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "h11"
    return type("BoundedProtocol", (_Bounded, HttpToolsProtocol), {"limits": limits or ConnectionLimits()})


class _Bounded:
    """Goes before `HttpToolsProtocol`: counts what was read and how long it took."""

    limits: ClassVar[ConnectionLimits]

    def connection_made(self: Any, transport: asyncio.Transport) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        self.deaf = False  # nothing more is read
        self.silent = True  # no byte has come yet
        self.timer: asyncio.TimerHandle | None = None
        self._begin()
        self.fresh = True  # a chunk of bytes that holds two messages is counted to neither
        if len(self.connections) > self.limits.connections:
            self._refuse(
                503, "too many connections", got=str(len(self.connections)),
                expected=f"at most {self.limits.connections}", fix="try again, on one connection that is kept open",
                retry_after=1,
            )  # fmt: skip
        else:
            self.timer = self.loop.call_later(self.limits.head_seconds, self._too_slow)

    def connection_lost(self: Any, exc: Exception | None) -> None:
        self._disarm()
        self.deaf = True
        super().connection_lost(exc)  # type: ignore[misc]

    def data_received(self: Any, data: bytes) -> None:
        if self.deaf:
            return
        self.fresh = self.silent = False
        super().data_received(data)  # type: ignore[misc]
        if self.deaf:
            return
        if not self.open:  # the usual case: the whole request in one piece
            self._disarm()
            return
        if not self.fresh:
            self.fed += len(data)
        if self.fed - self.body > self.limits.head_bytes + FRAMING * self.body:
            self._head_too_large()
        elif self.timer is None:
            self._arm()

    # -- what the parser calls

    def on_message_begin(self: Any) -> None:
        super().on_message_begin()  # type: ignore[misc]
        self._begin()

    def on_url(self: Any, url: bytes) -> None:
        self.head += len(url)
        super().on_url(url)  # type: ignore[misc]

    def on_header(self: Any, name: bytes, value: bytes) -> None:
        self.head += len(name) + len(value) + 4  # ": " and the end of the line
        self.fields += 1
        if self.head > self.limits.head_bytes or self.fields > self.limits.head_fields:
            self._head_too_large()
        if not self.deaf:
            super().on_header(name, value)  # type: ignore[misc]

    def on_headers_complete(self: Any) -> None:
        if self.head > self.limits.head_bytes:
            self._head_too_large()
        if self.deaf:
            return
        self.in_head = False
        self._disarm()
        super().on_headers_complete()  # type: ignore[misc]

    def on_body(self: Any, body: bytes) -> None:
        self.body += len(body)
        if not self.deaf:
            super().on_body(body)  # type: ignore[misc]

    def on_message_complete(self: Any) -> None:
        self.open = False
        if not self.deaf:
            self._disarm()  # what follows in the same piece has a time of its own
            super().on_message_complete()  # type: ignore[misc]

    def send_400_response(self: Any, msg: str) -> None:
        """What uvicorn calls for bytes that are no HTTP."""
        self._refuse(
            400, "this is not HTTP", got="bytes that do not parse", expected="an HTTP request",
            fix="send a request line, headers and a body as long as Content-Length says",
        )  # fmt: skip

    # -- refusals

    def _begin(self: Any) -> None:
        self.open = self.in_head = self.fresh = True
        self.fed = self.body = self.head = self.fields = 0

    def _arm(self: Any) -> None:
        seconds = self.limits.head_seconds if self.in_head else self.limits.body_seconds
        self.timer = self.loop.call_later(seconds, self._too_slow)

    def _disarm(self: Any) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _head_too_large(self: Any) -> None:
        self._refuse(
            431, "the request's head is too large", got=f"more than {self.limits.head_bytes} bytes, or "
            f"{self.limits.head_fields} headers", expected="less", fix="send text in the body, and fewer headers",
        )  # fmt: skip

    def _too_slow(self: Any) -> None:
        self.timer = None
        if self.silent:  # opened in advance, as browsers do: a 408 could be taken for the answer to what is sent next
            self.deaf = True
            self.transport.close()
            return
        part, seconds = ("head", self.limits.head_seconds) if self.in_head else ("body", self.limits.body_seconds)
        self._refuse(
            408, f"the request's {part} did not come to its end", got=f"{seconds:g} s", expected="a whole request",
            fix="send it at once; as long as Content-Length says, or with a last chunk of 0",
        )  # fmt: skip

    def _refuse(self: Any, status: int, what: str, **words: Any) -> None:
        """Answer and end the connection; an answer that is on its way already is sent first and ends it."""
        if self.deaf or self.transport.is_closing():
            self.deaf = True
            return
        self.deaf = True
        self._disarm()
        self._unset_keepalive_if_required()
        cycle = self.cycle
        reading = cycle is not None and self.open and not self.in_head  # the cycle is of the message that is refused
        if self.pipeline:  # several wait for their turn: no answer of ours may overtake theirs
            self.transport.close()
        elif cycle is not None and not cycle.response_complete and (not reading or cycle.response_started):
            cycle.keep_alive = False
        elif reading and cycle.response_complete:  # only its body went on
            self.transport.close()
        else:
            self.transport.write(answer_bytes(status, what, **words))
            if reading:
                cycle.disconnected = True
                cycle.message_event.set()
            if status == 503:
                self.transport.close()
            else:  # what is unread when a socket closes resets the connection, and the client never sees the answer
                self.transport.write_eof()
                self.timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)
