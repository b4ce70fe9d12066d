"""Fresh random numbers for each run of a test (UNIDEC_TEST_SEED, printed on failure,
repeats them).
"""

import os
import random

import numpy as np
import pytest
from recorded_batches import record_batches


@pytest.fixture
def rng():
    seed = int(os.environ.get("UNIDEC_TEST_SEED", random.randrange(2**31)))
    print(f"UNIDEC_TEST_SEED={seed}")
    return np.random.default_rng(seed)


@pytest.fixture
def make_batches(tiny_dataset, tiny_tokens, tiny_params):
    """`make_batches(ranks, graph, **overrides)`: batches of `tiny_dataset`, whose texts are
    recorded, not encoded.
    """

    def make(ranks=None, graph=None, cluster_L=None, **overrides):
        params = tiny_params(**overrides)
        return record_batches(
            params, tiny_dataset, tiny_tokens, ranks=ranks, graph=graph, cluster_L=cluster_L
        )

    return make
