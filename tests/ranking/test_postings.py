"""An inverted index against a dense product."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from unidec.ranking.neighbours import RowProducts
from unidec.ranking.sparse import Csr, Postings


def sparse(rng: np.random.Generator, shape: tuple[int, int], levels: int) -> csr_matrix:
    """Values from -1/4 to 1, most of them 0; with few levels many are equal."""
    values = np.round((rng.random(shape) * 1.25 - 0.25) * levels) / levels
    return csr_matrix(np.where(rng.random(shape) < 0.6, 0, values), dtype=np.float32)


def slow_best(product: np.ndarray, num: int) -> tuple[list[float], list[int]]:
    """The largest positive ones, of equals the first."""
    rows = sorted(range(len(product)), key=lambda row: (-product[row], row))
    best = [row for row in rows if product[row] > 0][:num]
    missing = num - len(best)
    return product[best].tolist() + [0.0] * missing, best + [-1] * missing


@pytest.mark.parametrize("levels", [2, 4, 1000])
@pytest.mark.parametrize("shape", [(30, 17, 8), (1, 1, 1), (5, 9, 0), (40, 3, 20)])
def test_the_best_rows_and_the_first_of_equals(rng, shape, levels):
    num_rows, num_columns, num_queries = shape
    matrix = sparse(rng, (num_rows, num_columns), levels)
    queries = sparse(rng, (num_queries, num_columns), levels)
    postings = Postings(matrix)
    products = (queries.toarray().astype(np.float64) @ matrix.toarray().T).astype(np.float32)
    for num in (1, 4, num_rows, num_rows + 3):
        scores, rows = postings.best(Csr.of(queries), num)
        for product, score_K, row_K in zip(products, scores, rows, strict=True):
            expected_scores, expected_rows = slow_best(product, num)
            np.testing.assert_allclose(score_K, expected_scores, rtol=1e-5, atol=1e-6)
            if levels < 1000:  # exact sums
                assert row_K.tolist() == expected_rows


@pytest.mark.parametrize("levels", [4, 1000])
def test_more_rows_than_are_added_up_at_once(rng, levels):
    num_rows = 70_000
    values = np.round(rng.uniform(-0.25, 1, (num_rows, 9)) * levels) / levels
    is_there = rng.random(values.shape) < np.geomspace(0.0001, 0.9, 9)
    matrix = csr_matrix(np.where(is_there, values, 0), dtype=np.float32)
    queries = sparse(rng, (5, 9), levels)
    products = (queries.toarray().astype(np.float64) @ matrix.toarray().T).astype(np.float32)
    query_P = np.repeat(np.arange(5), 400)
    row_P = np.sort(rng.integers(0, num_rows, (5, 400))).ravel()
    for num in (0, 1, 200):
        scores, rows, of_pairs = Postings(matrix).search(Csr.of(queries), num, query_P, row_P)
        np.testing.assert_allclose(of_pairs, products[query_P, row_P], rtol=1e-5, atol=1e-6)
        for query, product in enumerate(products):
            expected_scores, expected_rows = slow_best(product, num)
            np.testing.assert_allclose(scores[query], expected_scores, rtol=1e-5, atol=1e-6)
            if levels < 1000:  # exact sums
                assert rows[query].tolist() == expected_rows


def test_the_product_of_some_pairs(rng):
    matrix = sparse(rng, (30, 17), 1000)
    queries = sparse(rng, (8, 17), 1000)
    query_P, row_P = np.divmod(np.sort(rng.integers(0, 8 * 30, 100)), 30)
    found = Postings(matrix).at(Csr.of(queries), query_P, row_P)
    expected = (queries @ matrix.T).toarray()[query_P, row_P]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_one_query_and_many_have_the_same_bits(rng):
    postings = Postings(sparse(rng, (300, 40), 1000))
    queries = sparse(rng, (50, 40), 1000)
    together = postings.best(Csr.of(queries), 20)
    for query in range(50):
        alone = postings.best(Csr.of(queries[query]), 20)
        for one, many in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one[0], many[query])


def test_several_threads_search_at_once(rng):
    postings = Postings(sparse(rng, (300, 40), 1000))
    queries = sparse(rng, (200, 40), 1000)
    expected = postings.best(Csr.of(queries), 20)
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(postings.best(Csr.of(queries), 20)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for scores, rows in found:
        np.testing.assert_array_equal(scores, expected[0])
        np.testing.assert_array_equal(rows, expected[1])


def test_the_products_of_rows_with_each_other(rng):
    matrix = sparse(rng, (30, 17), 1000)
    row_BN = rng.integers(-1, 30, (5, 6))
    row_BN[4] = -1
    row_BN[3] = row_BN[3, 0]  # the same row several times
    products = RowProducts(matrix)
    for _ in range(2):  # nothing is left of a call
        found_BNN = products.of(row_BN)
        for row_N, found_NN in zip(row_BN, found_BNN, strict=True):
            vectors = matrix[row_N].toarray() * (row_N >= 0)[:, None]
            np.testing.assert_allclose(found_NN, vectors @ vectors.T, rtol=1e-5, atol=1e-6)


def test_squares_of_the_columns_that_a_query_shares_with_its_row(rng):
    matrix = sparse(rng, (30, 17), 1000)
    queries = sparse(rng, (12, 17), 1000)
    row_B = rng.integers(0, 30, 12)
    found = Postings(matrix).shared_squares(Csr.of(queries), row_B)
    is_shared = matrix[row_B].toarray() != 0
    expected = (queries.toarray() ** 2 * is_shared).sum(axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
