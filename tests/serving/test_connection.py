"""Odd, large and many requests on a real server in a thread: uvicorn, and `middleware.py`."""

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
from unidec.serving.app import create_app
from unidec.serving.engine import Service
from unidec.serving.serve import server_config

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
        self.server = uvicorn.Server(server_config(create_app(service, settings), settings))
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


def test_odd_requests_are_refused(started: Started) -> None:
    """In JSON, if the parser lets them pass."""
    server = started()
    assert status(server.answer(GET + b"\r\n")) == 200
    many_headers = b"".join(b"h%d: x\r\n" % i for i in range(300))
    for data, expected in (
        (GET + b"host: b\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\n\r\n", 400),
        (GET + b"x: " + b"y" * 500_000 + b"\r\n\r\n", 431),
        (GET + many_headers + b"\r\n", 431),
        (GET.replace(b"/healthz", b"/labels/" + b"%2e" * 9000) + b"\r\n", 414),
        (GET.replace(b"/healthz", b"/labels?prefix=" + b"x" * 30_000) + b"\r\n", 414),
        (GET.replace(b"/healthz", b"/labels?" + b"a=&" * 4000) + b"\r\n", 400),
    ):
        answer = server.answer(data)
        assert status(answer) == expected, (data[:60], answer[:200])
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert error["what"] and error["fix"], data[:60]
    two_lengths = CHUNKED.replace(b"transfer", b"content-length: 5\r\ntransfer") + b"0\r\n\r\n"
    for data in (b"hello\r\n\r\n", b"\x16\x03\x01\x02", CHUNKED + b"zz\r\n", two_lengths):
        answer = server.answer(data)
        assert status(answer) == 400 and b"connection: close" in answer, data
    assert status(server.answer(b"GET /healthz HTTP/1.0\r\n\r\n")) == 200, "HTTP/1.0 has no Host"


def test_a_body_in_chunks_of_one_byte(started: Started) -> None:
    server = started()
    fair = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY.ljust(200)) + b"0\r\n\r\n"
    assert status(server.answer(CHUNKED + fair)) == 200


def test_pipelined_requests_are_answered_in_turn(started: Started) -> None:
    server = started()
    assert server.answer((SIZED + BODY) * 20).count(b"HTTP/1.1 200") == 20


def test_idle_and_slow_clients_disturb_no_other(started: Started) -> None:
    server = started(max_connections=6)
    begins = [b"", GET, SIZED[:-2], GET + b"x: y"]
    idle = [server.open(begins[i % 4]) for i in range(40)]
    for _ in range(5):
        assert status(server.answer(GET + b"\r\n")) == 200
    for one in idle:
        one.close()
    server.until(0)


def test_a_busy_server_refuses_more_requests(started: Started) -> None:
    server = started(max_connections=3)
    server.engine.gate.clear()
    busy = [server.open(SIZED + BODY.replace(b"x", b"%d" % i)) for i in range(3)]
    time.sleep(0.3)
    refused = server.answer(GET + b"\r\n")
    assert (
        status(refused) == 503
        and b"too many requests at once" in refused
        and b"retry-after: 1" in refused
    )
    server.engine.gate.set()
    assert [status(one.recv(4096)) for one in busy] == [200] * 3
    for one in busy:
        one.close()
    server.until(0)
    assert status(server.answer(GET + b"\r\n")) == 200
