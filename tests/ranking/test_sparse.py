"""Sparse scores against dense arrays, degenerate ones among them."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.dense_votes import dense_votes
from scipy.sparse import csr_matrix

from unidec.ranking.heads import PairScores
from unidec.ranking.sparse import keep_largest


@pytest.fixture
def dense(rng) -> np.ndarray:
    """Whole numbers, so that many are equal; a row of zeros."""
    out = rng.integers(0, 4, size=(5, 9)).astype(np.float32)
    out[2] = 0
    return out


def kept(dense: np.ndarray, count: int) -> np.ndarray:
    """The `count` largest of each row above 0, of equals the first; others 0."""
    out = np.zeros_like(dense)
    for row, values in enumerate(dense):
        best = np.argsort(-values, kind="stable")[:count]
        out[row, best] = values[best]
    return out


def test_scores_of_pairs(dense):
    scores = PairScores.of(csr_matrix(dense))
    keys = np.arange(dense.size)
    np.testing.assert_array_equal(scores.at(keys), dense.ravel())
    np.testing.assert_array_equal(scores.at(keys[::-7]), dense.ravel()[::-7])
    np.testing.assert_array_equal(dense_votes(scores), dense)
    assert not PairScores.of(csr_matrix((5, 9))).at(keys).any()


@pytest.mark.parametrize("count", [1, 3, 20])
def test_the_largest_of_each_row(dense, count):
    wanted = kept(dense, count)
    np.testing.assert_array_equal(keep_largest(csr_matrix(dense), count).toarray(), wanted)


@pytest.mark.parametrize("count", [1, 3, 20])
def test_the_top_of_each_row(dense, count):
    wanted = -np.sort(-np.pad(dense, ((0, 0), (0, 20))), axis=1)[:, :count]
    largest, keys = PairScores.of(csr_matrix(dense)).best(count)
    np.testing.assert_array_equal(largest, wanted)
    is_found = keys >= 0
    np.testing.assert_array_equal(dense.ravel()[keys[is_found]], wanted[is_found])
    np.testing.assert_array_equal(is_found, wanted > 0)
    expected = np.flatnonzero(kept(dense, count))
    np.testing.assert_array_equal(np.sort(keys[is_found]), expected)
    largest, keys = PairScores.none((3, 4)).best(count)
    assert not largest.any()
    assert (keys == -1).all()
