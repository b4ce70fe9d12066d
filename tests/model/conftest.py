"""Fresh random numbers for each run of a test; UNIDEC_TEST_SEED, printed on failure, brings them
back.
"""

import os
import random

import numpy as np
import pytest


@pytest.fixture
def rng():
    seed = int(os.environ.get("UNIDEC_TEST_SEED", random.randrange(2**31)))
    print(f"UNIDEC_TEST_SEED={seed}")
    return np.random.default_rng(seed)
