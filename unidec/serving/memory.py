"""Memory of the server's process: one heap for all threads, and giving back what is not used."""

from __future__ import annotations

import contextlib
import ctypes
import gc

_M_ARENA_MAX, _M_MMAP_THRESHOLD = -8, -3  # of glibc's malloc.h
_OWN_PAGES = 1 << 19  # bytes, more than the arrays of one query; unset, it grows to 32 MiB with what is freed


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
