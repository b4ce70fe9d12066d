"""Memory and disk of this machine: what is free, how much this process has taken, and giving back what is not used."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import resource
import shutil
import sys
from pathlib import Path

# limit, use and statistics of the process's own control group
_CGROUP = tuple(Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory.current", "memory.stat"))
_M_ARENA_MAX, _M_MMAP_THRESHOLD = -8, -3  # of glibc's malloc.h
_OWN_PAGES = 1 << 19  # bytes, more than the arrays of one query; unset, it grows to 32 MiB with what is freed


def available_host() -> int:
    """Bytes of host memory that can still be taken: of the machine, and of the control group (container) it runs in."""
    import psutil

    free = int(psutil.virtual_memory().available)
    try:
        limit, used, stat = (file.read_text().strip() for file in _CGROUP)
    except OSError:
        return free
    if limit != "max":
        cached = re.search(r"^inactive_file (\d+)", stat, re.MULTILINE)
        free = min(free, int(limit) - int(used) + (int(cached.group(1)) if cached else 0))
    return max(free, 0)


def available_disk(folder: Path) -> int:
    """Free bytes where a folder is, or will be."""
    folder = folder.absolute()
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def host_peak() -> int:
    """The most bytes this process has had in memory at once."""
    # not getrusage's where /proc has it: that counts the parent's as well
    status = Path("/proc/self/status")
    found = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE) if status.is_file() else None
    if found:
        return int(found.group(1)) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, kilobytes elsewhere


def memory_used() -> dict[str, float]:
    """The most memory that this process, and its tensors on the GPU, took at once: GiB by "host_used_gib" and
    "device_used_gib". The host's includes pages of memory-mapped files and the copy that a checkpoint is written from.
    """
    import torch

    used = {"host_used_gib": host_peak()}
    if torch.cuda.is_available():
        used["device_used_gib"] = torch.cuda.max_memory_allocated()
    return {name: peak / (1 << 30) for name, peak in used.items()}


def share_one_heap() -> None:
    """Makes threads that start from now on share one heap, without what is large. glibc gives each its own, and
    long-lived objects (cached answers) leave holes in all of them; a large body in the heap leaves one too, in pages of
    its own none. Memory would grow though nothing more is held."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_ARENA_MAX, 1)
        libc.mallopt(_M_MMAP_THRESHOLD, _OWN_PAGES)


def give_back() -> None:
    """Collects garbage, and returns freed memory to the system, which glibc would keep."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
