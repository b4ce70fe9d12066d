"""Sparse scores and products on plain arrays.

A single query needs about a dozen sparse operations, and creating a scipy matrix for each takes longer than the
operation itself.

Legend: B queries, L labels, N pairs with a score, P pairs to look up, F rows and C columns of a matrix, T rows to sum,
E entries of those rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix

Floats = npt.NDArray[np.float32]
Keys = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PairScores:
    """Scores of pairs of a query and a label; a pair that is not stored has the score 0.

    Attributes:
        key_N: int64 [N], query * L + label, ascending and unique. score_N: float32 [N].
        shape: (B, L).
    """

    key_N: Keys
    score_N: Floats
    shape: tuple[int, int]

    @classmethod
    def none(cls, shape: tuple[int, int]) -> PairScores:
        """Scores without any stored pair."""
        return cls(np.zeros(0, np.int64), np.zeros(0, np.float32), shape)

    @classmethod
    def of(cls, matrix_BL: csr_matrix) -> PairScores:
        """Scores from the stored entries of a matrix with sorted indices."""
        row_N = np.repeat(np.arange(matrix_BL.shape[0], dtype=np.int64), np.diff(matrix_BL.indptr))
        key_N = row_N * matrix_BL.shape[1] + matrix_BL.indices
        return cls(key_N, matrix_BL.data.astype(np.float32), matrix_BL.shape)

    def at(self, key_P: Keys) -> Floats:
        """Scores of the given pairs, float32 [P]."""
        if not len(self.key_N):
            return np.zeros(len(key_P), dtype=np.float32)
        at_P = np.minimum(np.searchsorted(self.key_N, key_P), len(self.key_N) - 1)
        return np.where(self.key_N[at_P] == key_P, self.score_N[at_P], np.float32(0))

    def top(self, count: int) -> Floats:
        """Each query's `count` largest scores, largest first, padded with 0: float32 [B, count]."""
        query_N = self.key_N // self.shape[1]
        order, rank_N = _order_and_rank(query_N, self.score_N)
        in_top = rank_N < count
        out = np.zeros((self.shape[0], count), dtype=np.float32)
        out[query_N[in_top], rank_N[in_top]] = self.score_N[order][in_top]
        return out

    def largest(self, count: int) -> Keys:
        """Keys of each query's `count` largest scores, ascending."""
        return self.key_N[largest_of_each(self.key_N // self.shape[1], self.score_N, count)]


_SCIPY_QUERIES = 16  # from this number of queries on, scipy's product is faster, including the creation of matrices


class SparseRows:
    """A sparse matrix for weighted sums of a few of its rows. Thread-safe."""

    def __init__(self, matrix_FC: csr_matrix) -> None:
        self.indptr, self.column_N = matrix_FC.indptr.astype(np.int64), matrix_FC.indices
        self.value_N, self.num_columns = matrix_FC.data.astype(np.float32, copy=False), int(matrix_FC.shape[1])
        self._matrix_FC = csr_matrix((self.value_N, self.column_N, matrix_FC.indptr), matrix_FC.shape)

    def entries(self, row_T: npt.NDArray) -> tuple[Keys, npt.NDArray, Floats]:
        """All entries of the rows `row_T`: position of the row in `row_T`, column and value, [E] each."""
        begin_T = self.indptr[row_T]
        count_T = self.indptr[row_T + 1] - begin_T
        place_E = np.repeat(np.arange(len(row_T)), count_T)
        at_E = np.arange(len(place_E)) + (begin_T - np.cumsum(count_T) + count_T)[place_E]
        return place_E, self.column_N[at_E], self.value_N[at_E]

    def product(self, matrix_BF: csr_matrix) -> Floats:
        """The product `matrix_BF` @ this matrix, dense float32 [B, C]."""
        if matrix_BF.shape[0] >= _SCIPY_QUERIES:
            return (matrix_BF.astype(np.float32, copy=False) @ self._matrix_FC).toarray()
        return self.sums(matrix_BF.indptr, matrix_BF.indices, matrix_BF.data)

    def sums(self, indptr: npt.NDArray, row_T: npt.NDArray, weight_T: Floats) -> Floats:
        """Weighted sums of rows, dense float32 [B, C]; sum b is over positions `indptr[b]` to `indptr[b + 1]`."""
        num_queries, query_T = len(indptr) - 1, np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
        place_E, column_E, value_E = self.entries(row_T)
        key_E = column_E + (query_T * self.num_columns)[place_E]
        sums = np.bincount(key_E, value_E * weight_T[place_E], minlength=num_queries * self.num_columns)
        return sums.astype(np.float32).reshape(num_queries, self.num_columns)


def _order_and_rank(row_N: npt.NDArray, value_N: npt.NDArray) -> tuple[npt.NDArray, npt.NDArray]:
    """Order of the entries by row, then by descending value (stable), and the rank of each sorted entry in its row.

    `row_N` must be ascending, so that the sorted entry n belongs to row `row_N[n]`.
    """
    return np.lexsort((-value_N, row_N)), np.arange(len(row_N)) - np.searchsorted(row_N, row_N)


def largest_of_each(row_N: npt.NDArray, value_N: npt.NDArray, count: int) -> npt.NDArray[np.bool_]:
    """Mask of the `count` largest entries of each row, bool [N]; the first of equal values wins. Rows must ascend."""
    order, rank_N = _order_and_rank(row_N, value_N)
    mask_N = np.empty(len(order), dtype=bool)
    mask_N[order] = rank_N < count
    return mask_N


def keep_largest(matrix: csr_matrix, count: int) -> csr_matrix:
    """A copy with only the `count` largest entries of each row; the first of equal values wins."""
    row_N = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    mask_N = largest_of_each(row_N, matrix.data, count)
    return csr_matrix((matrix.data[mask_N], (row_N[mask_N], matrix.indices[mask_N])), shape=matrix.shape)
