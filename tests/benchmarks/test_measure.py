"""Memory of a process, as the benchmarks measure it."""

from __future__ import annotations

import numpy as np


def test_memory_counts_what_is_allocated_within(benchmark_module):
    measure = benchmark_module("measure")
    peaks = []
    for _ in range(3):  # the kernel may take as many cold pages away meanwhile: not three times
        with measure.Memory() as memory:
            block = np.ones(64 << 20, dtype=np.uint8)
            del block
        peaks.append(memory.facts()["peak_mib"])
    assert 60 < max(peaks) < 90, peaks
    with measure.Memory() as memory:
        pass
    assert memory.facts()["peak_mib"] < 30, "the peak starts again"
