"""Benchmarks are programs, not a package: their folder goes on the path, as when they are started."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="session")
def benchmark_module():
    """Imports a benchmark by name."""
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="session")
def synthetic(benchmark_module):
    return benchmark_module("synthetic")
