"""Inner products of sparse rows: an inverted index finds the rows with the largest ones with a
query; the work is that of the entries in the query's columns, whatever the number of rows.

Sums are in float32, in the order of the query's columns: the same for one query and for many.

Legend: B queries, R rows, F columns (words), N rows of a query, E their entries, K results, P pairs
of a query and a row.
"""

from __future__ import annotations

import threading

import numpy as np
from scipy.sparse import csr_matrix

from unidec.ranking.compiled import (
    NOT_REACHED,
    Array,
    Csr,
    Sums,
    Workspace,
    add,
    compiled,
)
from unidec.ranking.heads import Floats, Rows
from unidec.ranking.largest import keep, sort_kept

_NO_PAIRS = np.zeros(0, dtype=np.int64)


class Postings:
    """An inverted index of the rows of a matrix. Thread-safe.

    Args:
        matrix_RF: CSR [R, F].
    """

    def __init__(self, matrix_RF: csr_matrix) -> None:
        columns = csr_matrix(matrix_RF.T, dtype=np.float32)
        columns.sort_indices()
        self._columns = Csr.of(columns)
        self._of_rows = Workspace(matrix_RF.shape[0])

    def search(
        self, queries: Csr, num: int, query_P: Rows = _NO_PAIRS, row_P: Rows = _NO_PAIRS
    ) -> tuple[Floats, Rows, Floats]:
        """The rows with the largest positive inner products, best first, ties ordered by row; and
        the inner products of some pairs.

        Args:
            query_P, row_P: pairs, ascending by query.

        Returns:
            inner products float32 [B, K] and rows int64 [B, K], 0 and -1 where there is no result;
            inner products of the pairs float32 [P].
        """
        num_queries = len(queries.begin) - 1
        score_BK = np.zeros((num_queries, num), dtype=np.float32)
        row_BK = np.full(score_BK.shape, -1, dtype=np.int64)
        score_P = np.zeros(len(row_P), dtype=np.float32)
        begin_B = np.searchsorted(query_P, np.arange(num_queries + 1))
        _read(queries, self._columns, self._of_rows.sums, begin_B, row_P, score_P, score_BK, row_BK)
        return score_BK, row_BK, score_P

    def best(self, queries: Csr, num: int) -> tuple[Floats, Rows]:
        """The rows with the largest positive inner products, and those: see `search`."""
        score_BK, row_BK, _ = self.search(queries, num)
        return score_BK, row_BK

    def at(self, queries: Csr, query_P: Rows, row_P: Rows) -> Floats:
        """Inner products of some pairs, ascending by query: float32 [P]."""
        *_, score_P = self.search(queries, 0, query_P, row_P)
        return score_P


class RowProducts:
    """Inner products of a matrix's rows with each other. Thread-safe.

    Args:
        matrix_RF: CSR [R, F].
    """

    def __init__(self, matrix_RF: csr_matrix) -> None:
        self._rows = Csr.of(matrix_RF)
        self._links = _Links(matrix_RF.shape[1])

    def of(self, row_BN: Rows) -> Floats:
        """Inner products of each query's rows, float32 [B, N, N]; 0 for row -1."""
        num_queries, num_rows = row_BN.shape
        product_BNN = np.zeros((num_queries, num_rows, num_rows), dtype=np.float32)
        _products(self._rows, row_BN, self._links.last_F, product_BNN)
        return product_BNN


class _Links(threading.local):
    """Each thread's own list of the last entry of each column, for `_products`."""

    def __init__(self, num_columns: int) -> None:
        self.last_F = np.full(num_columns, -1, dtype=np.int64)


@compiled
def _read(
    queries: Csr,
    columns: Csr,
    sums: Sums,
    begin_B: Array,
    row_P: Array,
    score_P: Array,
    score_BK: Array,
    row_BK: Array,
) -> None:
    num_results = score_BK.shape[1]
    for query in range(len(score_BK)):
        num_reached = np.int64(0)
        for entry in range(queries.begin[query], queries.begin[query + 1]):
            column = queries.column[entry]
            weight = queries.value[entry]
            for place in range(columns.begin[column], columns.begin[column + np.uint32(1)]):
                product = columns.value[place] * weight
                num_reached = add(sums, num_reached, columns.column[place], product)
        for pair in range(begin_B[query], begin_B[query + 1]):
            score = sums.total[row_P[pair]]
            if score != NOT_REACHED:
                score_P[pair] = score
        num_kept = np.int64(0)
        least = np.float32(0)
        for n in range(num_reached):
            row = sums.reached[n]
            score = sums.total[row]
            sums.total[row] = NOT_REACHED
            if score > 0 and score >= least and num_results > 0:
                num_kept = keep(score, row, score_BK[query], row_BK[query], num_kept)
                if num_kept == num_results:
                    least = score_BK[query, 0]
        sort_kept(score_BK[query], row_BK[query], num_kept)


@compiled
def _products(rows: Csr, row_BN: Array, last_F: Array, product_BNN: Array) -> None:
    """Add up the products of each pair of entries in the same column: the entries of a column are
    linked, the last one first.

    Args:
        last_F: last entry of each column, int64; all -1, as they are again afterwards.
    """
    num_rows = row_BN.shape[1]
    for query in range(len(row_BN)):
        num_entries = 0
        for n in range(num_rows):
            if row_BN[query, n] >= 0:
                num_entries += rows.begin[row_BN[query, n] + 1] - rows.begin[row_BN[query, n]]
        before_E = np.empty(num_entries, dtype=np.int64)
        row_E = np.empty(num_entries, dtype=np.int64)
        value_E = np.empty(num_entries, dtype=np.float32)
        entry = 0
        for n in range(num_rows):
            row = row_BN[query, n]
            if row < 0:
                continue
            for place in range(rows.begin[row], rows.begin[row + 1]):
                column = rows.column[place]
                value = rows.value[place]
                before_E[entry] = last_F[column]
                row_E[entry] = n
                value_E[entry] = value
                last_F[column] = entry
                other = entry
                while other >= 0:
                    product_BNN[query, n, row_E[other]] += value * value_E[other]
                    other = before_E[other]
                entry += 1
        for n in range(num_rows):
            row = row_BN[query, n]
            for m in range(n):
                product_BNN[query, m, n] = product_BNN[query, n, m]
            if row >= 0:
                for place in range(rows.begin[row], rows.begin[row + 1]):
                    last_F[rows.column[place]] = -1
