"""The refresh: clusters of a growing size, and what is computed for them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from unidec.config import Pool
from unidec.model.pool import PoolSampler, num_clusters
from unidec.training import encoding
from unidec.training.distributed import ALONE
from unidec.training.encoding import Encoding
from unidec.training.round_refresh import Refresh, Refresher, cluster_size
from unidec.training.sampler import queries_a_batch

CPU = torch.device("cpu")
ROWS = np.arange(100, 143)


def never():
    raise AssertionError("not needed")


def unit_vectors(count, seed=0):
    vectors = np.random.default_rng(seed).standard_normal((count, 8)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def make_refresh(settings, folder, epoch, rows, relevance, query_vectors, label_vectors):
    """The refresh after `epoch` epochs, with these vectors in place of a model's, and its
    figures.
    """
    filtered = sp.csr_matrix(relevance.shape, dtype=bool)
    batches = SimpleNamespace(
        rows=rows,
        ranks=ALONE,
        sampler=PoolSampler(relevance, filtered, beta=1, eta=settings.pool.eta, size=0, seed=0),
        methods=SimpleNamespace(shortlister=None),
    )
    no_model = Encoding(None, {}, None, CPU, None)
    refresher = Refresher(settings, no_model, batches, folder)
    refresher.query_vectors = query_vectors
    refresher.label_vectors = label_vectors
    report = refresher.mine(epoch)
    return refresher.load(epoch), report


@pytest.fixture
def refresh(tmp_path):
    """`refresh(params, epoch)`: one of the queries `ROWS`."""

    def refresh(
        params,
        epoch,
        query_vectors=lambda: unit_vectors(len(ROWS)),
        label_vectors=lambda: unit_vectors(20, 1),
    ):
        relevance = np.random.default_rng(2).random((143, 20)) < 0.1
        return make_refresh(
            params.training,
            tmp_path,
            epoch,
            ROWS,
            sp.csr_matrix(relevance, dtype=np.float32),
            query_vectors,
            label_vectors,
        )

    return refresh


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (0, [512] * 6),
        (1, [1, 2, 4, 8, 16, 32]),
        (100, [100, 200, 400, 512, 512, 512]),
        (512, [512] * 6),
    ],
)
def test_clusters_double_at_each_refresh_up_to_a_batch(start, expected):
    pool = Pool(cluster_start=start, batch_size=512, refresh=5)
    assert [cluster_size(pool, epoch, 10_000) for epoch in range(0, 30, 5)] == expected
    assert cluster_size(pool, 4, 10_000) == expected[0], "within a round it stays"
    assert cluster_size(pool, 10**9, 10_000) == 512


def test_clusters_double_at_the_epochs_that_are_named():
    """NGAME on LF-AmazonTitles-131K: batches of 1,600 of 294,805 queries, and clusters of 512 from
    epoch 200 on.
    """
    epochs = [10, 20, 25, 50, 75, 100, 125, 150, 200]
    pool = Pool(cluster_start=1, cluster_doublings=epochs, batch_size=1600, refresh=5)
    sizes = [cluster_size(pool, epoch, 294_805) for epoch in range(300)]
    assert [sizes.count(1 << doubling) for doubling in range(10)] == [
        10,
        10,
        5,
        25,
        25,
        25,
        25,
        25,
        50,
        100,
    ]
    assert sizes == sorted(sizes)
    assert cluster_size(
        pool.model_copy(update={"cluster_start": 1000}), 20, 294_805
    ) == queries_a_batch(pool, 294_805)


@pytest.mark.parametrize("start", [0, 1, 3, 12])
def test_batches_of_a_round_hold_every_query_once_whatever_the_size_of_clusters(
    tiny_params, tmp_path, refresh, start
):
    params = tiny_params(**{"pool.cluster_start": start})
    batch = params.pool.batch_size
    count = num_clusters(len(ROWS), params.pool.batch_size)
    for epoch in range(0, 10, params.pool.refresh):
        made, report = refresh(params, epoch)
        size = cluster_size(params.pool, epoch, len(ROWS))
        assert np.diff(made.offsets).max() <= size
        assert report.get("cluster_size", 1) == size
        made.save(tmp_path / f"{start}-{epoch}", epoch)
        for loaded in (made, Refresh.load(tmp_path / f"{start}-{epoch}", epoch)):
            batches = loaded.batches(ROWS, batch, seed=1, epoch=epoch)
            assert len(batches) == count
            assert max(len(b) for b in batches) <= batch
            assert sorted(np.concatenate(batches).tolist()) == ROWS.tolist()


def test_similar_queries_share_a_small_cluster_and_clusters_are_mixed_anew_each_epoch(
    tiny_params, tmp_path
):
    """Pairs of equal vectors: clusters of two keep them together, and the pairs meet other pairs in
    each epoch.
    """
    settings = tiny_params(
        **{"pool.cluster_start": 2, "pool.eta": 0, "pool.batch_size": 16}
    ).training
    rows = np.arange(64)
    vectors = np.repeat(unit_vectors(32), 2, axis=0)
    relevance = sp.csr_matrix(np.ones((64, 1), dtype=np.float32))
    made, _ = make_refresh(settings, tmp_path, 0, rows, relevance, lambda: vectors, never)
    pairs = [
        set((made.order[a:b] // 2).tolist())
        for a, b in zip(made.offsets, made.offsets[1:], strict=False)
    ]
    assert np.mean([len(pair) == 1 for pair in pairs]) > 0.8
    epochs = [
        {frozenset(b.tolist()) for b in made.batches(rows, 16, seed=0, epoch=e)} for e in range(3)
    ]
    assert epochs[0] != epochs[1] != epochs[2]


def test_random_batches_at_first_need_no_vectors(tiny_params, refresh):
    params = tiny_params(**{"pool.cluster_start": 1, "pool.eta": 0})
    made, report = refresh(params, 0, never, never)
    assert made.order.tolist() == ROWS.tolist()
    expected = [1] * len(ROWS)
    assert np.diff(made.offsets).tolist() == expected
    assert "clusters" not in report
    batches = made.batches(ROWS, 12, seed=0, epoch=0)
    assert {len(b) for b in batches} <= {10, 11}
    assert batches[0].tolist() != sorted(batches[0].tolist())
    with pytest.raises(AssertionError, match="not needed"):
        refresh(params, params.pool.refresh, never, never)


def test_before_the_start_batches_are_random_and_nothing_is_mined(tiny_params, refresh):
    params = tiny_params(**{"pool.start_epoch": 4})
    for epoch in (0, 2):
        made, report = refresh(params, epoch, never, never)
        assert made.negatives is None
        assert set(np.diff(made.offsets)) == {1}
        assert len(made.batches(ROWS, 12, seed=0, epoch=epoch)) == num_clusters(len(ROWS), 12)
        assert "clusters" not in report
    made, report = refresh(params, 4)
    assert made.negatives is not None
    assert report["cluster_size"] == 12


def test_negatives_are_mined_also_while_batches_are_random(tiny_params, refresh):
    made, _ = refresh(tiny_params(**{"pool.cluster_start": 1}), 0)
    assert made.negatives is not None
    assert (made.negatives[ROWS] >= 0).any()


def test_a_training_goes_through_the_curriculum(open_trainer):
    """Every round has as many steps as without it, so the schedule and the counters stay right."""
    trainer = open_trainer(**{"pool.cluster_start": 1, "optim.epochs": 6})
    sizes = []
    while not trainer.finished:
        trainer.mine()
        trainer.train_round()
        sizes.append(int(np.diff(trainer.made.offsets).max()))
    assert sizes == [1, 2, 3] or sizes == [1, 2, 4]
    assert trainer.at.step == 6 * trainer.steps_per_epoch


def test_large_vectors_are_in_a_file_without_a_name(open_trainer, monkeypatch):
    """As many digits as float16 has; the file's space is free when the array is."""
    trainer = open_trainer()
    refresher = trainer.refresher
    in_memory = refresher.query_vectors(), refresher.label_vectors()
    monkeypatch.setattr(encoding, "MOST_IN_MEMORY", 0)
    on_disk = refresher.query_vectors(), refresher.label_vectors()
    for vectors, expected in zip(on_disk, in_memory, strict=True):
        assert vectors.dtype == np.float16
        np.testing.assert_array_equal(vectors, expected.astype(np.float16))
    assert not list(refresher.files.glob("*rows-*"))
    report = refresher.mine(0)
    assert report["mine_queries"] == len(trainer.batches.rows)
    assert refresher.exists(0)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_label_vectors_of_a_validation_may_be_in_a_file(dtype, open_trainer, monkeypatch):
    trainer = open_trainer(**{"model.clf_dtype": dtype})
    in_memory = trainer.label_vectors()
    monkeypatch.setattr(encoding, "MOST_IN_MEMORY", 0)
    from_file = trainer.label_vectors()
    assert sorted(from_file) == sorted(in_memory)
    for name, vectors in in_memory.items():
        assert np.array_equal(from_file[name], vectors)
    assert from_file["clf"].dtype == np.float32
