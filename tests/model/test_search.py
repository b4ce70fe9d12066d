"""Exact search against a full sort in float64."""

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from unidec.errors import DataError
from unidec.model import search
from unidec.model.search import exact_search, query_block


def vectors(rng, rows, dim=6):
    return rng.normal(size=(rows, dim)).astype(np.float32)


def loop_search(query, label, k, exclude):
    scores = np.full((len(query), k), -np.inf)
    labels = np.full((len(query), k), -1)
    for i, q in enumerate(query.astype(np.float64)):
        ranked = sorted(
            (-float(q @ z), j) for j, z in enumerate(label.astype(np.float64)) if not exclude[i, j]
        )
        for place, (score, j) in enumerate(ranked[:k]):
            scores[i, place] = -score
            labels[i, place] = j
    return scores, labels


@pytest.mark.parametrize("block", [1, 4, 512])
@pytest.mark.parametrize("k", [1, 5, 12, 20])  # 12 labels: all of them, and more
@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("tile", [1, 5, 6, 12, 1 << 16])  # labels
def test_equals_a_full_sort(tile, density, k, block, rng, monkeypatch):
    monkeypatch.setattr(search, "LABELS_AT_ONCE", tile)
    query = vectors(rng, 9)
    label = vectors(rng, 12)
    excluded = rng.random((9, 12)) < density
    score, found = exact_search(
        query,
        label,
        k,
        exclude=sp.csr_matrix(excluded),
        block=block,
    )
    expected_score, expected = loop_search(query, label, k, excluded)
    assert score.dtype == np.float32 and found.dtype == np.int64
    assert np.array_equal(found, expected)
    np.testing.assert_allclose(score, expected_score, rtol=1e-5, atol=1e-6)


def test_without_exclusions_and_from_tensors(rng):
    query = vectors(rng, 7)
    label = vectors(rng, 10)
    _, expected = loop_search(query, label, 3, np.zeros((7, 10), dtype=bool))
    assert np.array_equal(exact_search(query, label, 3)[1], expected)
    assert np.array_equal(
        exact_search(torch.from_numpy(query), torch.from_numpy(label), 3)[1], expected
    )


def test_a_stored_zero_excludes_and_the_matrix_may_be_a_memory_map(tmp_path, rng):
    query = vectors(rng, 3)
    label = vectors(rng, 5)
    exclude = sp.csr_matrix((np.zeros(2), [4, 1], [0, 1, 1, 2]), shape=(3, 5))
    dense = np.zeros((3, 5), dtype=bool)
    dense[0, 4] = dense[2, 1] = True
    np.save(tmp_path / "q.npy", query)
    mapped = np.load(tmp_path / "q.npy", mmap_mode="r")
    _, found = exact_search(mapped, label, 5, exclude=exclude)
    _, expected = loop_search(query, label, 5, dense)
    assert np.array_equal(found, expected)


def ones(num, dim):
    return np.ones((num, dim), np.float32)


def test_equal_scores_return_each_label_once(rng):
    _, found = exact_search(ones(4, 3), ones(6, 3), 6)
    for labels in found:
        assert sorted(labels) == list(range(6))


def test_tiles_stay_small(monkeypatch):
    monkeypatch.setattr(search, "LABELS_AT_ONCE", 6)
    monkeypatch.setattr(search, "MAX_BLOCK_SCORES", 18)
    assert query_block(8, 4) == 3
    assert query_block(2, 4) == 4
    assert query_block(10**9, 4) == 3
    monkeypatch.setattr(search, "MAX_BLOCK_SCORES", 1)  # never less than one query
    assert query_block(8, 4) == 1


def test_no_labels():
    score, found = exact_search(ones(3, 2), ones(0, 2), 2)
    assert (score == -np.inf).all()
    assert (found == -1).all()


def test_no_queries():
    score, found = exact_search(ones(0, 3), ones(4, 3), 2)
    assert score.shape == found.shape == (0, 2)


def test_vectors_that_are_not_finite_are_refused(rng):
    query = vectors(rng, 4)
    label = vectors(rng, 5)
    for bad in (np.nan, np.inf):
        label[3, 1] = bad
        with pytest.raises(DataError, match=r"label vectors are not finite[\s\S]*rows \[3\]"):
            exact_search(query, label, 2)
