"""Sparse TF-IDF scores against dense ones: neighbours, blocks, ties. comparison/test_peers.py tests whole methods."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from unidec.errors import DataError
from unidec.evaluation import tfidf
from unidec.evaluation.tfidf import TfidfRanker, fit_words, largest, top_rows


@pytest.fixture(scope="module")
def matrices(tiny_dataset):
    """Training vectors, their labels, label vectors, test vectors."""
    rows = tiny_dataset.rows("train")
    vectorizer, train_MF = fit_words(tiny_dataset.query_texts(rows), "here")
    labels, queries = tiny_dataset.label_texts(), tiny_dataset.query_texts(tiny_dataset.rows("test"))
    relevance = (tiny_dataset.relevance[rows] > 0).astype(np.float32)
    return train_MF, relevance, vectorizer.transform(labels), vectorizer.transform(queries)


def ranker(matrices, **options) -> TfidfRanker:
    train, relevance, labels, _ = matrices
    return TfidfRanker(csr_matrix(train.T), relevance, csr_matrix(labels.T), **options)


def test_fewer_neighbours_are_the_nearest_ones(matrices):
    train, relevance, _, queries = matrices
    own = ranker(matrices, neighbours=1).votes(train).toarray()
    assert (own[relevance.toarray() > 0] > 0.999).all(), "a query's nearest neighbour is itself"
    cosine = (queries @ train.T).toarray()
    votes = ranker(matrices, neighbours=3).votes(queries).toarray()
    for near, found in zip(cosine, votes, strict=True):
        third = np.sort(near)[-3]
        voters = (near >= third) & (near > 0)  # those as near as the third vote too
        np.testing.assert_allclose(found, (near * voters) ** 2 @ relevance.toarray(), rtol=1e-5)


def test_blocks_change_nothing(matrices, monkeypatch):
    some, queries = ranker(matrices, neighbours=5), matrices[-1]
    whole = some.rank(queries, tfidf.METHODS, 43, "test")
    monkeypatch.setattr(tfidf, "BLOCK_SCORES", 5 * 43)
    blocks = some.rank(queries, tfidf.METHODS, 43, "test")
    assert whole.keys() == blocks.keys() == set(tfidf.METHODS)
    for method in tfidf.METHODS:
        for one, other in zip(whole[method], blocks[method], strict=True):
            np.testing.assert_array_equal(one, other)


def test_the_largest_of_a_row_with_all_ties():
    dense = np.array([[3, 1, 2, 2, 5], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [4, 4, 4, 4, 1]], dtype=np.float32)
    kept = largest(csr_matrix(dense), 3).toarray()
    assert kept.tolist() == [[3, 0, 2, 2, 5], [0] * 5, [1, 0, 0, 0, 0], [4, 4, 4, 4, 0]]


def test_sparse_scores_become_rows_with_ties_by_the_lower_label():
    rng = np.random.default_rng(0)
    dense = np.round(rng.random((7, 9)) * (rng.random((7, 9)) < 0.5), 1)
    dense[2] = 0
    labels, scores = top_rows(csr_matrix(dense), 4)
    for i, row in enumerate(dense):
        want = sorted((-value, label) for label, value in enumerate(row) if value)[:4]
        assert labels[i].tolist() == [label for _, label in want] + [-1] * (4 - len(want))
        np.testing.assert_allclose(scores[i][: len(want)], [-value for value, _ in want], rtol=1e-6)
        assert (scores[i][len(want) :] == -math.inf).all()


def test_texts_without_words_are_refused():
    with pytest.raises(DataError, match="without a word"):
        fit_words(["!", "the of"], "data/dataset")
