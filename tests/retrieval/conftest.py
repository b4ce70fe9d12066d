"""Random numbers (a seed for each test, moved for all of them by UNIDEC_TEST_SEED) and a tiny bundle."""

from __future__ import annotations

import importlib.util
import os
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

# tests are no packages (--import-mode=importlib): the shared helper is loaded by its path
_spec = importlib.util.spec_from_file_location("tiny_bundle", Path(__file__).with_name("tiny_bundle.py"))
assert _spec is not None and _spec.loader is not None
tiny = importlib.util.module_from_spec(_spec)
sys.modules["tiny_bundle"] = tiny
_spec.loader.exec_module(tiny)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng([zlib.crc32(request.node.nodeid.encode()), int(os.environ.get("UNIDEC_TEST_SEED", 0))])


@pytest.fixture
def stub_model(monkeypatch: pytest.MonkeyPatch):
    """Bundles load the stub in place of UniDEC."""
    monkeypatch.setattr("unidec.retrieval.bundle._load_model", lambda path, device: tiny.StubModel(path))
