"""Random numbers of the retrieval tests: a seed for each test, moved for all of them by UNIDEC_TEST_SEED."""

from __future__ import annotations

import os
import zlib

import numpy as np
import pytest


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng([zlib.crc32(request.node.nodeid.encode()), int(os.environ.get("UNIDEC_TEST_SEED", 0))])
