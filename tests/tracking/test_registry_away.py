"""A registry that is down, hangs, is locked or damaged: what was fetched before is
used, and said.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import socket
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.followed_server import FollowedRegistry
from helpers.served_bundle import make_served_bundle

import unidec
from unidec.config import Serve
from unidec.data.storage import folder_sha256
from unidec.errors import ArtifactError, ConfigError
from unidec.serving.engine import Service
from unidec.serving.follow import Follower
from unidec.tracking import fetch
from unidec.tracking.fetch import RegistryAway, bundle_folder, last_known, note_known

SOURCE = "models:/served@champion"
KINDS = [
    "refused",
    "hangs",
    "locked",
    "damaged",
    "pages",
    "truncated",
    "a folder",
    "html",
    "list",
    "number",
    "object",
    "error 500",
]
GARBAGE = {
    "html": b"<html>sign in</html>",
    "list": b"[]",
    "number": b"7",
    "object": b'{"registered_model": 7}',
    "error 500": b"oops",
}


@contextlib.contextmanager
def garbage(kind: str) -> Iterator[str]:
    """A server that answers everything with something that is no registry's answer."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = GARBAGE[kind]
            self.send_response(500 if kind == "error 500" else 200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_POST = do_GET

        def log_message(self, *_: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def broken(kind: str, database: Path) -> Iterator[str]:
    """The address of the registry, broken like this."""
    if kind in GARBAGE:
        with garbage(kind) as uri:
            yield uri
        return
    if kind in ("refused", "hangs"):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            if kind == "refused":
                listener.close()
            yield f"http://127.0.0.1:{listener.getsockname()[1] if kind == 'hangs' else 9}"
        return
    data = database.read_bytes()
    with contextlib.ExitStack() as stack:
        if kind == "locked":
            locks = stack.enter_context(contextlib.closing(sqlite3.connect(database)))
            locks.execute("BEGIN EXCLUSIVE")
        elif kind == "a folder":
            database.unlink()
            database.mkdir()
        else:
            parts = {
                "damaged": b"garbage " * 1000,
                "pages": data[:100] + b"\xee" * 200_000,
                "truncated": data[:5000],
            }
            database.write_bytes(parts[kind])
        yield f"sqlite:///{database}"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A registry with one version, whose bundle can be served."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fetch, "LOCK_SECONDS", 0.5)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    followed = FollowedRegistry(tmp_path, make_served_bundle, versions=1, num_labels=40)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", followed.uri)
    return SimpleNamespace(
        database=tmp_path / "store" / "mlflow.db", followed=followed, root=tmp_path
    )


def remember(project: SimpleNamespace, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the version had been fetched from this address."""
    noted = last_known(project.followed.uri, SOURCE)
    assert noted is not None
    note_known(uri, SOURCE, noted)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_known_version_is_used_and_said(
    project: SimpleNamespace,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = bundle_folder(SOURCE)
    expected = unidec.load(SOURCE, "torch").predict(["redcar"], k=3)
    with broken(kind, project.database) as uri:
        remember(project, uri, monkeypatch)
        with pytest.raises(RegistryAway):  # nothing was fetched for this address
            bundle_folder("models:/served@challenger")
        caplog.clear()
        begun = time.monotonic()
        assert bundle_folder(SOURCE) == folder
        assert unidec.load(SOURCE, "torch").predict(["redcar"], k=3) == expected
        assert time.monotonic() - begun < 20
        said = caplog.text
        assert "the registry does not answer" in said and "using version 1" in said
        assert f"{SOURCE} named at 20" in said, "since when"
        follower = Follower(Service(Serve()), SOURCE, Serve(runtime="torch", follow_seconds=0))
        follower.start()
        assert follower.first.result(30).version == "1"
        follower.stop()
        state = follower.state()
        assert (
            state["registry"] == "away"
            and f"serving version 1, which {SOURCE} named at" in state["problem"]
        )


def test_without_a_copy_or_with_a_damaged_one_it_is_an_error(
    project: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = bundle_folder(SOURCE)
    with broken("refused", project.database) as uri:
        remember(project, uri, monkeypatch)
        name = next(folder.glob("*.arrow"))
        name.write_bytes(name.read_bytes()[:-1] + b"x")
        with pytest.raises(ArtifactError, match="does not answer"):
            bundle_folder(SOURCE)


def test_an_answer_counts_even_if_it_is_no(project: SimpleNamespace) -> None:
    """An alias that is gone is no registry that is away: another model is never used silently."""
    bundle_folder(SOURCE)
    project.followed.client.delete_registered_model_alias("served", "champion")
    with pytest.raises(ConfigError, match="no such alias"):
        bundle_folder(SOURCE)


def test_an_intact_copy_is_used_in_a_read_only_folder(project: SimpleNamespace) -> None:
    folder = bundle_folder(SOURCE)
    before = sorted(path.name for path in fetch.COPIES.iterdir())
    lock = fetch.COPIES / f".{folder.name}.lock"
    lock.unlink(missing_ok=True)
    assert bundle_folder(SOURCE) == folder and not lock.exists()
    assert folder_sha256(folder) == project.followed.hashes["1"] and before


def test_a_server_and_a_prediction_say_it_in_a_process_of_their_own(
    project: SimpleNamespace, warm_python: list[str]
) -> None:
    """From the start, with the damaged database that the issue names."""
    environment = os.environ | {"MLFLOW_TRACKING_URI": project.followed.uri}
    words = [*warm_python, "-m", "unidec.cli"]
    run: dict[str, Any] = {
        "capture_output": True,
        "text": True,
        "cwd": project.root,
        "env": environment,
    }
    predict = [
        *words,
        "predict",
        "redcar oldboat",
        "--bundle",
        SOURCE,
        "--runtime",
        "torch",
        "--json",
    ]
    before = subprocess.run(predict, check=True, **run)
    project.database.write_bytes(b"garbage " * 1000)
    after = subprocess.run(predict, check=True, **run)
    assert after.stdout == before.stdout
    assert len(json.loads(after.stdout.splitlines()[0])) > 1
    assert "using version 1" in after.stderr and "Traceback" not in after.stderr
    server = subprocess.Popen(
        [*words, "serve", SOURCE, "--port", "0", "--set", "serve.runtime=torch"],
        cwd=project.root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    ready = any(line.startswith("serve: ready") for line in server.stdout)
    server.send_signal(signal.SIGTERM)
    _, errors = server.communicate(timeout=30)
    assert ready and server.returncode == 0, errors
    assert "serving version 1" in errors and "Traceback" not in errors


def test_the_database_of_another_mlflow_is_away(
    project: SimpleNamespace, warm_python: list[str]
) -> None:
    with contextlib.closing(sqlite3.connect(project.database)) as opened:
        opened.execute("UPDATE alembic_version SET version_num = 'ffffffffffff'")
        opened.commit()
    code = (
        "from unidec.tracking.fetch import bundle_folder; bundle_folder('models:/served@champion')"
    )
    done = subprocess.run(
        [*warm_python, "-c", code], capture_output=True, text=True, cwd=project.root
    )
    assert "RegistryAway" in done.stderr
