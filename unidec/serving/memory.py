"""Memory of the server's process: how much is available, and giving back what is not used."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_M_ARENA_MAX = -8  # of glibc's malloc.h


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Bytes that this process may still take: of the machine, and of its container where that has less."""
    import psutil

    free = int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):  # no container, or "max": no limit
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(stat.get("inactive_file", 0)))  # files that are not mapped count as free
    return max(0, free)


def share_one_heap() -> None:
    """Makes threads that start from now on share one heap. glibc gives each its own, and long-lived objects (cached
    answers) leave holes in all of them: memory grows by half a heap though nothing more is held."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def give_back() -> None:
    """Collects garbage, and returns freed memory to the system, which glibc would keep."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
