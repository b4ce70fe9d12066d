"""Label graph against the dense product, on random and degenerate matrices."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from helpers.label_targets import soft_targets
from scipy.sparse import csr_matrix

from unidec.config import LabelGraph
from unidec.data import label_graph, storage
from unidec.data.label_graph import build_label_graph, chosen_labels, load_label_graph
from unidec.errors import ArtifactError


def dense_reference(truth, threshold):
    """Soft targets by loops over label pairs."""
    truth = truth.astype(np.float64)
    graph = truth.T @ truth
    out = np.eye(len(graph))
    for j in np.flatnonzero(graph.diagonal()):
        for i in np.flatnonzero(graph[j]):
            share = graph[j, i] / graph[j, j]
            if share > threshold or i == j:
                out[j, i] = share
    return out


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def random_relevance(seed, num_queries=50, num_labels=20, density=0.15):
    rng = np.random.default_rng(seed)
    truth = (rng.random((num_queries, num_labels)) < density) * rng.choice(
        [0.5, 2.0], (num_queries, num_labels)
    )
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
    expected = dense_reference(relevance.toarray() > 0, threshold)
    np.testing.assert_allclose(got.toarray(), expected, rtol=1e-6)
    assert got.dtype == np.float32
    assert got.has_sorted_indices
    assert (got.data > 0).all()


def test_blocks_cover_all_labels_within_the_budget(monkeypatch):
    monkeypatch.setattr(label_graph, "_PAIRS_AT_ONCE", 40)
    binary = (random_relevance(5) > 0).astype(np.int32).tocsr()
    transposed = binary.T.tocsr()
    blocks = list(label_graph._blocks(binary, transposed))
    assert [start for start, _ in blocks] == [0] + [stop for _, stop in blocks[:-1]]
    assert blocks[-1][1] == 20
    assert len(blocks) > 3
    width_N = np.asarray(binary.sum(axis=1)).ravel()
    for start, stop in blocks:
        cost = sum(width_N[transposed[j].indices].sum() for j in range(start, stop))
        assert cost <= 40 or stop == start + 1


def test_hand_computed_and_not_symmetric():
    """Label 0 on queries 0, 1; label 1 on query 0 only: all of 1's queries have 0, half of 0's have
    1.
    """
    relevance = csr_matrix(np.array([[1, 1], [1, 0]]))
    assert soft_targets(relevance, 0.1).toarray().tolist() == [[1.0, 0.5], [1.0, 1.0]]
    assert soft_targets(relevance, 0.6).toarray().tolist() == [[1.0, 0.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    "shape",
    [
        (0, 4),
        (3, 1),
        (3, 4),
    ],
)
def test_no_positives_leave_the_diagonal(shape):
    np.testing.assert_array_equal(soft_targets(csr_matrix(shape), 0.1).toarray(), np.eye(shape[1]))


def test_repeated_entries_count_once():
    columns = [1, 0, 0, 0]
    messy = csr_matrix((np.ones(4), columns, [0, 3, 4]), shape=(2, 2))
    assert soft_targets(messy, 0.1).toarray().tolist() == [[1.0, 0.5], [1.0, 1.0]]


# -- variants
# --------------------------------------------------------------------------------------------------


def dense_glas(truth, threshold):
    """Sigmoid of the symmetrised conditional probabilities, by loops over label pairs."""
    graph = truth.astype(np.float64).T @ truth
    out = np.zeros(graph.shape)
    for j in range(len(graph)):
        for i in np.flatnonzero(graph[j]):
            forth = graph[j, i] / graph[j, j]
            back = graph[j, i] / graph[i, i]
            both = (forth + back) / 2
            out[j, i] = sigmoid(both) if both > threshold or i == j else 0
        if graph[j, j] == 0:
            out[j, j] = sigmoid(1)
    return out


@pytest.mark.parametrize("pairs_at_once", [1, 30, 1 << 22])
@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.35, 1.0])
def test_glas_equals_its_formula(monkeypatch, threshold, pairs_at_once):
    monkeypatch.setattr(label_graph, "_PAIRS_AT_ONCE", pairs_at_once)
    relevance = random_relevance(int(100 * threshold))
    got = soft_targets(relevance, threshold, kind="glas")
    expected = dense_glas(relevance.toarray() > 0, threshold)
    np.testing.assert_allclose(got.toarray(), expected, rtol=1e-6)
    np.testing.assert_array_equal(got.toarray(), got.toarray().T)
    assert got.dtype == np.float32 and got.has_sorted_indices


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
def test_self_is_one_hot(threshold):
    got = soft_targets(random_relevance(1), threshold, kind="self")
    assert np.array_equal(got.toarray(), np.eye(20))
    assert got.nnz == 20


def expected_visits(truth, hops):
    """Mean visits of a walk with restarts, hop by hop, from the dense chance of each hop."""
    to_query = truth.T.astype(np.float64)
    to_label = truth.astype(np.float64)
    to_query /= np.maximum(to_query.sum(1, keepdims=True), 1)
    to_label /= np.maximum(to_label.sum(1, keepdims=True), 1)
    hop = to_query @ to_label
    at = np.eye(truth.shape[1])
    visits = np.zeros((truth.shape[1],) * 2)
    for _ in range(hops):
        reached = at @ hop
        visits += reached
        at = label_graph._RESTART * np.eye(truth.shape[1]) + (1 - label_graph._RESTART) * reached
    return visits


def test_a_long_walk_visits_labels_as_often_as_chance_says(monkeypatch):
    monkeypatch.setattr(label_graph, "_HOPS", 40_000)
    relevance = random_relevance(2)
    truth = relevance.toarray() > 0
    visits = expected_visits(truth, 40_000)
    got = soft_targets(relevance, 0.0, kind="random-walk").toarray()
    seen = truth.any(0)
    expected = np.minimum(visits / np.maximum(np.diag(visits)[:, None], 1e-9), 1)
    expected[np.arange(20), np.arange(20)] = 1
    # some 6,000 visits of the label itself
    np.testing.assert_allclose(got[seen], expected[seen], atol=0.05)
    assert np.abs(got[seen] - expected[seen]).mean() < 0.004
    monkeypatch.setattr(label_graph, "_RESTART", 0.5)
    other = expected_visits(truth, 40_000)[seen]
    assert np.abs(other / other[:, seen].diagonal()[:, None] - expected[seen]).mean() > 0.012, (
        "it can tell restarts apart"
    )
    assert np.array_equal(got[~seen], np.eye(20)[~seen])
    one_hop = soft_targets(relevance, 0.0).toarray() > 0
    assert (got > 0).sum() > one_hop.sum(), "further hops reach labels that no query shares"
    assert (got[~one_hop].max(), got[one_hop].min()) < (0.3, 1)


def slow_walk(relevance, label, lane, lanes, draws):
    """Visits of one label's walk, hop by hop."""
    columns = relevance.tocsc()
    rows = relevance
    at = label
    visits = np.zeros(relevance.shape[1])
    for draw in draws:
        to_query, to_label, again = draw[:, lane]
        queries = columns.indices[columns.indptr[at] : columns.indptr[at + 1]]
        query = queries[int(to_query * len(queries))]
        labels = rows.indices[rows.indptr[query] : rows.indptr[query + 1]]
        at = labels[int(to_label * len(labels))]
        visits[at] += 1
        at = label if again < label_graph._RESTART else at
    return visits


@pytest.mark.parametrize("labels_at_once", [1, 7, 64])
@pytest.mark.parametrize("threshold", [0.0, 0.1, 1.0])
def test_walks_equal_walks_one_by_one(monkeypatch, threshold, labels_at_once):
    monkeypatch.setattr(label_graph, "_WALKS_AT_ONCE", labels_at_once)
    relevance = (random_relevance(6) > 0).astype(np.int32)
    expected = np.eye(20)
    for number, start in enumerate(range(0, 20, labels_at_once)):
        lanes = min(labels_at_once, 20 - start)
        rng = np.random.default_rng([label_graph._WALK_SEED, number])
        draws = [rng.random((3, lanes)) for _ in range(label_graph._HOPS)]
        for label in range(start, start + lanes):
            if relevance[:, [label]].nnz:
                visits = slow_walk(relevance, label, label - start, lanes, draws)
                row = np.minimum(visits / max(visits[label], 1), 1)
                row[label] = 1
                row[row <= threshold] = 0
                row[label] = 1
                expected[label] = row
    got = soft_targets(random_relevance(6), threshold, kind="random-walk")
    np.testing.assert_allclose(got.toarray(), expected, rtol=1e-6)
    assert got.has_sorted_indices and got.dtype == np.float32
    assert np.array_equal(
        soft_targets(random_relevance(6), threshold, kind="random-walk").toarray(), got.toarray()
    )


# -- share
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs_at_once", [1, 1 << 20])
@pytest.mark.parametrize("kind", ["cooccurrence", "random-walk", "glas", "self"])
@pytest.mark.parametrize("tail_first", [False, True])
def test_a_share_is_some_rows_of_the_whole_and_part_of_a_larger_share(
    monkeypatch, kind, tail_first, pairs_at_once
):
    monkeypatch.setattr(label_graph, "_PAIRS_AT_ONCE", pairs_at_once)
    relevance = random_relevance(7)
    whole = soft_targets(relevance, 0.1, kind=kind).toarray()
    count = (relevance.toarray() > 0).sum(0)
    before: set[int] = set()
    for share in (0.01, 0.25, 0.5, 0.95, 1.0):
        got = soft_targets(relevance, 0.1, kind=kind, share=share, tail_first=tail_first).toarray()
        rows = np.flatnonzero(got.any(1))
        assert len(rows) == max(1, round(share * 20))
        assert before <= set(rows.tolist())
        np.testing.assert_array_equal(got[rows], whole[rows])
        if tail_first and share < 1:
            assert count[rows].max() <= np.delete(count, rows).min()
        before = set(rows.tolist())


def test_equally_rare_labels_are_drawn_at_random():
    chosen = chosen_labels(np.zeros(1000, dtype=np.int64), 0.3, tail_first=True)
    assert chosen.sum() == 300
    assert 60 < chosen[:300].sum() < 120
    assert not chosen_labels(np.zeros(0, dtype=np.int64), 0.3, tail_first=True).any()


@pytest.mark.parametrize("kind", ["cooccurrence", "random-walk", "glas", "self"])
@pytest.mark.parametrize(
    "shape",
    [
        (0, 4),
        (3, 1),
        (3, 4),
        (2, 0),
    ],
)
def test_every_kind_takes_data_without_positives(kind, shape):
    got = soft_targets(csr_matrix(shape), 0.1, kind=kind)
    own = sigmoid(1) if kind == "glas" else 1
    expected = own * np.eye(shape[1])
    np.testing.assert_allclose(got.toarray(), expected, rtol=1e-6)


# -- on disk
# --------------------------------------------------------------------------------------------------


def fake_dataset():
    rows = {"train": np.arange(0, 50, 2), "test": np.arange(1, 50, 2)}
    return SimpleNamespace(relevance=random_relevance(8), num_labels=20, rows=rows.__getitem__)


def test_stored_graph_sees_training_rows_only(tmp_path):
    dataset = fake_dataset()
    build_label_graph(dataset, LabelGraph(threshold=0.2), tmp_path / "graph")
    got = load_label_graph(tmp_path / "graph")
    truth = dataset.relevance.toarray()[::2] > 0
    np.testing.assert_allclose(got.toarray(), dense_reference(truth, 0.2), rtol=1e-6)
    files = sorted(p.name for p in (tmp_path / "graph").iterdir())
    assert files == ["data.npy", "indices.npy", "indptr.npy", "manifest.json"]
    arrays = [np.load(tmp_path / "graph" / name).dtype for name in files[:3]]
    assert arrays == [np.float32, np.int32, np.int64]


@pytest.mark.parametrize(
    "settings",
    [
        LabelGraph(kind="random-walk", threshold=0.05),
        LabelGraph(kind="glas", share=0.4),
        LabelGraph(kind="self"),
        LabelGraph(share=0.3, tail_first=True),
    ],
)
def test_what_is_stored_is_what_the_settings_say(tmp_path, settings):
    dataset = fake_dataset()
    folder = build_label_graph(dataset, settings, tmp_path / "graph")
    expected = soft_targets(dataset.relevance[::2], **settings.model_dump())
    np.testing.assert_array_equal(load_label_graph(folder).toarray(), expected.toarray())
    assert (
        settings.model_dump().items()
        <= storage.read_manifest(folder, "label_graph", 1)["meta"].items()
    )


@pytest.mark.parametrize("name", ["data", "indices", "indptr"])
def test_faulty_folder_is_refused(tmp_path, name):
    folder = build_label_graph(fake_dataset(), LabelGraph(threshold=0.2), tmp_path / "graph")
    meta = storage.read_manifest(folder, "label_graph", 1)["meta"]
    array = np.load(folder / f"{name}.npy")
    np.save(folder / f"{name}.npy", array[:-1])
    with pytest.raises(ArtifactError, match="damaged"):
        load_label_graph(folder)
    storage.write_manifest(folder, "label_graph", 1, meta)
    with pytest.raises(ArtifactError, match="do not match"):
        load_label_graph(folder)


def test_columns_out_of_range_are_refused(tmp_path):
    folder = build_label_graph(fake_dataset(), LabelGraph(threshold=0.2), tmp_path / "graph")
    meta = storage.read_manifest(folder, "label_graph", 1)["meta"]
    indices = np.load(folder / "indices.npy")
    indices[4] = 20
    np.save(folder / "indices.npy", indices)
    storage.write_manifest(folder, "label_graph", 1, meta)
    with pytest.raises(ArtifactError, match="do not match"):
        load_label_graph(folder)
