"""Which process holds a run: host, process id and start time, so that a reused process id is not mistaken for it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

_SECONDS_APART = 5.0  # the clock that a start time is computed from may have been set a little


def this_process() -> dict[str, Any]:
    """{"host", "pid", "started" (seconds since 1970)} of the calling process."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid())}


def is_alive(holder: Mapping[str, Any] | None) -> bool | None:
    """Whether a process that `this_process` described still runs; None where that cannot be known from here."""
    try:
        if not holder or holder["host"] != socket.gethostname():
            return None
        started, then = _started(int(holder["pid"])), holder["started"]
    except (KeyError, TypeError, ValueError):
        return None
    if started is None or then is None:
        return started is not None
    return abs(started - float(then)) < _SECONDS_APART


def _started(pid: int) -> float | None:
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:
        return 0.0
