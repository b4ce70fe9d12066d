"""The rows of a sparse matrix with the largest inner products with a query, found by an inverted
index: the work is that of the entries in the query's columns, whatever the number of rows.

Sums are of float32 products in float64, in the order of the query's columns, and rounded to
float32: the same for one query and for many.

Legend: B queries, R rows, F columns (words), N entries of the matrix, E entries of the queries, K
results, P pairs of a query and a row.
"""

from __future__ import annotations

import threading
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from unidec.ranking.heads import Floats, Rows


class Postings:
    """An inverted index of the rows of a matrix. Thread-safe.

    Args:
        matrix_RF: CSR [R, F].
    """

    def __init__(self, matrix_RF: csr_matrix) -> None:
        matrix_RF = csr_matrix(matrix_RF, dtype=np.float32)
        matrix_RF.sort_indices()
        self.shape = matrix_RF.shape
        self._by_row = _arrays(matrix_RF)
        self._by_column = _arrays(csr_matrix(matrix_RF.T))
        self._work = threading.local()

    def best(self, query_BF: csr_matrix, num: int) -> tuple[Floats, Rows]:
        """The rows with the largest positive inner products, best first; ties are ordered by row.

        Returns:
            inner products float32 [B, K] and rows int64 [B, K]; 0 and -1 where there is no result.
        """
        num_queries = query_BF.shape[0]
        score_BK = np.zeros((num_queries, num), dtype=np.float32)
        row_BK = np.full(score_BK.shape, -1, dtype=np.int64)
        _best(*_arrays(query_BF), *self._by_column, *self._workspace(), score_BK, row_BK)
        return score_BK, row_BK

    def at(self, query_BF: csr_matrix, query_P: Rows, row_P: Rows) -> Floats:
        """Inner products of some pairs, float32 [P]. The indices of the queries must be sorted."""
        score_P = np.empty(len(query_P), dtype=np.float32)
        _at(*_arrays(query_BF), *self._by_row, query_P, row_P, score_P)
        return score_P

    def _workspace(self) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.int64]]:
        """This thread's sums of all rows, whether a row was reached, and a list of those that were.
        Made once; a query reads, writes and clears only what it reaches.
        """
        if not hasattr(self._work, "arrays"):
            num_rows = self.shape[0]
            reached = np.zeros(num_rows, dtype=bool)
            self._work.arrays = np.zeros(num_rows), reached, np.zeros(num_rows, dtype=np.int64)
        arrays: tuple[Any, Any, Any] = self._work.arrays
        return arrays


def _arrays(matrix: csr_matrix) -> tuple[NDArray[np.int64], NDArray[np.int32], Floats]:
    return (
        matrix.indptr.astype(np.int64, copy=False),
        matrix.indices.astype(np.int32, copy=False),
        matrix.data.astype(np.float32, copy=False),
    )


@numba.njit(nogil=True, cache=True)
def _best(
    begin_B: Any,
    column_E: Any,
    weight_E: Any,
    begin_F: Any,
    row_N: Any,
    value_N: Any,
    sum_R: Any,
    is_reached_R: Any,
    reached_R: Any,
    score_BK: Any,
    row_BK: Any,
) -> None:
    """Fill in the best rows of each query."""
    for query in range(len(begin_B) - 1):
        num_reached = 0
        for entry in range(begin_B[query], begin_B[query + 1]):
            column = column_E[entry]
            for place in range(begin_F[column], begin_F[column + 1]):
                row = row_N[place]
                if not is_reached_R[row]:
                    is_reached_R[row] = True
                    sum_R[row] = 0.0
                    reached_R[num_reached] = row
                    num_reached += 1
                sum_R[row] += np.float64(value_N[place] * weight_E[entry])
        num_kept = 0
        for n in range(num_reached):
            row = reached_R[n]
            is_reached_R[row] = False
            score = np.float32(sum_R[row])
            if score > 0:
                num_kept = _keep(score, row, score_BK[query], row_BK[query], num_kept)
        _sort(score_BK[query], row_BK[query], num_kept)


@numba.njit(nogil=True, cache=True)
def _is_worse(score: Any, row: Any, other_score: Any, other_row: Any) -> Any:
    return score < other_score or (score == other_score and row > other_row)


@numba.njit(nogil=True, cache=True)
def _keep(score: Any, row: Any, score_K: Any, row_K: Any, num_kept: int) -> int:
    """Put a row into the heap of the best rows, whose root is the worst of them; returns their
    number.
    """
    if num_kept == len(score_K):
        if not _is_worse(score_K[0], row_K[0], score, row):
            return num_kept
        _sink(score, row, score_K, row_K, num_kept)
        return num_kept
    place = num_kept
    while place > 0:
        above = (place - 1) // 2
        if not _is_worse(score, row, score_K[above], row_K[above]):
            break
        score_K[place] = score_K[above]
        row_K[place] = row_K[above]
        place = above
    score_K[place] = score
    row_K[place] = row
    return num_kept + 1


@numba.njit(nogil=True, cache=True)
def _sink(score: Any, row: Any, score_K: Any, row_K: Any, num_kept: int) -> None:
    """Replace the heap's root."""
    place = 0
    while 2 * place + 1 < num_kept:
        below = 2 * place + 1
        right = below + 1
        if right < num_kept and _is_worse(
            score_K[right], row_K[right], score_K[below], row_K[below]
        ):
            below = right
        if not _is_worse(score_K[below], row_K[below], score, row):
            break
        score_K[place] = score_K[below]
        row_K[place] = row_K[below]
        place = below
    score_K[place] = score
    row_K[place] = row


@numba.njit(nogil=True, cache=True)
def _sort(score_K: Any, row_K: Any, num_kept: int) -> None:
    """Order the heap, best first."""
    for last in range(num_kept - 1, 0, -1):
        score = score_K[last]
        row = row_K[last]
        score_K[last] = score_K[0]
        row_K[last] = row_K[0]
        _sink(score, row, score_K, row_K, last)


@numba.njit(nogil=True, cache=True)
def _at(
    begin_B: Any,
    column_E: Any,
    weight_E: Any,
    begin_R: Any,
    column_N: Any,
    value_N: Any,
    query_P: Any,
    row_P: Any,
    score_P: Any,
) -> None:
    """Fill in the inner products of the pairs: both lists of columns ascend."""
    for pair in range(len(query_P)):
        entry = begin_B[query_P[pair]]
        last_entry = begin_B[query_P[pair] + 1]
        place = begin_R[row_P[pair]]
        last_place = begin_R[row_P[pair] + 1]
        total = 0.0
        while entry < last_entry and place < last_place:
            if column_E[entry] < column_N[place]:
                entry += 1
            elif column_E[entry] > column_N[place]:
                place += 1
            else:
                total += np.float64(value_N[place] * weight_E[entry])
                entry += 1
                place += 1
        score_P[pair] = np.float32(total)
