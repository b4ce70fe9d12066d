"""A Prefect server that all processes of a test run share: to start one takes ten seconds of a
processor.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock
from helpers.ports import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 280.0
# starts the server and exits at once: detached, it is not among a test's child processes
START = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
MIGRATE = """
import asyncio
from prefect.server.database import provide_database_interface
asyncio.run(provide_database_interface().create_db())
"""


def address(own_folder: Path) -> str:
    """Address of the server's API; starts it if no other process did. It ends with the test run.

    Args:
        own_folder: where this process of pytest makes its temporary folders.
    """
    folder, run = run_folder(own_folder)
    place = folder / "prefect.json"
    with FileLock(folder / "prefect.lock"):
        if not place.exists():
            (folder / "prefect").mkdir()
            shutil.copy(empty_database(own_folder), folder / "prefect")
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


def empty_database(own_folder: Path) -> Path:
    """A new database of Prefect, made once in a test run: its migrations take eight seconds of a
    processor.

    Args:
        own_folder: as for `address`.
    """
    folder, _ = run_folder(own_folder)
    home = folder / "prefect-empty"
    with FileLock(folder / "prefect-empty.lock"):
        if not home.exists():
            begun = folder / "prefect-begun"
            environment = _without_prefect() | {"PREFECT_HOME": str(begun)}
            subprocess.run([sys.executable, "-c", MIGRATE], check=True, env=environment)
            begun.rename(home)
    return home / "prefect.db"


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """Flows called meanwhile in this process report to this server."""
    import flows  # noqa: F401  quiets Prefect before it is imported

    from prefect.context import _temporary_global_settings_context, get_settings_context  # isort: skip
    from prefect.settings import PREFECT_API_URL, temporary_settings

    # also for Prefect's own threads, as in its test harness: else a pool of processes starts
    # another server
    with (
        temporary_settings({PREFECT_API_URL: address}),
        _temporary_global_settings_context(get_settings_context()),
    ):
        yield


def run_folder(own_folder: Path) -> tuple[Path, int]:
    """The folder that all processes of the test run share, and the process that outlives them."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return own_folder.parent, os.getppid()
    return own_folder, os.getpid()


def _without_prefect() -> dict[str, str]:
    """The environment without Prefect's variables."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}


def _start(folder: Path, run: int) -> int:
    from flows.server import _ENVIRONMENT

    port = free_port()
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
            env=_without_prefect() | _ENVIRONMENT | {"PREFECT_HOME": str(folder / "prefect")},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    return port
