"""Sparse TF-IDF scores against dense ones: neighbours, blocks, ties. comparison/test_peers.py tests
whole methods.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from unidec.errors import DataError
from unidec.evaluation import baselines
from unidec.evaluation.baselines import fit_words, largest, rank, top_rows

METHODS = ("knn", "label-match", "mix")


@pytest.fixture(scope="module")
def matrices(tiny_dataset):
    """Training vectors, their labels, label vectors, test vectors."""
    rows = tiny_dataset.rows("train")
    vectorizer, train_MF = fit_words(tiny_dataset.query_texts(rows), "here")
    labels = tiny_dataset.label_texts()
    queries = tiny_dataset.query_texts(tiny_dataset.rows("test"))
    relevance = (tiny_dataset.relevance[rows] > 0).astype(np.float32)
    return train_MF, relevance, vectorizer.transform(labels), vectorizer.transform(queries)


def ranked(matrices, methods) -> dict[str, np.ndarray]:
    train, relevance, labels, queries = matrices
    return rank(train, relevance, labels, queries, methods, 43, "test")


def test_fewer_neighbours_are_the_nearest_ones(matrices, monkeypatch):
    train, relevance, _, queries = matrices
    monkeypatch.setattr(baselines, "NEIGHBOURS", 3)
    for near, found in zip(
        (queries @ train.T).toarray(), ranked(matrices, ["knn"])["knn"], strict=True
    ):
        voters = (near >= np.sort(near)[-3]) & (near > 0)  # those as near as the third vote too
        votes = (near * voters) ** 2 @ relevance.toarray()
        assert set(found[found >= 0]) == set(np.flatnonzero(votes))
        assert (np.diff(votes[found[found >= 0]]) <= 1e-5).all()


def test_blocks_change_nothing(matrices, monkeypatch):
    whole = ranked(matrices, METHODS)
    monkeypatch.setattr(baselines, "BLOCK_SCORES", 5 * 43)
    blocks = ranked(matrices, METHODS)
    assert whole.keys() == blocks.keys() == set(METHODS)
    for method in METHODS:
        np.testing.assert_array_equal(whole[method], blocks[method])


def test_the_largest_of_a_row_with_all_ties():
    dense = np.array(
        [[3, 1, 2, 2, 5], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [4, 4, 4, 4, 1]], dtype=np.float32
    )
    kept = largest(csr_matrix(dense), 3).toarray()
    assert kept.tolist() == [[3, 0, 2, 2, 5], [0] * 5, [1, 0, 0, 0, 0], [4, 4, 4, 4, 0]]


def test_sparse_scores_become_rows_with_ties_by_the_lower_label():
    rng = np.random.default_rng(0)
    dense = np.round(rng.random((7, 9)) * (rng.random((7, 9)) < 0.5), 1)
    dense[2] = 0
    labels = top_rows(csr_matrix(dense), 4)
    for i, row in enumerate(dense):
        want = sorted((-value, label) for label, value in enumerate(row) if value)[:4]
        assert labels[i].tolist() == [label for _, label in want] + [-1] * (4 - len(want))


def test_texts_without_words_are_refused():
    with pytest.raises(DataError, match="no text has a word"):
        fit_words(["!", "the of"], "data/dataset")
