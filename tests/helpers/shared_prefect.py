"""A Prefect server that all processes of a test run share: to start one takes ten seconds of a
processor.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from filelock import FileLock
from helpers.ports import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 280.0
# starts the server and exits at once: detached, it is not among a test's child processes
START = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"


def address(own_folder: Path) -> str:
    """Address of the server's API; starts it if no other process did. It ends with the test run.

    Args:
        own_folder: where this process of pytest makes its temporary folders.
    """
    folder = own_folder
    run = os.getpid()
    if "PYTEST_XDIST_WORKER" in os.environ:
        # of the process that started the workers and outlives them
        folder = own_folder.parent
        run = os.getppid()
    place = folder / "prefect.json"
    with FileLock(folder / "prefect.lock"):
        if not place.exists():
            place.write_text(json.dumps(_start(folder, run)))
        port = json.loads(place.read_text())
    found = f"http://127.0.0.1:{port}/api"
    end = time.monotonic() + TIMEOUT_S
    while True:
        try:
            urllib.request.urlopen(f"{found}/health", timeout=5).close()
            return found
        except OSError:
            assert time.monotonic() < end, (folder / "prefect.log").read_text()
            time.sleep(0.05)


def _start(folder: Path, run: int) -> int:
    from flows.server import _ENVIRONMENT

    port = free_port()
    own = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    with (folder / "prefect.log").open("wb") as log:
        subprocess.run(
            [
                sys.executable,
                "-c",
                START,
                sys.executable,
                "-m",
                "flows.server",
                str(port),
                str(run),
            ],
            check=True,
            cwd=REPOSITORY,
            env=own | _ENVIRONMENT | {"PREFECT_HOME": str(folder / "prefect")},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    return port
