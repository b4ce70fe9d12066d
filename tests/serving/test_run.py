"""`unidec serve` as a process: it listens, gets ready, and ends as it should."""

from __future__ import annotations

import asyncio
import functools
import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unidec.config import Serve
from unidec.errors import ConfigError
from unidec.serving import serve as run

SETS = ("--set", "serve.threads=1", "--set", "serve.runtime=torch")


Start = Callable[..., subprocess.Popen[str]]


def serve(python: list[str], bundle: Path, *more: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*python, "-m", "unidec.cli", "serve", str(bundle), "--port", "0", *SETS, *more],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=bundle.parent,
        env=os.environ | environment,
    )


@pytest.fixture
def start(warm_python: list[str]) -> Start:
    """`start(bundle, *words)`: the process."""
    return functools.partial(serve, warm_python)


def line(process: subprocess.Popen[str], begins: str) -> str:
    assert process.stdout is not None
    for text in process.stdout:
        if text.startswith(begins):
            return text
    assert process.stderr is not None
    raise AssertionError(process.stderr.read())


def ask(port: int, body: Any, path: str = "/predict") -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    reply = connection.getresponse()
    answer = reply.status, json.loads(reply.read())
    connection.close()
    return answer


def status_for_host(port: int, host: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/healthz", headers={"host": host})
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_it_serves_and_ends_in_order(start: Start, folder: Path, number: signal.Signals) -> None:
    """Listens at once, says when it is ready, answers, and after the signal answers what was asked
    and exits with 0.
    """
    process = start(folder)
    try:
        port = int(re.search(r":(\d+)$", line(process, "serve: listening").strip())[1])  # type: ignore[index]
        ready = line(process, "serve: ready")
        assert re.search(r"after [\d.]+ s: bundle [0-9a-f]{16}, torch, 400 labels", ready), ready
        status, answer = ask(port, {"queries": ["red car blue boat"] * 3, "k": 2})
        assert status == 200
        assert [len(query["labels"]) for query in answer["predictions"]] == [
            2,
            2,
            2,
        ]
        assert status_for_host(port, "localhost") == 200
        assert status_for_host(port, "page.example") == 421, "of a page that points at this machine"
        replies: list[int] = []
        many = [f"query {i} {j}" for i in range(16) for j in range(16)]
        asking = [
            threading.Thread(target=lambda: replies.append(ask(port, {"queries": many})[0]))
            for _ in range(3)
        ]
        for thread in asking:
            thread.start()
        time.sleep(0.3)
        process.send_signal(number)
        for thread in asking:
            thread.join(30)
        assert replies == [200] * 3, "what was asked before is answered"
        assert process.wait(20) == 0
    finally:
        process.kill()
        _, errors = process.communicate()
    assert "Traceback" not in errors, errors


class Load:
    """64 clients of `/predict`, half of them on connections that they keep, until nothing listens
    any more.

    Attributes:
        seen: how many answers with and without `connection: close`, refused connections, and errors
        by type.
    """

    BODY = json.dumps({"queries": ["red car"], "k": 2}).encode()
    HEAD = (
        b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n"
    )

    def __init__(self, port: int) -> None:
        self.port = port
        self.seen = Counter[str]()

    async def until_it_stops(self, process: subprocess.Popen[str]) -> None:
        clients = asyncio.gather(*(self._client(number % 2 == 0) for number in range(64)))
        while self.seen["200"] <= 64:
            await asyncio.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(clients, 20)

    async def _client(self, keeps: bool) -> None:
        closed = True
        while True:
            if closed:
                try:
                    reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                except (ConnectionRefusedError, ConnectionResetError):
                    # reset: the system had completed the handshake when the listener closed; no
                    # request was sent yet
                    self.seen["refused"] += 1
                    return
            writer.write(self.HEAD % len(self.BODY) + self.BODY)
            try:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(re.search(rb"content-length: (\d+)", head)[1]))  # type: ignore[index]
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                self.seen[type(error).__name__] += 1
                closed = True
                continue
            ends = b"connection: close" in head
            self.seen[f"{head[9:12].decode()} close" if ends else head[9:12].decode()] += 1
            if closed := ends or not keeps:
                writer.close()
            await asyncio.sleep(0.01)


def test_nohup_keeps_it_serving(folder: Path) -> None:
    words = [sys.executable, "-m", "unidec.cli", "serve", str(folder), "--port", "0", *SETS]
    process = subprocess.Popen(
        ["nohup", *words],
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder.parent,
    )
    try:
        port = int(line(process, "serve: listening").strip().rpartition(":")[2])
        line(process, "serve: ready")
        process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert ask(port, {"queries": ["red car"]})[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


def test_as_many_files_may_be_open_as_the_system_allows() -> None:
    """In a process of its own: a limit of this one would stay."""
    code = (
        "import resource; from unidec.serving import serve; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4000)); serve.allow_open_files(); "
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == ["4000"]


def test_sigterm_resets_no_connection(start: Start, folder: Path) -> None:
    """Every request that was sent is answered; then with `connection: close`, and new connections
    are refused.
    """
    process = start(folder)
    try:
        port = int(line(process, "serve: listening").strip().rpartition(":")[2])
        line(process, "serve: ready")
        load = Load(port)
        asyncio.run(load.until_it_stops(process))
        assert set(load.seen) == {"200", "200 close", "refused"}, load.seen
        assert load.seen["refused"] == 64
        assert load.seen["200"] > 64
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_client_that_resets_is_no_internal_error_and_100_mb_are_413(
    start: Start, folder: Path
) -> None:
    process = start(folder)
    try:
        port = int(line(process, "serve: listening").strip().rpartition(":")[2])
        line(process, "serve: ready")
        body = json.dumps({"queries": [f"red car {row}" for row in range(256)], "k": 100}).encode()
        for row in range(60):
            with socket.create_connection(("127.0.0.1", port)) as client:
                # close resets
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.sendall(
                    Load.HEAD % len(body) + body
                    if row % 2
                    else b"GET /openapi.json HTTP/1.1\r\n\r\n" * 50
                )
                time.sleep(0.002 * (row % 7))
        status, answer = ask(port, "x" * 100_000_000)
        assert status == 413 and answer["error"]["expected"] == "at most 1000000 bytes"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
            counted = reply.read().decode()
        assert 'kind="client_gone"' in counted and 'kind="internal"' not in counted
    finally:
        process.kill()
        _, errors = process.communicate()
    assert "Traceback" not in errors, errors


def test_a_bundle_that_is_damaged_ends_it_with_the_error(
    start: Start, folder: Path, tmp_path: Path
) -> None:
    import shutil

    bad = tmp_path / "bundle"
    shutil.copytree(folder, bad)
    name = next(bad.glob("model/**/*.safetensors"))
    name.write_bytes(name.read_bytes()[:-1] + b"x")
    process = start(bad)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 4, errors
    assert "error: " in errors and name.name in errors and "Traceback" not in errors
    assert "ready" not in output


def test_no_bundle_and_an_address_that_is_taken_are_said_at_once(
    start: Start, folder: Path, tmp_path: Path
) -> None:
    process = start(tmp_path / "none")
    assert "error: " in process.communicate(timeout=60)[1]
    assert process.returncode == 4
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start(folder, "--port", str(taken.getsockname()[1]))
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == 2 and "cannot listen" in errors and "--port 0" in errors


def test_a_host_that_others_reach_wants_a_key(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for host, key, warned in (
        ("127.0.0.1", "", False),
        ("localhost", "", False),
        ("::1", "", False),
        ("127.8.9.1", "", False),
        ("0.0.0.0", "", True),
        ("0.0.0.0", "key", False),
        ("example.test", "", True),
        ("0.0.0.0", "  ", True),
    ):
        caplog.clear()
        monkeypatch.setenv("UNIDEC_API_KEY", key)
        assert run._api_key(Serve(host=host)) == (key.strip() or None)
        assert ("UNIDEC_API_KEY" in caplog.text) == warned, host


def test_what_is_not_installed_is_named_with_the_fix(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "httptools.py").write_text("raise ModuleNotFoundError(name='httptools')")
    process = serve([sys.executable], folder, PYTHONPATH=str(tmp_path))
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 1 and "httptools is not installed" in errors
    assert "pip install 'unidec-xmc[serve]'" in errors and "Traceback" not in errors


def test_no_address_to_listen_at() -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        run._listen(Serve(host="no.such.host.invalid"))
