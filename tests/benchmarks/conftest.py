"""The synthetic data of the benchmarks."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def synthetic(benchmark_module):
    return benchmark_module("synthetic")
