"""Bounds on what one connection may cost, on a real server in a thread."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.asgi import StubEngine

pytest.importorskip("uvicorn")

import uvicorn

from unidec.config import Serve
from unidec.serving import connection as bounds
from unidec.serving import run
from unidec.serving.app import create_app
from unidec.serving.engine import Service

GET = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n"
BODY = b'{"queries": ["x"]}'
CHUNKED = (
    b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
SIZED = CHUNKED.replace(b"transfer-encoding: chunked", b"content-length: %d" % len(BODY))
Started = Callable[..., Any]


class Running:
    """A server whose engine answers when its gate is open."""

    def __init__(self, engine: Any, settings: Serve) -> None:
        service = Service(settings)
        service.swap(engine)
        self.engine = engine
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        options = run.server_options(settings)
        self.server = uvicorn.Server(uvicorn.Config(create_app(service, settings), **options))
        self.thread = threading.Thread(target=self.server.run, args=([self.listener],))
        self.thread.start()

    def end(self) -> None:
        self.engine.gate.set()
        self.server.should_exit = True
        self.thread.join(20)
        self.listener.close()

    def open(self, data: bytes = b"") -> socket.socket:
        client = socket.create_connection(self.address, timeout=20)
        client.sendall(data)
        return client

    def answer(self, data: bytes) -> bytes:
        """All that a connection of its own answers until it is closed, or 0.2 s after its last
        byte.
        """
        with self.open() as client:
            with contextlib.suppress(ConnectionError):
                client.sendall(data)
            return received(client)

    def until(self, num_connections: int) -> None:
        end = time.monotonic() + 10
        while len(self.server.server_state.connections) != num_connections:
            assert time.monotonic() < end, len(self.server.server_state.connections)
            time.sleep(0.01)


def received(client: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(TimeoutError, ConnectionError):
        while data := client.recv(65536):
            found += data
            client.settimeout(0.2)
    return found


def status(answer: bytes) -> int:
    return int(answer[9:12] or 0)


@pytest.fixture
def started() -> Iterator[Started]:
    running: list[Running] = []

    def start(**settings: Any) -> Running:
        running.append(Running(StubEngine(), Serve(**settings)))
        return running[-1]

    yield start
    for one in running:
        one.end()


def test_what_is_no_request_is_refused_in_json(started: Started) -> None:
    server = started()
    assert status(server.answer(GET + b"\r\n")) == 200
    many_headers = b"".join(b"h%d: x\r\n" % i for i in range(300))
    for data, expected in (
        (b"hello\r\n\r\n", 400),
        (GET + b"host: b\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02", 400),
        (GET + b"x: " + b"y" * 500_000, 431),
        (GET + b"x: y\r\n" * 20_000, 431),
        (GET + many_headers + b"\r\n", 431),
        (GET.replace(b"/healthz", b"/labels/" + b"%2e" * 9000) + b"\r\n", 414),
        (GET.replace(b"/healthz", b"/labels?prefix=" + b"x" * 30_000), 414),
        (GET.replace(b"/healthz", b"/labels?" + b"a=&" * 4000) + b"\r\n", 400),
        (CHUNKED + b"0\r\n" + b"t: x\r\n" * 60_000, 431),
        (CHUNKED + b"zz\r\n", 400),
    ):
        answer = server.answer(data)
        assert status(answer) == expected, (data[:60], answer[:200])
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert error["what"] and error["fix"], data[:60]
    assert status(server.answer(b"GET /healthz HTTP/1.0\r\n\r\n")) == 200, "HTTP/1.0 has no Host"


def test_pieces_of_a_body_are_bounded(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MAX_PIECES", 200)
    server = started()
    fair = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY.ljust(200)) + b"0\r\n\r\n"
    assert status(server.answer(CHUNKED + fair)) == 200
    answer = server.answer(CHUNKED + b"1\r\n \r\n" + fair)
    assert status(answer) == 400 and b"too many pieces" in answer
    server.until(0)


def test_pipelined_requests_are_answered_up_to_a_bound(started: Started) -> None:
    server = started()
    assert server.answer((SIZED + BODY) * 20).count(b"HTTP/1.1 200") == 20
    begun = time.monotonic()
    server.answer((GET + b"\r\n") * 20_000)
    assert time.monotonic() - begun < 5
    server.until(0)


def test_slow_and_silent_clients_are_ended(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "HEAD_SECONDS", 0.5)
    server = started()
    silent = server.open()
    slow = server.open(GET)
    used = server.open(GET + b"\r\n")
    assert status(used.recv(4096)) == 200
    used.sendall(GET)
    for _ in range(4):
        time.sleep(0.2)
        with contextlib.suppress(ConnectionError):
            slow.sendall(b"x")
    assert received(silent) == b""
    assert status(received(slow)) == 408 and status(received(used)) == 408
    server.until(0)
    assert status(server.answer(GET + b"\r\n")) == 200
    for one in (silent, slow, used):
        one.close()


def test_a_client_that_reads_nothing_is_ended(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "READ_SECONDS", 0.3)
    server = started(max_queries=256)
    large = json.dumps({"queries": ["x" * 1000] * 256, "k": 100}).encode()  # its answer has 25 MB
    head = SIZED.replace(b"%d" % len(BODY), b"%d" % len(large))
    client = server.open(head + large)
    time.sleep(1)
    server.until(0)
    client.close()


def test_idle_connections_make_room(started: Started) -> None:
    """A new client is served although all connections are taken by idle ones; one that was served
    before stays.
    """
    server = started(max_connections=6)
    proven = server.open(GET + b"\r\n")
    assert status(proven.recv(4096)) == 200
    begins = [b"", GET, SIZED, SIZED + BODY[:5]]
    idle = [server.open(begins[i % 4]) for i in range(40)]
    for _ in range(5):
        assert status(server.answer(GET + b"\r\n")) == 200
    proven.sendall(GET + b"\r\n")
    assert status(proven.recv(4096)) == 200
    assert len(server.server.server_state.connections) <= 7
    for one in (proven, *idle):
        one.close()


def test_a_busy_server_refuses_more_connections(started: Started) -> None:
    server = started(max_connections=3)
    server.engine.gate.clear()
    busy = [server.open(SIZED + BODY.replace(b"x", b"%d" % i)) for i in range(3)]
    time.sleep(0.3)
    refused = server.answer(GET + b"\r\n")
    assert (
        status(refused) == 503
        and b"too many connections" in refused
        and b"retry-after: 1" in refused
    )
    server.engine.gate.set()
    assert [status(one.recv(4096)) for one in busy] == [200] * 3
    for one in busy:
        one.close()
    server.until(0)
    assert status(server.answer(GET + b"\r\n")) == 200
