"""Memory: how much there is, how much a bundle needs, and keeping no more than is used."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from pathlib import Path

_V2 = Path("/sys/fs/cgroup")
_V1 = Path("/sys/fs/cgroup/memory")
_M_ARENA_MAX = -8  # of glibc's malloc.h


def available_bytes() -> int:
    """Bytes that this process may still take: of the machine, and of its container where that has less."""
    import psutil

    free = int(psutil.virtual_memory().available)
    return max(0, min([free, *_container_bytes(_V2, _V1)]))


def folder_bytes(folder: Path) -> int:
    """Size of all files in a folder; links are not followed."""
    return sum(
        os.lstat(os.path.join(where, name)).st_size for where, _, names in os.walk(folder) for name in names
    )  # fmt: skip


def one_heap() -> None:
    """All threads that begin from now on share one heap. glibc gives each one of its own, and what is kept for long (an
    answer in the cache) leaves holes in all of them: memory grows by half a heap though nothing more is held."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def give_back() -> None:
    """Frees what is in circles, and hands freed memory back to the system (glibc keeps it otherwise)."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _container_bytes(v2: Path, v1: Path) -> list[int]:
    """What a container's limit leaves; [] without one. Files that nobody maps count as free."""
    for limit, used in (
        (v2 / "memory.max", v2 / "memory.current"),
        (v1 / "memory.limit_in_bytes", v1 / "memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no limit
            most, now = int(limit.read_text()), int(used.read_text())
            return [most - now + _inactive_files(limit.parent / "memory.stat")]
    return []


def _inactive_files(stat: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in stat.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    return 0
