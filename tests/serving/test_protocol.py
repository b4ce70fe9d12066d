"""The protocol's bounds over real sockets: sizes, times, numbers, and that answers keep their order."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("httptools")
uvicorn = pytest.importorskip("uvicorn")

from uvicorn.server import ServerState  # noqa: E402

from unidec.serving.protocol import ConnectionLimits, answer_bytes, http_protocol  # noqa: E402

SHORT = ConnectionLimits(head_bytes=2000, head_fields=20, head_seconds=0.3, body_seconds=0.3, connections=8)
GET = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the number of body bytes; `/early` without reading, `/slow` after a while."""
    size, more = 0, scope["path"] != "/early"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message["body"]), message["more_body"]
    if scope["path"] == "/slow":
        await asyncio.sleep(0.15)
    body = str(size).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def served(talk: Callable[[int, ServerState], Awaitable[Any]], limits: ConnectionLimits = SHORT) -> Any:
    """What `talk(port, state)` returns, beside a server of `echo`."""

    async def main() -> Any:
        config = uvicorn.Config(echo, http=http_protocol(limits), ws="none", log_config=None, lifespan="off")
        config.load()
        state = ServerState()
        make = config.http_protocol_class
        listening = await asyncio.get_running_loop().create_server(
            lambda: make(config=config, server_state=state, app_state={}), "127.0.0.1", 0
        )
        async with listening:
            return await asyncio.wait_for(talk(listening.sockets[0].getsockname()[1], state), 10)

    return asyncio.run(main())


def exchange(*pieces: bytes, pause: float = 0.0, limits: ConnectionLimits = SHORT) -> tuple[bytes, float]:
    """All that is answered until the server closes, and after how many seconds."""

    async def talk(port: int, state: ServerState) -> tuple[bytes, float]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        begun = time.monotonic()

        async def send() -> None:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause)

        sending = asyncio.create_task(send())
        answer = await reader.read(-1)
        seconds = time.monotonic() - begun
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()
        return answer, seconds

    return served(talk, limits)


def refusal(answer: bytes) -> tuple[int, dict]:
    """Status and error of the last answer."""
    head, _, body = answer[answer.rindex(b"HTTP/1.1 ") :].partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head and b"connection: close" in head
    assert f"content-length: {len(body)}".encode() in head
    error = json.loads(body)["error"]
    assert list(error) == ["what", "where", "got", "expected", "fix"] and all(error.values())
    return int(head[9:12]), error


def test_requests_pass_whole_in_pieces_and_pipelined() -> None:
    post = b"POST / HTTP/1.1\r\ncontent-length: 4\r\n\r\nabcd"
    chunked = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 500 + b"0\r\n\r\n"
    last = b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n"
    for pieces in [(GET, post, chunked, last), (GET + post + chunked + last,), [*map(bytes, zip(post + last))]]:
        answer, _ = exchange(*pieces, limits=ConnectionLimits(head_bytes=2000))
        bodies = [part.partition(b"\r\n\r\n")[2] for part in answer.split(b"HTTP/1.1 200 OK\r\n")[1:]]
        assert bodies == ([b"0", b"4", b"500", b"0"] if len(pieces) < 5 else [b"4", b"0"])


@pytest.mark.parametrize(
    "pieces",
    [
        [GET[:-2] + b"x: " + b"y" * 3000 + b"\r\n\r\n"],  # in one piece
        [GET[:-2] + b"x: ", *[b"y" * 100] * 50],  # a value without end
        [GET[:-2] + b"x" * 100, *[b"x" * 100] * 50],  # a name without end
        [b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\n\r\n"],
        [b"GET /", *[b"a" * 100] * 50],
        [GET[:-2] + b"a: b\r\n" * 30 + b"\r\n"],  # many short ones
        [b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n", *[b"t: " + b"y" * 90 + b"\r\n"] * 50],
        [b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1;a=", *[b"y" * 100] * 50],  # a chunk's extension
    ],
    ids=["value", "endless value", "endless name", "path", "endless path", "fields", "trailers", "extension"],
)
def test_a_head_that_is_too_large(pieces: list[bytes]) -> None:
    answer, seconds = exchange(*pieces)
    status, error = refusal(answer)
    assert status == 431 and "2000 bytes" in error["got"] and seconds < 0.25


@pytest.mark.parametrize(
    "begin", [b"GET", GET[:-2], b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\nabc", GET + b"GET / HT"]
)
def test_what_does_not_come_to_its_end(begin: bytes) -> None:
    answer, seconds = exchange(begin)
    status, error = refusal(answer)
    assert status == 408 and ("body" if begin.endswith(b"abc") else "head") in error["what"]
    assert 0.25 < seconds < 1.3


def test_a_connection_that_was_opened_in_advance_is_closed_without_a_word() -> None:
    answer, seconds = exchange()
    assert answer == b"" and 0.25 < seconds < 1


def test_a_byte_now_and_then_does_not_hold_a_connection() -> None:
    for begin, piece in ((GET[:-2], b"a"), (b"POST / HTTP/1.1\r\ncontent-length: 99\r\n\r\n", b"a")):
        answer, seconds = exchange(begin, *[piece] * 99, pause=0.05)
        assert refusal(answer)[0] == 408 and seconds < 1.3


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(99)), b"hello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nname without colon\r\n\r\n", b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 99999999999999999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
        b"POST / HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", b"GET http://[/ HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
        b"GET / HTTP/1.1\r\na: b\0c\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_http(data: bytes) -> None:
    answer, seconds = exchange(data)
    assert refusal(answer)[0] == 400 and seconds < 0.25


def test_the_answer_before_stays_first() -> None:
    """Garbage behind a request that is still being answered: its answer comes, nothing overtakes it."""
    answer, _ = exchange(GET.replace(b"/ ", b"/slow "), b"garbage\r\n\r\n", pause=0.02)
    assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"0") and answer.count(b"HTTP/1.1") == 1


def test_a_large_body_that_was_refused_is_read_so_that_the_answer_arrives() -> None:
    body = b"x" * 20_000_000
    answer, seconds = exchange(b"POST /early HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body), body, GET[:-2],
                               limits=ConnectionLimits(head_seconds=0.3, body_seconds=5))  # fmt: skip
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1 200") == 1 and seconds < 4
    assert refusal(answer)[0] == 408, "and then the next request is awaited"
    endless = [b"x" * 1000] * 99
    answer, seconds = exchange(b"POST /early HTTP/1.1\r\ncontent-length: 999999999\r\n\r\n", *endless, pause=0.02)
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1") == 1 and seconds < 1, "but not for ever"


def test_the_number_of_connections() -> None:
    async def talk(port: int, state: ServerState) -> None:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(SHORT.connections)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        answer = await reader.read(-1)
        assert refusal(answer)[0] == 503 and b"retry-after: 1\r\n" in answer
        for reader, _ in held:
            assert await reader.read(-1) == b""
        writer.close()
        for _, one in held:
            one.close()
        await asyncio.sleep(0.05)
        assert not state.connections
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET)
        assert (await reader.read(99)).startswith(b"HTTP/1.1 200"), "there is room again"
        writer.close()

    served(talk)


def test_a_timer_belongs_to_its_message_only() -> None:
    """A connection that is used again and again lives longer than any one message may take."""

    async def talk(port: int, state: ServerState) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(6):
            writer.write(GET[:20])
            await asyncio.sleep(0.1)
            writer.write(GET[20:])
            assert (await reader.read(999)).startswith(b"HTTP/1.1 200")
        writer.close()

    served(talk)


def test_an_answer_is_http() -> None:
    head, _, body = answer_bytes(503, "w", got="g", expected="e", fix="f", retry_after=2).partition(b"\r\n\r\n")
    assert head.split(b"\r\n")[0] == b"HTTP/1.1 503 Service Unavailable" and b"retry-after: 2" in head
    assert json.loads(body)["error"] == {"what": "w", "where": "connection", "got": "g", "expected": "e", "fix": "f"}
