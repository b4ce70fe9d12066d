"""Memory of a process, as the benchmarks measure it."""

from __future__ import annotations

import mmap

MIB = 1 << 20


def test_memory_counts_what_is_allocated_within(benchmark_module):
    measure = benchmark_module("measure")
    peaks = []
    for _ in range(3):  # the kernel may take as many cold pages away meanwhile: not three times
        # Fresh pages: malloc may return what an earlier test freed, and those are resident.
        pages = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE)
        with measure.Memory() as memory:
            for _ in range(64):
                pages.write(bytes(MIB))
            pages.close()
        peaks.append(memory.facts()["peak_mib"])
    assert 60 < max(peaks) < 90, peaks
    with measure.Memory() as memory:
        pass
    assert memory.facts()["peak_mib"] < 30, "the peak starts again"
