"""Prefect's temporary server, started before a flow is imported instead of after.

Where no server is configured, Prefect imports the server's code into the flow's process, starts the server and waits.
Here the same server starts first, in a process of its own, while the flow's process imports what it needs; Ctrl-C does
not reach it, and it ends when the flow's process is gone, however that ended.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator

import flows  # noqa: F401  Prefect's settings, which the server's process inherits

TIMEOUT_S = 120.0
# what Prefect sets for its own temporary server
_ENVIRONMENT = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}

_process: subprocess.Popen[bytes] | None = None
_address = ""


def start() -> None:
    """Starts the server and returns at once; no effect where the environment names a server or a profile."""
    global _process, _address
    if _process is not None or os.environ.get("PREFECT_API_URL") or os.environ.get("PREFECT_PROFILE"):
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    _address = f"http://127.0.0.1:{port}/api"
    _process = subprocess.Popen(
        [sys.executable, "-m", "flows.server", str(port), str(os.getpid())],
        env={**os.environ, **_ENVIRONMENT},
        start_new_session=True,
    )
    atexit.register(stop)  # registered first, it runs last: Prefect sends its last logs and events at exit


def stop() -> None:
    """Stops the server, if one was started; at exit at the latest."""
    global _process
    if _process is None:
        return
    _process.terminate()
    try:
        _process.wait(5)
    except subprocess.TimeoutExpired:
        _process.kill()
    _process = None


@contextlib.contextmanager
def running(meanwhile: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Flows called inside report to the temporary server, unless Prefect's settings name another one.

    Args:
        meanwhile: called while the server starts.
    """
    from prefect.settings import PREFECT_API_URL, PREFECT_UI_URL, temporary_settings

    if PREFECT_API_URL.value():
        stop()  # a profile or a file names a server
    else:
        start()
    meanwhile()
    end = time.monotonic() + TIMEOUT_S
    while _process is not None and _process.poll() is None and time.monotonic() < end:
        try:
            urllib.request.urlopen(f"{_address}/health", timeout=5).close()
        except OSError:
            time.sleep(0.05)
            continue
        with temporary_settings({PREFECT_API_URL: _address, PREFECT_UI_URL: ""}):  # it has no pages
            yield
        return
    stop()  # Prefect starts its own and reports why that fails
    yield


def main() -> None:
    """The server's process."""
    import uvicorn
    from psutil import NoSuchProcess

    from unidec.pipeline.parent_watch import watch

    try:
        watch(int(sys.argv[2]))  # not os.getppid(): the flow's process may be gone already
    except NoSuchProcess:
        return
    uvicorn.run(
        "prefect.server.api.server:create_app", factory=True, host="127.0.0.1", port=int(sys.argv[1]),
        log_level="error", lifespan="on",
    )  # fmt: skip


if __name__ == "__main__":
    main()
