"""Starts the process of `helpers.warm_python` that all processes of a test run share."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from filelock import FileLock
from helpers.shared_prefect import START, run_folder

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 280.0


def words(own_folder: Path) -> list[str]:
    """What starts a program as `sys.executable` does.

    Args:
        own_folder: where this process of pytest makes its temporary folders.
    """
    folder, run = run_folder(own_folder)
    place = folder / "warm"
    with FileLock(f"{place}.lock"):
        if not place.exists():
            _start(place, run)
    client = Path(__file__).with_name("warm_python.py")
    return [sys.executable, "-SE", str(client), str(place)]


def _start(place: Path, run: int) -> None:
    server = [sys.executable, "-W", "ignore", "-m", "helpers.warm_python", str(place), str(run)]
    log = place.with_suffix(".log")
    with log.open("wb") as file:
        subprocess.run(
            [sys.executable, "-c", START, *server],
            check=True,
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY / "tests")},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    end = time.monotonic() + TIMEOUT_S
    while not place.exists():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.05)
