"""What a flow retries, and what a failure of DVC becomes."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import pytest

from unidec.errors import ArtifactError, ConfigError, DataError, TrainingError


@pytest.fixture(scope="module")
def flows() -> SimpleNamespace:
    from flows import lifecycle, reproduce

    return SimpleNamespace(lifecycle=lifecycle, reproduce=reproduce)


class RefusedByMlflow(Exception):
    def __init__(self, code: str) -> None:
        super().__init__("from the server")
        self.error_code = code


def network_errors() -> list[Exception]:
    import httpx
    import requests

    request = httpx.Request("GET", "http://127.0.0.1")
    return [
        ConnectionResetError("reset"),
        TimeoutError("late"),
        requests.exceptions.ConnectionError("gone"),
        requests.exceptions.ReadTimeout("late"),
        httpx.ConnectError("refused", request=request),
        sqlite3.OperationalError("database is locked"),
        RefusedByMlflow("TEMPORARILY_UNAVAILABLE"),
    ]


def test_only_what_may_recover_is_retried(flows) -> None:
    def is_retried(error: Exception) -> bool:
        found = flows.lifecycle.known(error) or error
        state = SimpleNamespace(result=lambda raise_on_failure: found)
        return flows.lifecycle.worth_retrying(None, None, state)

    assert all(is_retried(error) for error in network_errors())
    full = OSError(errno.ENOSPC, "No space left on device", "/somewhere")
    bugs = [
        KeyError("x"),
        ValueError("y"),
        FileNotFoundError(2, "no", "x"),
        RefusedByMlflow("INVALID_PARAMETER_VALUE"),
    ]
    assert not any(
        is_retried(error)
        for error in [*bugs, full, DataError("bad"), ConfigError("bad"), TrainingError("x")]
    )


def test_what_the_system_refuses_is_one_message(flows, tmp_path: Path) -> None:
    found = flows.lifecycle.known(
        PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "x"))
    )
    assert (
        isinstance(found, ArtifactError)
        and str(tmp_path / "x") in str(found)
        and "chown" in str(found)
    )
    assert flows.lifecycle.known(OSError(errno.EBADF, "Bad file descriptor")) is None


@pytest.mark.parametrize(
    ("code", "message", "stage_code", "kind"),
    [
        (-9, "", None, "killed"),
        (255, "ERROR: failed to reproduce 'train'", -9, "killed"),
        (255, "ERROR: failed to reproduce 'train'", 137, "killed"),
        (
            255,
            "ERROR: Unable to acquire lock. Most likely another DVC process is running",
            None,
            "failed",
        ),
        (
            255,
            "ERROR: failed to push data to the cloud - Connect call failed ('10.0.0.1', 22)",
            None,
            "failed",
        ),
        (255, "ERROR: unexpected error - Read timed out", None, "failed"),
    ],
)
def test_kills_locks_and_networks_may_recover(flows, code, message, stage_code, kind) -> None:
    error = flows.reproduce.failure(["repro"], code, message, stage_code)
    assert isinstance(error, flows.lifecycle.MayRecover) and error.exit_code == 5
    assert kind in str(error) and "run again" in str(error)


@pytest.mark.parametrize(
    ("message", "stage_code", "kind"),
    [
        ("rows.csv:3: bad", 3, DataError),
        ("no GPU", 2, ConfigError),
        (
            "ERROR: failed to reproduce 'ingest': [Errno 2] No such file or directory: 'x'",
            None,
            ConfigError,
        ),
        ("ERROR: 'dvc.yaml' is invalid.", None, ConfigError),
        ("ERROR: failed to push data to the cloud - 403 Forbidden", None, ConfigError),
    ],
)
def test_everything_else_is_final(flows, message, stage_code, kind) -> None:
    error = flows.reproduce.failure(["repro"], 255, message, stage_code)
    assert type(error) is kind
