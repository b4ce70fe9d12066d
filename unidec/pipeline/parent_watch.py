"""Ends this process when a process that it works for has ended: its parent, or the launcher of a
training.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil

# seconds from SIGTERM to the end of the process: time to finish a step and write a checkpoint
GRACE_S = 30.0
# environment variable of workers: id of the process that launched them
LAUNCHER = "UNIDEC_LAUNCHER"


def watch(*pids: int) -> None:
    """Start a thread that sends SIGTERM to this process when one of these processes, or the
    launcher, has ended, and kills this process after `GRACE_S`.
    """
    launcher = os.environ.get(LAUNCHER)
    candidates = [*pids, int(launcher or 0)]
    watched = [pid for pid in candidates if pid > 1]

    def look() -> None:
        try:
            # psutil also compares start times, because process ids are reused; a zombie is a dead
            # process that has not been reaped yet
            processes = [psutil.Process(pid) for pid in watched]
            while all(
                one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes
            ):
                time.sleep(1.0)
        except psutil.NoSuchProcess:
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_S)
        os._exit(1)

    threading.Thread(target=look, daemon=True, name="unidec-watch").start()
