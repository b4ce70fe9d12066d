"""One connection: uvicorn's protocol on httptools, with the bounds for which uvicorn has no
options.

A client costs little processor time, little memory and one of `serve.max_connections`, whatever
bytes it sends and however slowly: the parser is written in C (h11 takes forty times as long for a
body of one-byte chunks, and blocks all other clients meanwhile), and what is unfinished, slow or
idle is bounded here. Bounds of whole requests are in `middleware.py`."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from unidec.serving.errors import RequestError

HEAD_BYTES = 65_536  # of a request; of its trailers, too
MAX_TARGET = 16_384  # bytes of path and query string
# from the first byte of a head to its last; also for a new connection to begin one
HEAD_SECONDS = 10.0
READ_SECONDS = 10.0  # a client that reads nothing of its answer for this time is gone
MAX_PIECES = 10_000  # of a body: chunks, or what arrived at once
MAX_PIPELINED = 100  # requests that wait behind the one being answered
_ROOM = 128  # a full server ends this share (1/128) of its idle connections at once


class Connection(HttpToolsProtocol):
    """A connection whose unfinished heads, pieces of bodies, pipelined requests and idle time are
    bounded.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: Any = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.max_connections = self.limit_concurrency
        self.limit_concurrency = None  # uvicorn would count requests of ended connections, too
        self.is_proven = False  # whether it had an answer already
        self.waits_since = self.loop.time()
        self._refused: RequestError | None = None
        self._unfinished = 0  # bytes since the last part of a request was complete
        self._pieces = 0
        self._has_progress = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.max_connections is not None and len(self.connections) > self.max_connections:
            self._make_room(self.max_connections)
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._slow_head)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head_timer()
        self._end_read_timer()
        super().connection_lost(exc)

    # -- room for others

    def waits_for_client(self) -> bool:
        """Whether the next step is the client's: to send, or to read its answer."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body or self.flow.write_paused

    def _make_room(self, most: int) -> None:
        """End the connections that wait longest for their client, first those that never had an
        answer; if there are none, this one is answered with 503.
        """
        others: list[Any] = [one for one in self.connections if one is not self]
        waiting = [one for one in others if one.waits_for_client()]
        waiting.sort(key=lambda one: (one.is_proven, one.waits_since))
        for one in waiting[: 1 + most // _ROOM]:
            one.transport.abort()
            self.connections.discard(one)
        if not waiting:
            self.app = _full

    # -- what arrives

    def data_received(self, data: bytes) -> None:
        self._has_progress = False
        super().data_received(data)
        if self._has_progress:
            self._unfinished = 0
            return
        self._unfinished += len(data)
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._slow_head)
        if self._unfinished > HEAD_BYTES:
            self._end(large_head(f"at most {HEAD_BYTES} bytes"))

    def on_url(self, url: bytes) -> None:
        if len(self.url) + len(url) > MAX_TARGET:
            raise self._refuse(
                "the address is too long", f"at most {MAX_TARGET} bytes", "shorten it", 414
            )
        super().on_url(url)

    def on_headers_complete(self) -> None:
        self._progress()
        self._pieces = 0
        if len(self.pipeline) >= MAX_PIPELINED:
            raise self._refuse(
                "too many requests at once", f"at most {MAX_PIPELINED}", "wait for answers"
            )
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._progress()
        self._pieces += 1
        if self._pieces > MAX_PIECES:
            raise self._refuse(
                "a body of too many pieces", f"at most {MAX_PIECES}", "send larger chunks"
            )
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._progress()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self.is_proven = True
        self.waits_since = self.loop.time()
        super().on_response_complete()

    def _progress(self) -> None:
        self._has_progress = True
        if self._head_timer is not None:
            self._end_head_timer()

    def _end_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _slow_head(self) -> None:
        if not self._unfinished:  # it never began
            self.transport.close()
            return
        expected = f"all of it within {HEAD_SECONDS:g} s"
        fix = "send it at once"
        self._end(
            RequestError(
                408, "slow_head", "the head did not arrive in time", expected=expected, fix=fix
            )
        )

    # -- what is sent

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._end_read_timer()
        super().resume_writing()

    def _watch_reader(self, unsent: int) -> None:
        self._end_read_timer()
        self._read_timer = self.loop.call_later(READ_SECONDS, self._slow_reader, unsent)

    def _slow_reader(self, unsent_before: int) -> None:
        unsent = self.transport.get_write_buffer_size()
        if unsent < unsent_before:
            self._watch_reader(unsent)
        else:
            self.transport.abort()

    def _end_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    # -- refusals, before or beside the application

    def _refuse(self, what: str, expected: str, fix: str, status: int = 400) -> RequestError:
        self._refused = RequestError(status, "broken_http", what, expected=expected, fix=fix)
        return self._refused

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn when the parser, or a bound above, refuses."""
        expected = "a request of HTTP/1.1"
        fix = "use a client of HTTP"
        self._end(
            self._refused or RequestError(400, "broken_http", msg, expected=expected, fix=fix)
        )

    def _end(self, error: RequestError) -> None:
        if self.transport.is_closing():
            return
        cycle = self.cycle
        is_answering = cycle is not None and cycle.response_started and not cycle.response_complete
        if is_answering or self.pipeline:  # this would be read as a part of another answer
            self.transport.abort()
            return
        body = error.body()
        lines = [
            b"content-type: application/json",
            b"content-length: %d" % len(body),
            b"connection: close",
        ]
        self.transport.write(STATUS_LINE[error.status] + b"\r\n".join([*lines, b"", body]))
        self.transport.close()


async def _full(scope: Any, receive: Any, send: Any) -> None:
    """The application of a connection for which there is no room."""
    fix = "retry after Retry-After seconds"
    error = RequestError(
        503, "overload", "too many connections", fix=fix, retry_after=1, close=True
    )
    body = error.body()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *error.headers,
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def large_head(expected: str) -> RequestError:
    """The refusal of a head with too many bytes or headers."""
    parts: dict[str, Any] = {"where": "headers", "expected": expected, "fix": "send fewer headers"}
    return RequestError(431, "large_head", "the head is too large", close=True, **parts)
