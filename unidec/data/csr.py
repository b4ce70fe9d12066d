"""Small helpers for CSR matrices: of pairs without values, and the rows and keys of entries.

Shape legend: P pairs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray
from scipy.sparse import csr_matrix

from unidec.data.chunks import groups_of


def ones_at(
    pairs: tuple[NDArray[Any], NDArray[Any]], shape: tuple[int, int], dtype: DTypeLike = np.float32
) -> csr_matrix:
    """A matrix with 1 at each of some pairs: their rows and columns, int [P]. A pair that is given
    several times counts as often.
    """
    return csr_matrix((np.ones(len(pairs[0]), dtype), pairs), shape=shape)


def pattern(matrix: csr_matrix, dtype: DTypeLike = np.float32) -> csr_matrix:
    """The matrix with value 1 for each stored entry, including stored zeros."""
    ones = np.ones(len(matrix.indices), dtype)
    return csr_matrix((ones, matrix.indices, matrix.indptr), shape=matrix.shape)


def rows_of(matrix: csr_matrix) -> NDArray[np.int64]:
    """The row of each stored entry, int64 [P]."""
    return groups_of(np.diff(matrix.indptr))


def keys_of(matrix: csr_matrix) -> NDArray[np.int64]:
    """Key `row * columns + column` of each stored entry, int64 [P]."""
    return rows_of(matrix) * matrix.shape[1] + matrix.indices
