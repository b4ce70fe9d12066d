"""Identifies the process that works on something, and checks whether it still runs."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

# tolerance: the clock that start times are computed from may have been adjusted
_SECONDS_APART = 5.0


def this_process() -> dict[str, Any]:
    """{"host", "pid", "started" (seconds since 1970)} of the calling process; see `is_alive`."""
    import psutil

    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
    }


def is_alive(holder: Mapping[str, Any] | None) -> bool | None:
    """Whether the process described by `this_process` still runs (not another one that reuses its
    id); None if this machine cannot tell.
    """
    import psutil

    try:
        if not holder or holder["host"] != socket.gethostname():
            return None
        process = psutil.Process(int(holder["pid"]))
        is_the_same = abs(process.create_time() - float(holder["started"])) < _SECONDS_APART
        return is_the_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except (KeyError, TypeError, ValueError):
        return None
