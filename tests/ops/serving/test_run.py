"""`unidec serve` as a process: it listens, gets ready, and ends as it should."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from unidec.errors import ConfigError
from unidec.ops.serving import run
from unidec.sections import Serve

SETS = ("--set", "serve.threads=1", "--set", "serve.runtime=torch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, helper: Any) -> Path:
    made: Path = helper("served_bundle").make_served_bundle(tmp_path_factory.mktemp("served"))
    return made


def start(bundle: Path, *more: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "unidec.cli", "serve", str(bundle), "--port", "0", *SETS, *more], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=bundle.parent, env=os.environ | environment,
    )  # fmt: skip


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


def test_it_serves_and_ends_in_order(folder: Path) -> None:
    """Listens at once, says when it is ready, answers, and after SIGTERM answers what was asked and exits with 0."""
    process = start(folder)
    try:
        port = int(re.search(r":(\d+)$", line(process, "serve: listening").strip())[1])  # type: ignore[index]
        ready = line(process, "serve: ready")
        assert re.search(r"after [\d.]+ s: bundle [0-9a-f]{16}, torch, 400 labels", ready), ready
        status, answer = ask(port, {"queries": ["red car blue boat"] * 3, "k": 2})
        assert status == 200 and [len(query["labels"]) for query in answer["predictions"]] == [2, 2, 2]
        replies: list[int] = []
        many = [f"query {i} {j}" for i in range(16) for j in range(16)]
        asking = [threading.Thread(target=lambda: replies.append(ask(port, {"queries": many})[0])) for _ in range(3)]
        for thread in asking:
            thread.start()
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        for thread in asking:
            thread.join(30)
        assert replies == [200] * 3, "what was asked before is answered"
        assert process.wait(20) == 0
    finally:
        process.kill()
        _, errors = process.communicate()
    assert "Traceback" not in errors, errors


def test_a_bundle_that_is_damaged_ends_it_with_the_error(folder: Path, tmp_path: Path) -> None:
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


def test_no_bundle_and_an_address_that_is_taken_are_said_at_once(folder: Path, tmp_path: Path) -> None:
    process = start(tmp_path / "none")
    assert "error: " in process.communicate(timeout=60)[1] and process.returncode == 4
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start(folder, "--port", str(taken.getsockname()[1]))
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == 2 and "cannot listen there" in errors and "--port 0" in errors


def test_a_host_that_others_reach_wants_a_key(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for host, key, warned in (
        ("127.0.0.1", "", False), ("localhost", "", False), ("::1", "", False), ("127.8.9.1", "", False),
        ("0.0.0.0", "", True), ("0.0.0.0", "key", False), ("example.test", "", True), ("0.0.0.0", "  ", True),
    ):  # fmt: skip
        caplog.clear()
        monkeypatch.setenv("UNIDEC_API_KEY", key)
        assert run._api_key(Serve(host=host)) == (key.strip() or None)
        assert ("UNIDEC_API_KEY" in caplog.text) == warned, host


def test_what_is_not_installed_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_NEEDED", ("json", "no_such_module"))
    with pytest.raises(ConfigError, match="no_such_module") as caught:
        run.serve("nowhere", Serve())
    assert "pip install" in str(caught.value)


def test_no_address_to_listen_at() -> None:
    with (
        pytest.raises(ConfigError, match="no address to listen at"),
        run._listening(Serve(host="no.such.host.invalid")),
    ):
        pass
