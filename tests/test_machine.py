"""What is free on this machine, in a container too, what this process took, and what it
gives back.
"""

import ctypes
import subprocess
import sys

import psutil
import pytest

from unidec import machine


def test_a_container_has_less_than_its_machine(tmp_path, monkeypatch):
    files = [tmp_path / name for name in ("max", "current", "stat")]
    for file, text in zip(
        files, ("1000000", "400000", "anon 5\ninactive_file 100000\n"), strict=True
    ):
        file.write_text(text)
    monkeypatch.setattr(machine, "_CGROUP", tuple(files))
    assert machine.available_host() == 700_000
    files[0].write_text("max\n")
    assert machine.available_host() > 1_000_000
    files[0].unlink()
    assert machine.available_host() > 1_000_000


def test_this_machine(tmp_path):
    assert machine.available_disk(tmp_path / "not" / "there") > 0
    assert machine.available_host() > 0
    assert machine.host_peak() > 1 << 20
    assert machine.memory_used()["host_used_gib"] > 0.001


def test_freed_memory_goes_back():
    machine.give_back()
    before = psutil.Process().memory_info().rss
    held = [bytes(1000) for _ in range(100_000)]
    held[:-1] = []  # one is left at the top: without a trim nothing before it would go back
    machine.give_back()
    assert psutil.Process().memory_info().rss - before < 40e6
    assert len(held) == 1


HEAPS = """
import ctypes, sys, threading
from unidec.machine import share_one_heap

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


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_info"), reason="another C library than glibc"
)
def test_all_threads_share_one_heap(tmp_path):
    heaps = {}
    for how in ("one", "each"):
        subprocess.run([sys.executable, "-c", HEAPS, how, str(tmp_path / how)], check=True)
        heaps[how] = (tmp_path / how).read_text().count("<heap nr")
    assert heaps["one"] == 1 < heaps["each"]
