"""Positives a query in the pool, against sets."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import scipy.sparse as sp

from unidec.evaluation import pools
from unidec.evaluation.pools import MOST, pool_study
from unidec.training.sampler import PoolSampler


def _sampler(size: int = 0, beta: int = 2, eta: int = 1, density: float = 0.15, num_labels: int = 50) -> PoolSampler:
    rng = np.random.default_rng(3)
    truth = sp.csr_matrix((rng.random((80, num_labels)) < density).astype(np.float32))
    none = sp.csr_matrix(truth.shape, dtype=np.float32)
    return PoolSampler(truth, none, beta=beta, eta=eta, size=size, seed=1)


def _shortlist() -> np.ndarray:
    return np.random.default_rng(4).integers(0, 50, size=(80, 6)).astype(np.int32)


BATCHES = np.array_split(np.random.default_rng(5).permutation(80), 8)


@pytest.fixture
def settings(monkeypatch):
    def tried(betas, etas):
        monkeypatch.setattr(pools, "BETAS", betas)
        monkeypatch.setattr(pools, "ETAS", etas)

    return tried


@pytest.mark.parametrize("size", [0, 12])
def test_figures_against_sets(size, settings):
    settings((1, 3), (0, 2))
    sampler, shortlist = _sampler(size), _shortlist()
    study = pool_study(sampler, BATCHES, shortlist, 3, num_batches=8)
    assert [(row["beta"], row["eta"]) for row in study["grid"]] == [(b, e) for e in (0, 1, 2) for b in (1, 2, 3)]
    truth = [set(row.indices.tolist()) for row in sampler.relevance]
    for row in study["grid"]:
        other = copy.copy(sampler)
        other.beta, other.eta = row["beta"], row["eta"]
        counts, sizes = [], []
        for step, rows in enumerate(BATCHES):
            pool = set(other.batch(rows, epoch=3, step=step, shortlist_NH=shortlist).pool_S.tolist())
            counts += [len(truth[i] & pool) for i in rows]
            sizes.append(len(pool))
        assert row["positives"] == pytest.approx(np.mean(counts)) and row["pool_size"] == pytest.approx(np.mean(sizes))
        if (row["beta"], row["eta"]) == (2, 1):
            assert study["histogram"] == np.bincount(counts, minlength=MOST + 1).tolist()
            assert study["share"] == pytest.approx(100 * sum(counts) / sum(len(truth[i]) for i in range(80)))
    assert (study["batches"], study["queries"], study["size"]) == (8, 10.0, size)
    assert (sampler.beta, sampler.eta) == (2, 1)  # as they were


def test_more_positives_sampled_more_positives_in_the_pool():
    grid = pool_study(_sampler(), BATCHES, None, 0)["grid"]
    assert {row["eta"] for row in grid} == {0}
    assert [row["positives"] for row in grid] == sorted(row["positives"] for row in grid)
    # without a limit each query meets at least its own sampled positives
    assert all(row["positives"] >= min(row["beta"], 3) for row in grid)


def test_an_eta_that_the_shortlist_cannot_fill_is_left_out(settings):
    settings((1,), (0, 2, 3))
    grid = pool_study(_sampler(), BATCHES, _shortlist()[:, :2], 0)["grid"]
    assert {row["eta"] for row in grid} == {0, 1, 2}


def test_degenerate_input(settings):
    settings((), (0,))
    assert pool_study(_sampler(), [], None, 0) == {}
    study = pool_study(_sampler(density=0.0), BATCHES[:1], _shortlist(), 0, num_batches=50)
    assert study["batches"] == 1 and study["histogram"][0] == 10 and study["share"] == 0.0
    many = pool_study(_sampler(density=1.1, num_labels=60), BATCHES, None, 0, num_batches=2)
    assert many["histogram"][MOST] == 0 or sum(many["histogram"]) == 20
    full = pool_study(_sampler(beta=60, density=1.1, num_labels=60), BATCHES, None, 0, num_batches=2)
    assert full["histogram"] == [0] * MOST + [20] and full["share"] == 100.0
