"""Memory of the server's process: one heap for all threads, and giving back what is not used."""

from __future__ import annotations

import contextlib
import ctypes
import gc

_M_ARENA_MAX = -8  # of glibc's malloc.h


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
