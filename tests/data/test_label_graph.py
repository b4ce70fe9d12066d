"""Label graph against the dense product, on random and degenerate matrices."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from unidec.data import label_graph, storage
from unidec.data.label_graph import build_label_graph, load_label_graph, soft_targets
from unidec.errors import ArtifactError, DataError


def dense_reference(truth, threshold):
    """Soft targets by loops over label pairs."""
    truth = truth.astype(np.float64)
    graph = truth.T @ truth
    out = np.eye(len(graph))
    for j in range(len(graph)):
        for i in range(len(graph)):
            if graph[j, j] > 0 and graph[j, i] > 0 and graph[j, i] / graph[j, j] >= threshold:
                out[j, i] = graph[j, i] / graph[j, j]
    return out


def random_relevance(seed, num_queries=50, num_labels=20, density=0.15):
    rng = np.random.default_rng(seed)
    truth = (rng.random((num_queries, num_labels)) < density) * rng.choice([0.5, 2.0], (num_queries, num_labels))
    truth[:, 3] = 0  # a label that no query has
    relevance = csr_matrix(truth.astype(np.float32))
    relevance.data[::9] = 0  # stored, but not relevant
    return relevance


@pytest.mark.parametrize("pairs_at_once", [1, 30, 1 << 22])
@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.35, 1.0])
def test_equals_dense_product(monkeypatch, threshold, pairs_at_once):
    monkeypatch.setattr(label_graph, "_PAIRS_AT_ONCE", pairs_at_once)
    relevance = random_relevance(int(100 * threshold))
    got = soft_targets(relevance, threshold)
    np.testing.assert_allclose(got.toarray(), dense_reference(relevance.toarray() > 0, threshold), rtol=1e-6)
    assert got.dtype == np.float32
    assert got.has_sorted_indices
    assert (got.data > 0).all()


def test_blocks_cover_all_labels_within_the_budget(monkeypatch):
    monkeypatch.setattr(label_graph, "_PAIRS_AT_ONCE", 40)
    binary = (random_relevance(5) > 0).astype(np.int32).tocsr()
    transposed = binary.T.tocsr()
    blocks = label_graph._blocks(binary, transposed)
    assert [start for start, _ in blocks] == [0] + [stop for _, stop in blocks[:-1]]
    assert blocks[-1][1] == 20
    assert len(blocks) > 3
    width_N = np.asarray(binary.sum(axis=1)).ravel()
    for start, stop in blocks:
        cost = sum(width_N[transposed[j].indices].sum() for j in range(start, stop))
        assert cost <= 40 or stop == start + 1


def test_hand_computed_and_not_symmetric():
    """Label 0 on queries 0, 1; label 1 on query 0 only: all of 1's queries have 0, half of 0's have 1."""
    relevance = csr_matrix(np.array([[1, 1], [1, 0]]))
    assert soft_targets(relevance, 0.1).toarray().tolist() == [[1.0, 0.5], [1.0, 1.0]]
    assert soft_targets(relevance, 0.6).toarray().tolist() == [[1.0, 0.0], [1.0, 1.0]]


@pytest.mark.parametrize("shape", [(0, 4), (3, 1), (3, 4)])
def test_no_positives_leave_the_diagonal(shape):
    np.testing.assert_array_equal(soft_targets(csr_matrix(shape), 0.1).toarray(), np.eye(shape[1]))


def test_repeated_entries_count_once():
    messy = csr_matrix((np.ones(4), np.array([1, 0, 0, 0]), np.array([0, 3, 4])), shape=(2, 2))
    assert soft_targets(messy, 0.1).toarray().tolist() == [[1.0, 0.5], [1.0, 1.0]]
    assert messy.nnz == 4, "the input is left as it was"


@pytest.mark.parametrize("threshold", [-0.1, 1.1, float("nan")])
def test_threshold_out_of_range(threshold):
    with pytest.raises(DataError, match="threshold"):
        soft_targets(csr_matrix((2, 2)), threshold)


def fake_dataset():
    rows = {"train": np.arange(0, 50, 2), "test": np.arange(1, 50, 2)}
    return SimpleNamespace(relevance=random_relevance(8), num_labels=20, rows=rows.__getitem__)


def test_stored_graph_sees_training_rows_only(tmp_path):
    dataset = fake_dataset()
    build_label_graph(dataset, 0.2, tmp_path / "graph")
    got = load_label_graph(tmp_path / "graph")
    truth = dataset.relevance.toarray()[::2] > 0
    np.testing.assert_allclose(got.toarray(), dense_reference(truth, 0.2), rtol=1e-6)
    files = sorted(p.name for p in (tmp_path / "graph").iterdir())
    assert files == ["data.npy", "indices.npy", "indptr.npy", "manifest.json"]
    arrays = [np.load(tmp_path / "graph" / name).dtype for name in files[:3]]
    assert arrays == [np.float32, np.int32, np.int64]


@pytest.mark.parametrize("name", ["data", "indices", "indptr"])
def test_faulty_folder_is_refused(tmp_path, name):
    folder = build_label_graph(fake_dataset(), 0.2, tmp_path / "graph")
    meta = storage.read_manifest(folder, "label_graph", 1)["meta"]
    array = np.load(folder / f"{name}.npy")
    np.save(folder / f"{name}.npy", array[:-1])
    with pytest.raises(ArtifactError, match="damaged"):
        load_label_graph(folder)
    storage.write_manifest(folder, "label_graph", 1, meta)
    with pytest.raises(ArtifactError, match="no label graph"):
        load_label_graph(folder)


def test_columns_out_of_range_are_refused(tmp_path):
    folder = build_label_graph(fake_dataset(), 0.2, tmp_path / "graph")
    meta = storage.read_manifest(folder, "label_graph", 1)["meta"]
    indices = np.load(folder / "indices.npy")
    indices[4] = 20
    np.save(folder / "indices.npy", indices)
    storage.write_manifest(folder, "label_graph", 1, meta)
    with pytest.raises(ArtifactError, match="no label graph"):
        load_label_graph(folder)
