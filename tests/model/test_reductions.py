"""Reductions against loops over rows and pairs."""

import os
import random

import numpy as np
import pytest
import torch

from unidec.errors import ConfigError
from unidec.model.reductions import REDUCTIONS, target_weights


@pytest.fixture
def rng():
    seed = int(os.environ.get("UNIDEC_TEST_SEED", random.randrange(2**31)))
    print(f"UNIDEC_TEST_SEED={seed}")
    return np.random.default_rng(seed)


def random_pairs(rng, num_rows=9, num_cols=14, shuffle=True):
    dense = rng.random((num_rows, num_cols)) < 0.3
    dense[rng.integers(num_rows)] = False
    row, col = np.nonzero(dense)
    order = rng.permutation(len(row)) if shuffle else np.arange(len(row))
    row, col = row[order], col[order]
    sampled = rng.random(len(row)) < 0.6
    relevance = rng.random(len(row)).astype(np.float32) + 0.05
    num_positives = np.bincount(row, minlength=num_rows) + rng.integers(0, 4, num_rows)
    return row, sampled, relevance, num_positives


def brute_force(kind, row, sampled, relevance, num_positives):
    weight = np.zeros(len(row))
    for p in range(len(row)):
        same = [q for q in range(len(row)) if row[q] == row[p]]
        if kind == "psl":
            weight[p] = relevance[p] / sum(relevance[q] for q in same)
        elif kind == "psl-sum":
            weight[p] = relevance[p]
        elif kind == "pal-n":
            weight[p] = relevance[p] / num_positives[row[p]]
        elif kind == "pol":
            weight[p] = sampled[p] and p == min(q for q in same if sampled[q])
    return weight


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("kind", list(REDUCTIONS))
def test_equals_a_loop(kind, soft, rng):
    for _ in range(10):
        row, sampled, relevance, num_positives = random_pairs(rng)
        weight = target_weights(
            kind,
            row_P=torch.from_numpy(row),
            sampled_P=torch.from_numpy(sampled),
            relevance_P=torch.from_numpy(relevance) if soft else None,
            num_rows=9,
            num_positives_B=torch.from_numpy(num_positives),
        )
        assert weight.dtype == torch.float32
        expected = brute_force(kind, row, sampled, relevance if soft else np.ones(len(row)), num_positives)
        np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("kind", list(REDUCTIONS))
def test_no_pairs_give_no_weights(kind):
    none = torch.empty(0, dtype=torch.int64)
    weight = target_weights(
        kind,
        row_P=none,
        sampled_P=none.bool(),
        relevance_P=None,
        num_rows=3,
        num_positives_B=torch.zeros(3, dtype=torch.int64),
    )
    assert weight.shape == (0,)


def test_psl_is_pal_n_when_all_positives_are_in_the_pool(rng):
    row, sampled, _, _ = random_pairs(rng)
    counts = torch.from_numpy(np.bincount(row, minlength=9))
    given = {
        "row_P": torch.from_numpy(row),
        "sampled_P": torch.from_numpy(sampled),
        "relevance_P": None,
        "num_rows": 9,
    }
    psl = target_weights("psl", num_positives_B=counts, **given)
    torch.testing.assert_close(psl, target_weights("pal-n", num_positives_B=counts, **given))
    larger = target_weights("pal-n", num_positives_B=counts + 1, **given)
    assert (larger < psl).all()


def test_pol_with_a_generator_is_uniform_over_the_sampled_positives():
    # Row 0 has pairs 0..3 of which 3 are sampled, row 1 has pair 4; E[POL] is PSL over the sampled pairs.
    row = torch.tensor([0, 0, 0, 0, 1])
    sampled = torch.tensor([True, False, True, True, True])
    generator = torch.Generator().manual_seed(5)
    draws = 6000
    total = torch.zeros(5)
    for _ in range(draws):
        weight = target_weights(
            "pol",
            row_P=row,
            sampled_P=sampled,
            relevance_P=None,
            num_rows=2,
            num_positives_B=torch.tensor([4, 1]),
            generator=generator,
        )
        assert weight[:4].sum() == 1 and weight[4] == 1
        total += weight
    # five standard deviations of a share of 1/3
    tolerance = 5 * (1 / 3 * 2 / 3 / draws) ** 0.5
    torch.testing.assert_close(total / draws, torch.tensor([1 / 3, 0, 1 / 3, 1 / 3, 1]), atol=tolerance, rtol=0)


def test_integer_relevance_and_zero_relevance_stay_finite():
    weight = target_weights(
        "psl",
        row_P=torch.tensor([0, 0, 1]),
        sampled_P=torch.ones(3, dtype=torch.bool),
        relevance_P=torch.tensor([1, 3, 0]),
        num_rows=2,
        num_positives_B=torch.tensor([2, 1]),
    )
    assert weight.tolist() == [0.25, 0.75, 0.0]


def test_unknown_reduction_is_named():
    none = torch.empty(0, dtype=torch.int64)
    with pytest.raises(ConfigError, match="psl-mean"):
        target_weights(
            "psl-mean", row_P=none, sampled_P=none.bool(), relevance_P=None, num_rows=1, num_positives_B=none
        )
