"""A process that ends when those it works for are gone: its parent, or the launcher of a training."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil

GRACE_S = 30.0  # from SIGTERM to SIGKILL: time to finish a step and write a checkpoint (fault 5)
LAUNCHER = "UNIDEC_LAUNCHER"  # environment variable: process id and start time of who must be alive for workers


def name_of(pid: int) -> str:
    """A process by its id and its start time: ids are used again."""
    return f"{pid} {psutil.Process(pid).create_time():.2f}"


def watch(*pids: int) -> None:
    """Leave (SIGTERM, later for good) when one of these processes, or the launcher, is gone."""
    names = [name_of(pid) for pid in pids if pid > 1]
    if LAUNCHER in os.environ:
        names.append(os.environ[LAUNCHER])

    def gone(name: str) -> bool:
        try:
            pid = int(name.split()[0])
            # dead, but its parent has not looked yet
            return name_of(pid) != name or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def look() -> None:
        while not any(gone(name) for name in names):
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_S)
        os._exit(1)

    threading.Thread(target=look, daemon=True, name="unidec-watch").start()
