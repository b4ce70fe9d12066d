"""Fresh random numbers for each run of a test (UNIDEC_TEST_SEED, printed on failure, repeats them); data of plans."""

import os
import random

import numpy as np
import pytest

from unidec.data.dataset import write_dataset
from unidec.data.tokens import TokenCache, build_token_cache


@pytest.fixture
def rng():
    seed = int(os.environ.get("UNIDEC_TEST_SEED", random.randrange(2**31)))
    print(f"UNIDEC_TEST_SEED={seed}")
    return np.random.default_rng(seed)


@pytest.fixture
def live(helper):
    """Counts the bytes of tensors that live."""
    return helper("training/live_bytes").LiveBytes()


@pytest.fixture(scope="session")
def plan_data(helper, tiny_bert, tmp_path_factory):
    """`plan_data(num_train, num_test, num_labels)`: a synthetic data set and its two token caches."""

    def make(num_train, num_test, num_labels):
        root = tmp_path_factory.mktemp("plan")
        raw = helper("conftest").make_raw(num_train, num_test, num_labels, seed=1)
        dataset = write_dataset(root / "dataset", raw, validation_share=0.1)
        sizes = {"queries": dataset.num_queries, "labels": dataset.num_labels}
        tokens = [
            TokenCache.open(build_token_cache(dataset.text_batches(name), tiny_bert, 16, root / name, size))
            for name, size in sizes.items()
        ]
        return dataset, tokens

    return make
