"""A process that ends when those it works for are gone: its parent, or the launcher of a training."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil

GRACE_S = 30.0  # from SIGTERM to SIGKILL: time to finish a step and write a checkpoint (fault 5)
LAUNCHER = "UNIDEC_LAUNCHER"  # environment variable: id of the process that must be alive for workers


def watch(*pids: int) -> None:
    """Leave (SIGTERM, later for good) when one of these processes, or the launcher, is gone."""
    launcher = os.environ.get(LAUNCHER)
    watched = [pid for pid in (*pids, *([int(launcher)] if launcher else [])) if pid > 1]

    def look() -> None:
        try:
            processes = [psutil.Process(pid) for pid in watched]  # with their start times: ids are used again
            # a zombie is dead, but its parent has not looked yet
            while all(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes):
                time.sleep(1.0)
        except psutil.NoSuchProcess:
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_S)
        os._exit(1)

    threading.Thread(target=look, daemon=True, name="unidec-watch").start()
