"""Free memory and disk space of this machine, the peak memory of this process, and return of unused
memory.
"""

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
_CGROUP = tuple(
    Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory.current", "memory.stat")
)
# of glibc's malloc.h
_M_ARENA_MAX = -8
_M_MMAP_THRESHOLD = -3
_M_TRIM_THRESHOLD = -1
# bytes, more than the arrays of one query; without it glibc raises the limit up to 32 MiB
_OWN_PAGES = 1 << 19


def available_host() -> int:
    """Available host memory in bytes: the machine's, limited by the control group (container)."""
    import psutil

    free = int(psutil.virtual_memory().available)
    try:
        limit, used, stat = (file.read_text().strip() for file in _CGROUP)
    except OSError:
        return free
    if limit != "max":
        cached = re.search(r"^inactive_file (\d+)", stat, re.MULTILINE)
        can_be_freed = int(cached[1]) if cached else 0
        free = min(free, int(limit) - int(used) + can_be_freed)
    return max(free, 0)


def available_disk(folder: Path) -> int:
    """Free bytes on the disk of a folder, which does not have to exist yet."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def host_peak() -> int:
    """Peak memory of this process in bytes."""
    # /proc is used if it exists, because getrusage also includes the peak of the parent process
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text()
        if found := re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE):
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, kilobytes elsewhere


def memory_used() -> dict[str, float]:
    """Peak memory in GiB of this process ("host_used_gib") and of its tensors on the GPU
    ("device_used_gib").

    The host memory includes pages of memory-mapped files and the copy from which a checkpoint is
    written."""
    import torch

    used = {"host_used_gib": host_peak()}
    if torch.cuda.is_available():
        used["device_used_gib"] = torch.cuda.max_memory_allocated()
    return {name: peak / (1 << 30) for name, peak in used.items()}


def share_one_heap() -> None:
    """Make all threads started later share one heap, and give large allocations separate pages.

    By default glibc gives each thread its own heap. Long-lived objects (cached answers) and large
    request bodies fragment all of them, so that memory use grows although no more memory is needed.
    """
    _set_malloc_option(_M_ARENA_MAX, 1)
    _set_malloc_option(_M_MMAP_THRESHOLD, _OWN_PAGES)


def keep_freed_memory() -> None:
    """Let this process keep freed memory for the next training step: getting it from the system
    page by page takes a tenth of a step on a CPU.
    """
    _set_malloc_option(_M_TRIM_THRESHOLD, 1 << 28)  # bytes that are kept
    _set_malloc_option(_M_MMAP_THRESHOLD, 1 << 25)  # the largest one: larger arrays are not kept


def _set_malloc_option(option: int, value: int) -> None:
    """Set an option of glibc's malloc; with another C library, do nothing."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(option, value)


def give_back() -> None:
    """Collect garbage, and return freed memory, which glibc would keep, to the system."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
