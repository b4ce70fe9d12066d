"""Prefect's temporary server, started before a flow is imported instead of after.

Where no server is configured, Prefect imports the server's code into the flow's process, starts the server and waits.
Here the same server starts first, in a process of its own, while the flow's process imports what it needs; Ctrl-C does
not reach it, and it ends when the flow's process is gone, however that ended.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

TIMEOUT_S = 120.0
# what Prefect sets for its own temporary server
_ENVIRONMENT = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}


def start() -> int:
    """Starts the server and returns its port at once; 0 where the environment names a server or a profile."""
    if os.environ.get("PREFECT_API_URL") or os.environ.get("PREFECT_PROFILE"):
        return 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "flows.server", str(port), str(os.getpid())]
    subprocess.Popen(command, env={**os.environ, **_ENVIRONMENT}, start_new_session=True)
    return port


@contextlib.contextmanager
def running(port: int) -> Iterator[None]:
    """Flows called inside report to the server that was started, unless Prefect's settings name another one."""
    from prefect.settings import PREFECT_API_URL, PREFECT_UI_URL, temporary_settings

    address, end = f"http://127.0.0.1:{port}/api", time.monotonic() + TIMEOUT_S
    if not port or PREFECT_API_URL.value():
        yield
        return
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            break
        except OSError:
            time.sleep(0.05)
    with temporary_settings({PREFECT_API_URL: address, PREFECT_UI_URL: ""}):  # it has no pages
        yield


def main() -> None:
    """The server's process."""
    import uvicorn
    from psutil import NoSuchProcess

    from unidec.pipeline.parent_watch import watch

    with contextlib.suppress(NoSuchProcess):
        watch(int(sys.argv[2]))  # not os.getppid(): the flow's process may be gone already
        uvicorn.run(
            "prefect.server.api.server:create_app", factory=True, host="127.0.0.1", port=int(sys.argv[1]),
            log_level="error", lifespan="on",
        )  # fmt: skip


if __name__ == "__main__":
    main()
