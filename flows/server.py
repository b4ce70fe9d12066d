"""Prefect's temporary server in a separate process, which starts while the flow's process does
other work.

Without a configured server, Prefect itself would import the server's code into the flow's process
and wait for it. Ctrl-C does not reach the server's process; it ends when the flow's process is
gone."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from unidec.errors import TrainingError
from unidec.tracking.store import answers
from unidec.user import check_writable

TIMEOUT_S = 120.0
LOST = "Prefect's temporary server ended (killed, or out of memory)"
lost = threading.Event()  # set when the server's process ended before the flow
_processes: list[subprocess.Popen[bytes]] = []  # the server's process, once it was started
# a block that is saved registers itself
_ENVIRONMENT = {"PREFECT_UI_ENABLED": "0", "PREFECT_API_BLOCKS_REGISTER_ON_START": "0"}


def is_needed() -> bool:
    """Whether the environment names neither a server nor a profile."""
    return not (os.environ.get("PREFECT_API_URL") or os.environ.get("PREFECT_PROFILE"))


@functools.cache
def start() -> int:
    """Start the server, once, and return its port without waiting; 0 if none is needed.

    Raises:
        ArtifactError: this user cannot write Prefect's folder.
    """
    if not is_needed():
        return 0
    check_writable([Path(os.environ["PREFECT_HOME"])])
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "flows.server", str(port), str(os.getpid())]
    _processes.append(
        subprocess.Popen(command, env={**os.environ, **_ENVIRONMENT}, start_new_session=True)
    )
    return port


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Inside the block, flows report to the temporary server, unless Prefect's settings name
    another one.

    If the server's process ends, this process receives SIGTERM, so that a training saves a
    checkpoint; `lost` is set.

    Raises:
        TrainingError: the server did not start.
    """
    from prefect import context
    from prefect.settings import PREFECT_API_URL, PREFECT_UI_URL, temporary_settings

    port = 0 if PREFECT_API_URL.value() else start()
    end = time.monotonic() + TIMEOUT_S
    if not port:
        yield
        return
    address = f"http://127.0.0.1:{port}/api"
    process = _processes[0]
    while not answers(address) and time.monotonic() < end:
        if process.poll() is not None:
            raise TrainingError(
                f"{LOST} before it answered", fix="run again; its message, if any, is above"
            )
        time.sleep(0.05)
    over = threading.Event()
    threading.Thread(target=_watch, args=(process, over), daemon=True).start()
    # the temporary server has no pages, and no automation that uses heartbeats
    unset = {PREFECT_UI_URL: "", "flows.heartbeat_frequency": None}
    outside = context.GLOBAL_SETTINGS_CONTEXT
    try:
        with temporary_settings({PREFECT_API_URL: address, **unset}):
            # for threads of Prefect's pools of processes: else they start another server
            context.GLOBAL_SETTINGS_CONTEXT = context.get_settings_context()
            yield
    finally:
        context.GLOBAL_SETTINGS_CONTEXT = outside
        over.set()


def _watch(process: subprocess.Popen[bytes], over: threading.Event) -> None:
    process.wait()
    if not over.is_set():
        lost.set()
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """The server's process."""
    import uvicorn
    from psutil import NoSuchProcess
    from pydantic import ValidationError

    try:
        from prefect.server.api.server import create_app
    except ValidationError:  # an invalid setting of Prefect, which the flow's process reports
        sys.exit(1)

    from unidec.pipeline.parent_watch import watch

    with contextlib.suppress(NoSuchProcess):
        watch(int(sys.argv[2]))  # not os.getppid(): the flow's process may be gone already
        uvicorn.run(
            create_app(ephemeral=True, final=True),
            host="127.0.0.1",
            port=int(sys.argv[1]),
            log_level="error",
            lifespan="on",
        )


if __name__ == "__main__":
    main()
