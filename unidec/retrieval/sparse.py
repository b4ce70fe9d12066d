"""Sparse scores and products in plain arrays: a lone query needs a dozen of them, and scipy takes longer to make each
matrix than to multiply.

Legend: B queries, L labels, N pairs with a score, P pairs asked for, F rows and C columns of a matrix, T rows that are
summed, E entries of those rows.
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
    """Scores of some pairs of a query and a label; every other pair has 0.

    Attributes:
        key_N: int64 [N], query * L + label, ascending, each once. score_N: float32 [N].
        shape: (B, L).
    """

    key_N: Keys
    score_N: Floats
    shape: tuple[int, int]

    @classmethod
    def none(cls, shape: tuple[int, int]) -> PairScores:
        """No pair has a score."""
        return cls(np.zeros(0, np.int64), np.zeros(0, np.float32), shape)

    @classmethod
    def of(cls, matrix_BL: csr_matrix) -> PairScores:
        """The entries of a matrix with sorted indices."""
        row_N = np.repeat(np.arange(matrix_BL.shape[0], dtype=np.int64), np.diff(matrix_BL.indptr))
        key_N = row_N * matrix_BL.shape[1] + matrix_BL.indices
        return cls(key_N, matrix_BL.data.astype(np.float32), matrix_BL.shape)

    def at(self, key_P: Keys) -> Floats:
        """Scores of these pairs, float32 [P]."""
        if not len(self.key_N):
            return np.zeros(len(key_P), dtype=np.float32)
        at_P = np.minimum(np.searchsorted(self.key_N, key_P), len(self.key_N) - 1)
        return np.where(self.key_N[at_P] == key_P, self.score_N[at_P], np.float32(0))

    def top(self, count: int) -> Floats:
        """Each query's `count` largest scores, best first, 0 behind the last: float32 [B, count]."""
        key_N, query_N = self.key_N, self.key_N // self.shape[1]
        order = np.lexsort((-self.score_N, query_N))
        rank_N = np.arange(len(key_N)) - np.searchsorted(query_N, query_N)
        kept = rank_N < count
        out = np.zeros((self.shape[0], count), dtype=np.float32)
        out[query_N[kept], rank_N[kept]] = self.score_N[order][kept]
        return out

    def largest(self, count: int) -> Keys:
        """Keys of each query's `count` largest scores, ascending."""
        return self.key_N[largest_of_each(self.key_N // self.shape[1], self.score_N, count)]


_SOME = 16  # queries from which on scipy's product is faster, whatever it takes to make a matrix


class SparseRows:
    """A sparse matrix of which some rows are summed at a time. Safe from several threads at once."""

    def __init__(self, matrix_FC: csr_matrix) -> None:
        self.indptr, self.column_N = matrix_FC.indptr.astype(np.int64), matrix_FC.indices
        self.value_N, self.num_columns = matrix_FC.data.astype(np.float32, copy=False), int(matrix_FC.shape[1])
        self._matrix_FC = csr_matrix((self.value_N, self.column_N, matrix_FC.indptr), matrix_FC.shape)

    def entries(self, row_T: npt.NDArray) -> tuple[Keys, npt.NDArray, Floats]:
        """All entries of some rows: which of `row_T` it belongs to, column and value, [E] each."""
        begin_T = self.indptr[row_T]
        count_T = self.indptr[row_T + 1] - begin_T
        place_E = np.repeat(np.arange(len(row_T)), count_T)
        at_E = np.arange(len(place_E)) + (begin_T - np.cumsum(count_T) + count_T)[place_E]
        return place_E, self.column_N[at_E], self.value_N[at_E]

    def product(self, matrix_BF: csr_matrix) -> Floats:
        """A matrix times this one, dense float32 [B, C]."""
        weight_T: Floats = matrix_BF.data
        if matrix_BF.shape[0] >= _SOME:
            return (matrix_BF.astype(np.float32, copy=False) @ self._matrix_FC).toarray()
        return self.sums(matrix_BF.indptr, matrix_BF.indices, weight_T)

    def sums(self, indptr: npt.NDArray, row_T: npt.NDArray, weight_T: Floats) -> Floats:
        """Weighted sums of rows, dense float32 [B, C]: those from `indptr[b]` to `indptr[b + 1]` are added for b."""
        num_queries, query_T = len(indptr) - 1, np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
        place_E, column_E, value_E = self.entries(row_T)
        key_E = column_E + (query_T * self.num_columns)[place_E]
        sums = np.bincount(key_E, value_E * weight_T[place_E], minlength=num_queries * self.num_columns)
        return sums.astype(np.float32).reshape(num_queries, self.num_columns)


def largest_of_each(row_N: npt.NDArray, value_N: npt.NDArray, count: int) -> npt.NDArray[np.bool_]:
    """Which entries are among the `count` largest of their row, among equals the first: bool [N]; rows ascend."""
    order = np.lexsort((-value_N, row_N))
    rank_N = np.arange(len(order)) - np.searchsorted(row_N, row_N)
    kept_N = np.empty(len(order), dtype=bool)
    kept_N[order] = rank_N < count
    return kept_N


def heaviest(matrix: csr_matrix, count: int) -> csr_matrix:
    """The matrix with the largest `count` entries of each row alone; of equals the first."""
    row_N = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    kept = largest_of_each(row_N, matrix.data, count)
    return csr_matrix((matrix.data[kept], (row_N[kept], matrix.indices[kept])), shape=matrix.shape)
