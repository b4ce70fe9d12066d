"""Which process works on a run: its machine, number and time of start, so that one that is gone is known as gone."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_SECONDS_APART = 5.0  # the clock that a start is told by may be set a little meanwhile


def this_process() -> dict[str, Any]:
    """{"host", "pid", "started" (seconds since 1970)} of the process that asks."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid())}


def is_alive(holder: Mapping[str, Any] | None) -> bool | None:
    """Whether a process that `this_process` described still runs; None where that cannot be known from here.

    A number that another process got meanwhile is told by its time of start.
    """
    try:
        if not holder or holder["host"] != socket.gethostname():
            return None
        started, then = _started(int(holder["pid"])), holder["started"]
    except (KeyError, TypeError, ValueError):
        return None
    if started is None or then is None:
        return started is not None
    return abs(started - float(then)) < _SECONDS_APART


def left_running(run_dirs: Iterable[Path]) -> list[Path]:
    """Of training folders, those whose MLflow run was never ended though the process that held it is gone."""
    return [path for path in run_dirs if _is_open(state := tracking_state(path)) and is_alive(state["holder"]) is False]


def tracking_state(run_dir: Path) -> dict[str, Any]:
    """What `tracking.json` of a training folder holds; {} where there is none, or it is damaged."""
    try:
        state = json.loads((run_dir / "tracking.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def _is_open(state: Mapping[str, Any]) -> bool:
    return bool(state.get("holder")) and state.get("status") is None


def _started(pid: int) -> float | None:
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:
        return 0.0
