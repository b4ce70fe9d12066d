"""Reductions against loops over rows and pairs."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch

from unidec.config import Loss
from unidec.model import pairs as pairs_module
from unidec.model.losses import symmetric_loss
from unidec.model.pairs import PoolTargets, target_weights

REDUCTIONS = get_args(Loss.model_fields["reduction"].annotation)


def make_targets(row, sampled=None, relevance=None, num_positives=None):
    none = torch.empty(0, dtype=torch.int64)
    ones = np.ones(len(row), np.float32)
    arrays = [
        row,
        row,
        ones > 0 if sampled is None else sampled,
        ones if relevance is None else relevance,
    ]
    arrays.append(np.bincount(row) if num_positives is None else num_positives)
    return PoolTargets(*(torch.as_tensor(array) for array in arrays), none, none)


def random_pairs(rng, num_rows=9, num_cols=14, shuffle=True):
    dense = rng.random((num_rows, num_cols)) < 0.3
    dense[rng.integers(num_rows)] = False
    row, col = np.nonzero(dense)
    order = rng.permutation(len(row)) if shuffle else np.arange(len(row))
    row = row[order]
    col = col[order]
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
@pytest.mark.parametrize("kind", REDUCTIONS)
def test_equals_a_loop(kind, soft, rng):
    for _ in range(10):
        row, sampled, relevance, num_positives = random_pairs(rng)
        weight = target_weights(
            kind, make_targets(row, sampled, relevance if soft else None, num_positives), 9
        )
        assert weight.dtype == torch.float32
        expected = brute_force(
            kind, row, sampled, relevance if soft else np.ones(len(row)), num_positives
        )
        np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_no_pairs_give_no_weights(kind):
    none = np.empty(0, dtype=np.int64)
    assert target_weights(kind, make_targets(none, num_positives=np.zeros(3)), 3).shape == (0,)


def test_psl_is_pal_n_when_all_positives_are_in_the_pool(rng):
    row, sampled, _, _ = random_pairs(rng)
    counts = np.bincount(row, minlength=9)
    psl = target_weights("psl", make_targets(row, sampled, None, counts), 9)
    torch.testing.assert_close(
        psl, target_weights("pal-n", make_targets(row, sampled, None, counts), 9)
    )
    larger = target_weights("pal-n", make_targets(row, sampled, None, counts + 1), 9)
    assert (larger < psl).all()


def test_pol_with_a_generator_is_uniform_over_the_sampled_positives():
    # Row 0 has pairs 0..3 of which 3 are sampled, row 1 has pair 4; E[POL] is PSL over the sampled
    # pairs.
    targets = make_targets(np.array([0, 0, 0, 0, 1]), np.array([True, False, True, True, True]))
    generator = torch.Generator().manual_seed(5)
    draws = 6000
    total = torch.zeros(5)
    for _ in range(draws):
        weight = target_weights("pol", targets, 2, generator)
        assert weight[:4].sum() == 1
        assert weight[4] == 1
        total += weight
    # five standard deviations of a share of 1/3
    tolerance = 5 * (1 / 3 * 2 / 3 / draws) ** 0.5
    expected = torch.tensor([1 / 3, 0, 1 / 3, 1 / 3, 1])
    torch.testing.assert_close(total / draws, expected, atol=tolerance, rtol=0)


def test_zero_relevance_stays_finite():
    targets = make_targets(np.array([0, 0, 1]), relevance=np.array([1, 3, 0], np.float32))
    assert target_weights("psl", targets, 2).tolist() == [0.25, 0.75, 0.0]


@pytest.mark.parametrize("reduction", ["psl", "pal-n", "psl-sum", "pol"])
def test_both_heads_share_what_is_not_drawn(monkeypatch, rng, reduction):
    """The second loss on the same targets is that on new ones; only drawn weights are computed
    again.
    """
    row_P, col_P = np.nonzero(rng.random((5, 7)) < 0.4)
    targets = make_targets(row_P, num_positives=np.full(5, 9))
    targets = replace(targets, col_P=torch.from_numpy(col_P))
    calls = []
    right = pairs_module.target_weights
    monkeypatch.setattr(
        pairs_module, "target_weights", lambda *given: calls.append(given[0]) or right(*given)
    )
    logit = torch.from_numpy(rng.normal(size=(5, 7))).float()

    def losses(*of):
        for each in of:
            draws = torch.Generator().manual_seed(3) if reduction == "pol" else None
            options = {"reduction": reduction, "forward": 0.25, "generator": draws}
            yield symmetric_loss("ds", logit, each, **options).item()

    same = list(losses(targets, targets))
    assert len(calls) == (4 if reduction == "pol" else 2)
    assert same == list(losses(replace(targets), replace(targets)))
    assert len(calls) == (8 if reduction == "pol" else 6)
