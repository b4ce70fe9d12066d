"""How much memory there is: of the machine, and of a container."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from unidec.serving import room


def test_sizes(tmp_path):
    assert room.folder_bytes(tmp_path) == 0
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"123")
    (tmp_path / "c").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "c")
    assert 8 < room.folder_bytes(tmp_path) <= 8 + len(str(tmp_path / "c")), "a link is as long as its target's name"


def write(folder: Path, **files: str) -> Path:
    folder.mkdir()
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_a_container_with_a_limit(tmp_path):
    v2 = write(
        tmp_path / "v2", memory__max="1000\n", memory__current="900\n", memory__stat="anon 5\ninactive_file 300\n"
    )
    assert room._container_bytes(v2, tmp_path / "none") == [400]
    v1 = write(tmp_path / "v1", **{"memory__limit_in_bytes": "1000", "memory__usage_in_bytes": "900"})
    assert room._container_bytes(tmp_path / "none", v1) == [100]


@pytest.mark.parametrize("limit", ["max\n", "", "lots"])
def test_a_container_without(tmp_path, limit):
    v2 = write(tmp_path / "v2", memory__max=limit, memory__current="900\n")
    assert room._container_bytes(v2, tmp_path / "none") == []


def test_the_least_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "_container_bytes", lambda *where: [400])
    assert room.available_bytes() == 400
    monkeypatch.setattr(room, "_container_bytes", lambda *where: [-5])
    assert room.available_bytes() == 0
    monkeypatch.setattr(room, "_container_bytes", lambda *where: [])
    assert 0 < room.available_bytes() <= psutil.virtual_memory().total


def test_freed_memory_goes_back():
    room.give_back()
    before = psutil.Process().memory_info().rss
    held = [bytes(1000) for _ in range(100_000)]
    held[:-1] = []  # one is left at the top: without a trim nothing before it would go back
    room.give_back()
    assert psutil.Process().memory_info().rss - before < 40e6
    assert len(held) == 1


HEAPS = """
import ctypes, sys, threading
from unidec.serving.room import one_heap

if sys.argv[1] == "one":
    one_heap()
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
