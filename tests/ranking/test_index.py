"""faiss indexes against an obvious exact search, and files that are not what they say."""

from __future__ import annotations

import builtins
import sys
import types

import numpy as np
import pytest
from helpers.slow_search import slow_search, wrong_in_threads
from helpers.tiny_bundle import recall_with_ties

from unidec.config.index_spec import IndexSpec
from unidec.errors import ArtifactError, UnidecError
from unidec.model.search import exact_search, recall
from unidec.ranking.heads import unit_rows
from unidec.ranking.index import LabelIndex

pytest.importorskip("faiss")


def _random(
    rng: np.random.Generator, num_labels: int, dim: int, num_queries: int
) -> tuple[np.ndarray, np.ndarray]:
    vectors = rng.normal(size=(num_labels, dim)).astype(np.float32)
    return vectors, rng.normal(size=(num_queries, dim)).astype(np.float32)


@pytest.mark.parametrize(
    ("num_labels", "dim", "k"),
    [
        (1, 1, 1),
        (1, 8, 5),
        (50, 3, 50),
        (300, 16, 10),
        (300, 16, 400),
    ],
)
def test_flat_is_exact(rng, num_labels, dim, k):
    vectors, queries = _random(rng, num_labels, dim, 33)
    scores, labels = LabelIndex.build(vectors).search(queries, k)
    expected_scores, expected = slow_search(queries, vectors, k)
    found = min(k, num_labels)
    assert (
        scores.shape == labels.shape == (33, k)
        and scores.dtype == np.float32
        and labels.dtype == np.int64
    )
    np.testing.assert_allclose(scores[:, :found], expected_scores, rtol=1e-4, atol=1e-5)
    assert recall_with_ties(labels, expected, scores, expected_scores) == 1.0
    assert (labels[:, found:] == -1).all()
    assert np.isneginf(scores[:, found:]).all()
    assert all(len(set(row[:found])) == found for row in labels.tolist())
    torch_scores, torch_labels = exact_search(queries, vectors, k)
    np.testing.assert_allclose(scores, torch_scores, rtol=1e-4, atol=1e-5)
    assert (
        recall_with_ties(
            labels[:, :found], torch_labels[:, :found], scores[:, :found], torch_scores[:, :found]
        )
        == 1.0
    )


def test_ties_come_in_label_order(rng):
    vectors = np.repeat(np.eye(4, dtype=np.float32), 3, axis=0)[rng.permutation(12)]
    queries = np.array([[4, 3, 2, 1], [1, 1, 1, 1]], dtype=np.float32)
    scores, labels = LabelIndex.build(vectors).search(queries, 12)
    _, expected = slow_search(queries, vectors, 12)
    assert np.array_equal(labels, expected)
    assert (np.diff(scores, axis=1) <= 0).all()


def test_hnsw_finds_nearly_all_of_equal_length(rng):
    centres = rng.normal(size=(40, 32)).astype(np.float32)
    vectors = unit_rows(
        centres[rng.integers(0, 40, 3000)] + 0.7 * rng.normal(size=(3000, 32)).astype(np.float32)
    )
    queries = unit_rows(
        centres[rng.integers(0, 40, 200)] + 0.7 * rng.normal(size=(200, 32)).astype(np.float32)
    )
    exact_scores, exact = LabelIndex.build(vectors).search(queries, 10)
    wide_spec = IndexSpec.parse("HNSW16,efConstruction=100")
    scores, labels = LabelIndex.build(vectors, wide_spec).search(queries, 10)
    assert recall_with_ties(labels, exact, scores, exact_scores) > 0.99
    narrow_spec = IndexSpec.parse("HNSW4,efConstruction=8", "efSearch=10")
    narrow = LabelIndex.build(vectors, narrow_spec).search(queries, 10)[1]
    assert recall(narrow, exact) < recall(labels, exact)


def test_hnsw_on_vectors_of_unequal_length(rng):
    """As with `clf_normalize=False`: lengths spread by a factor of ten. The default width still
    finds most of them.
    """
    vectors, queries = _random(rng, 3000, 32, 200)
    vectors *= rng.uniform(0.5, 5.0, size=(3000, 1)).astype(np.float32)
    exact = LabelIndex.build(vectors).search(queries, 10)[1]
    labels = LabelIndex.build(vectors, IndexSpec.parse("HNSW32")).search(queries, 10)[1]
    assert recall(labels, exact) > 0.95


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_saved_and_loaded_it_answers_the_same(rng, tmp_path, kind):
    vectors, queries = _random(rng, 400, 12, 20)
    index = LabelIndex.build(vectors, IndexSpec(kind=kind, links=8))
    index.save(tmp_path / "index.faiss")
    loaded = LabelIndex.load(tmp_path / "index.faiss", 400, 12, index.spec)
    assert loaded.num_labels == 400
    assert loaded.dim == 12
    assert loaded.spec.kind == kind
    for got, expected in zip(loaded.search(queries, 7), index.search(queries, 7), strict=True):
        assert np.array_equal(got, expected)
    LabelIndex.build(vectors, IndexSpec(kind=kind, links=8)).save(tmp_path / "again.faiss")
    assert (tmp_path / "again.faiss").read_bytes() == (tmp_path / "index.faiss").read_bytes()
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["again.faiss", "index.faiss"]


def test_hnsw_of_one_label(rng, tmp_path):
    vectors, queries = _random(rng, 1, 4, 3)
    LabelIndex.build(vectors, IndexSpec.parse("HNSW32")).save(tmp_path / "x")
    scores, labels = LabelIndex.load(tmp_path / "x", 1, 4, IndexSpec.parse("HNSW32")).search(
        queries, 2
    )
    assert labels.tolist() == [[0, -1]] * 3
    assert np.isneginf(scores[:, 1]).all()


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_several_threads_search_at_once(rng, kind):
    vectors, queries = _random(rng, 500, 16, 64)
    index = LabelIndex.build(vectors, IndexSpec(kind=kind))
    assert not wrong_in_threads(index, queries)


def test_bad_input_is_refused(rng):
    vectors, queries = _random(rng, 20, 4, 3)
    index = LabelIndex.build(vectors)
    bad = queries.copy()
    bad[1, 2] = np.nan
    for wrong, message in (
        (lambda: index.search(bad, 2), "must be finite"),
        (lambda: LabelIndex.build(np.full((3, 2), np.inf, dtype=np.float32)), "row 0 is not"),
        (lambda: LabelIndex.build(vectors[:0]), "at least one label"),
        (lambda: IndexSpec(kind="tree"), "kind"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
    scores, labels = index.search(queries[:0], 3)
    assert scores.shape == labels.shape == (0, 3)


def test_recall():
    exact = np.array([[1, 2, 3], [4, 5, -1]])
    assert recall(exact, exact) == 1.0
    assert recall(np.array([[3, 9, 1], [-1, -1, -1]]), exact) == pytest.approx(2 / 5)
    # 4 is right for the other query only
    assert recall(np.array([[4], [5]]), exact) == pytest.approx(1 / 5)
    assert recall(np.array([[1]]), np.array([[-1]])) == 1.0
    assert recall(np.array([[1, 2, 6]]), exact[:1]) == pytest.approx(2 / 3)


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_damaged_files_are_refused(rng, tmp_path, kind):
    vectors, _ = _random(rng, 200, 8, 1)
    path = tmp_path / "index.faiss"
    LabelIndex.build(vectors, IndexSpec(kind=kind, links=4)).save(path)
    whole = path.read_bytes()
    cuts = [0, 1, 3, 20, 44, 45, 60, len(whole) // 2, len(whole) - 1]
    for data in [whole[:cut] for cut in cuts] + [whole + b"\0", b"\x80\x04K\x01." + whole]:
        path.write_bytes(data)
        with pytest.raises(ArtifactError, match=r"index\.faiss"):
            LabelIndex.load(path, 200, 8, IndexSpec(kind=kind))
    path.write_bytes(whole)
    for labels, dim in (
        (199, 8),
        (201, 8),
        (200, 7),
        (200, 9),
        (100, 16),
    ):
        with pytest.raises(ArtifactError, match=r"index\.faiss"):
            LabelIndex.load(path, labels, dim, IndexSpec(kind=kind))
    with pytest.raises(ArtifactError):
        LabelIndex.load(path, 200, 8, IndexSpec(kind="hnsw" if kind == "flat" else "flat"))
    with pytest.raises(ArtifactError):
        LabelIndex.load(tmp_path / "none", 200, 8, IndexSpec(kind=kind))
    with pytest.raises(ArtifactError):
        LabelIndex.load(tmp_path, 200, 8, IndexSpec(kind=kind))


def test_counts_that_would_fill_the_memory_are_refused(rng, tmp_path):
    path = tmp_path / "index.faiss"
    LabelIndex.build(_random(rng, 50, 8, 1)[0]).save(path)
    data = bytearray(path.read_bytes())
    data[37:45] = (1 << 40).to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match="index file is damaged"):
        LabelIndex.load(path, 50, 8)


def test_a_flipped_byte_never_breaks_the_process(rng, tmp_path):
    """Any byte of the graph's part changed: either refused, or harmless (a link to another node, a
    float of a vector)."""
    vectors, queries = _random(rng, 120, 4, 5)
    path = tmp_path / "index.faiss"
    LabelIndex.build(vectors, IndexSpec.parse("HNSW2")).save(path)
    whole = path.read_bytes()
    refused = 0
    for at in rng.choice(len(whole), size=600, replace=False):
        data = bytearray(whole)
        data[at] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(data)
        try:
            index = LabelIndex.load(path, 120, 4, IndexSpec.parse("HNSW2"))
        except ArtifactError:
            refused += 1
            continue
        labels = index.search(queries, 6)[1]
        assert labels.max() < 120
        assert labels.min() >= -1
    assert refused > 100


def test_without_faiss_the_error_names_the_extras(rng, monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "faiss":
            raise ImportError("No module named 'faiss'")
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "faiss")
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UnidecError, match=r"unidec-xmc\[cpu\]"):
        LabelIndex.build(_random(rng, 3, 2, 1)[0])


def test_an_empty_folder_called_faiss_is_named(rng, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", types.ModuleType("faiss"))
    with pytest.raises(UnidecError, match="broken"):
        LabelIndex.build(_random(rng, 3, 2, 1)[0])
