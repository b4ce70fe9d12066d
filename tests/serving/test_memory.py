"""Memory that the server no longer needs goes back, and its threads share one heap."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import psutil
import pytest

from unidec.serving.memory import give_back


def test_freed_memory_goes_back():
    give_back()
    before = psutil.Process().memory_info().rss
    held = [bytes(1000) for _ in range(100_000)]
    held[:-1] = []  # one is left at the top: without a trim nothing before it would go back
    give_back()
    assert psutil.Process().memory_info().rss - before < 40e6
    assert len(held) == 1


HEAPS = """
import ctypes, sys, threading
from unidec.serving.memory import share_one_heap

if sys.argv[1] == "one":
    share_one_heap()
threads = [threading.Thread(target=lambda: [bytes(1000) for _ in range(100)]) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc = ctypes.CDLL(None)
libc.fopen.restype, libc.fopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p] * 2
libc.malloc_info.argtypes, libc.fclose.argtypes = [ctypes.c_int, ctypes.c_void_p], [ctypes.c_void_p]
file = libc.fopen(sys.argv[2].encode(), b"w")
libc.malloc_info(0, file)
libc.fclose(file)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="another C library than glibc")
def test_all_threads_share_one_heap(tmp_path):
    heaps = {}
    for how in ("one", "each"):
        subprocess.run([sys.executable, "-c", HEAPS, how, str(tmp_path / how)], check=True)
        heaps[how] = (tmp_path / how).read_text().count("<heap nr")
    assert heaps["one"] == 1 < heaps["each"]
