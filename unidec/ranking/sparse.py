"""Compiled loops over sparse arrays: sparse sums, selection of the largest scores, and an inverted
index. No query allocates an array over all rows or labels: each thread keeps buffers, of which a
query touches only the entries that it needs.

numba compiles a function at its first call. The machine code is stored beside the source or in the
user's cache folder (`NUMBA_CACHE_DIR`), so that only the first process compiles. Sums are computed
in float32 in a fixed order, which does not depend on the number of queries.

Legend: B queries, L labels, R rows, F columns (words), K results, N entries of a matrix, scores of
pairs, or rows of a query; E entries of those rows, P pairs of a query and a row, T votes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from unidec.data.chunks import offsets_of

Array = NDArray[Any]
Floats = NDArray[np.float32]
Rows = NDArray[np.int64]
NOT_REACHED = np.float32(-np.inf)
_ROWS_AT_ONCE = 1 << 14  # their sums fit in a core's cache
_GROUP = 64
NO_ROWS = np.zeros(0, dtype=np.int64)


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a function; it releases the GIL while it runs."""
    compile_it = partial(numba.njit, nogil=True, error_model="numpy", **options)
    try:
        return compile_it(cache=True)(function)
    except RuntimeError:  # no cache folder is writable: each process compiles
        return compile_it()(function)


# for sums of many products: vector instructions may reorder them
compiled_reordered = partial(compiled, fastmath={"reassoc", "contract", "nsz"})
# for the innermost calls: without inlining, a call takes several times as long
compiled_inline = partial(compiled, inline="always")


def best_first(score_BC: Floats, row_BC: Rows, k: int) -> tuple[Floats, Rows]:
    """The k candidates of each query with the highest scores; ties are ordered by row."""
    order_BK = np.lexsort((row_BC, -score_BC), axis=1)[:, :k]
    best_BK = np.take_along_axis(score_BC, order_BK, axis=1)
    return best_BK, np.take_along_axis(row_BC, order_BK, axis=1)


def first_of_each(group_P: Rows, num_groups: int) -> Rows:
    """Index of the first entry of each group in `group_P`, which ascends, and at the end the number
    of entries: int64 [groups + 1].
    """
    return np.searchsorted(group_P, np.arange(num_groups + 1))


class Csr(NamedTuple):
    """A CSR matrix for compiled code.

    Attributes:
        begin: int64 [R + 1], offset of each row's first entry. value: float32 [N].
        column: uint32 [N], since compiled code need not check unsigned indices for negative values.
    """

    begin: NDArray[np.int64]
    column: NDArray[np.uint32]
    value: NDArray[np.float32]

    @classmethod
    def of(cls, matrix: csr_matrix) -> Csr:
        """The same entries; arrays are copied only if their types differ."""
        return cls(
            matrix.indptr.astype(np.int64, copy=False),
            matrix.indices.astype(np.int32, copy=False).view(np.uint32),
            matrix.data.astype(np.float32, copy=False),
        )


class Sums(NamedTuple):
    """Sums by column, of which few have entries.

    Attributes:
        total: float32, the sum of each column reached; `NOT_REACHED` for other columns, and for all
            columns between two uses.
        reached: uint32, the columns reached, in order of their first entry.
    """

    total: NDArray[np.float32]
    reached: NDArray[np.uint32]


class Workspace(threading.local):
    """Thread-local `Sums` for a number of columns, created at a thread's first use."""

    def __init__(self, num_columns: int) -> None:
        total = np.full(num_columns, NOT_REACHED)
        self.sums = Sums(total, np.zeros(num_columns, dtype=np.uint32))


@compiled_inline
def add(sums: Sums, num_reached: int, column: int, amount: float) -> Any:
    """Add to the sum of a column; returns the number of columns reached."""
    total = sums.total[column]
    if total == NOT_REACHED:
        sums.reached[num_reached] = column
        sums.total[column] = amount
        return num_reached + 1
    sums.total[column] = total + amount
    return num_reached


def largest_of_each(begin_B: Array, score_N: Array, num: int) -> Rows:
    """Indices in `score_N` of each query's `num` largest scores, largest first, ties ordered by
    index: int64 [B, K], -1 where a query has fewer scores.

    Args:
        begin_B: int [B + 1], index of each query's first score.
    """
    place_BK = np.full((len(begin_B) - 1, num), -1, dtype=np.int64)
    _largest_of_each(begin_B, score_N, place_BK)
    return place_BK


def at_places(value_N: Array, place_BK: Rows, missing: float) -> Array:
    """Values at the places that `largest_of_each` returns; `missing` where there is none."""
    with_missing = np.append(value_N, value_N.dtype.type(missing))  # its last place is also -1
    return with_missing[place_BK]


def keep_largest(matrix: csr_matrix, num: int) -> csr_matrix:
    """A copy with only the `num` largest entries of each row; the first of equal values wins."""
    is_kept_N = np.zeros(matrix.nnz, dtype=bool)
    _mark_largest(Csr.of(matrix), num, is_kept_N)
    before_N = offsets_of(is_kept_N)
    kept = (matrix.data[is_kept_N], matrix.indices[is_kept_N], before_N[matrix.indptr])
    return csr_matrix(kept, shape=matrix.shape)


@compiled
def _largest_of_each(begin_B: Array, score_N: Array, place_BK: Array) -> None:
    score_K = np.empty(place_BK.shape[1], dtype=score_N.dtype)
    for query in range(len(place_BK)):
        place_K = place_BK[query]
        num_kept = _keep_between(begin_B[query], begin_B[query + 1], score_N, score_K, place_K)
        sort_kept(score_K, place_K, num_kept)


@compiled
def _mark_largest(matrix: Csr, num: int, is_kept_N: Array) -> None:
    value_K = np.empty(num, dtype=np.float32)
    place_K = np.empty(num, dtype=np.int64)
    for row in range(len(matrix.begin) - 1):
        end = matrix.begin[row + 1]
        num_kept = _keep_between(matrix.begin[row], end, matrix.value, value_K, place_K)
        for n in range(num_kept):
            is_kept_N[place_K[n]] = True


@compiled
def _keep_between(begin: int, end: int, score_N: Array, score_K: Array, place_K: Array) -> Any:
    """Build a heap of the largest scores from `begin` to `end` (exclusive); returns its size."""
    num_kept = np.int64(0)
    for place in range(begin, end):
        num_kept = keep(score_N[place], place, score_K, place_K, num_kept)
    return num_kept


@compiled
def keep(score: Any, place: Any, score_K: Array, place_K: Array, num_kept: int) -> Any:
    """Insert a score into the heap of the K largest, if it is one of them; of equal scores, the one
    with the smaller `place` counts as larger. Returns the heap's size.
    """
    if num_kept == len(score_K):
        if num_kept and _is_worse(score_K[0], place_K[0], score, place):
            _replace_root(score, place, score_K, place_K, num_kept)
        return num_kept
    at = num_kept
    while at > 0:
        above = (at - 1) // 2
        if not _is_worse(score, place, score_K[above], place_K[above]):
            break
        score_K[at] = score_K[above]
        place_K[at] = place_K[above]
        at = above
    score_K[at] = score
    place_K[at] = place
    return num_kept + 1


@compiled
def sort_kept(score_K: Array, place_K: Array, num_kept: int) -> None:
    """Sort the heap in place, largest first."""
    for last in range(num_kept - 1, 0, -1):
        score = score_K[last]
        place = place_K[last]
        score_K[last] = score_K[0]
        place_K[last] = place_K[0]
        _replace_root(score, place, score_K, place_K, last)


@compiled
def _is_worse(score: Any, place: Any, other_score: Any, other_place: Any) -> Any:
    return score < other_score or (score == other_score and place > other_place)


@compiled
def _replace_root(score: Any, place: Any, score_K: Array, place_K: Array, num_kept: int) -> None:
    at = 0
    while 2 * at + 1 < num_kept:
        below = 2 * at + 1
        right = below + 1
        if right < num_kept and _is_worse(
            score_K[right], place_K[right], score_K[below], place_K[below]
        ):
            below = right
        if not _is_worse(score_K[below], place_K[below], score, place):
            break
        score_K[at] = score_K[below]
        place_K[at] = place_K[below]
        at = below
    score_K[at] = score
    place_K[at] = place


class Postings:
    """An inverted index of the rows of a matrix. Thread-safe.

    Args:
        matrix_RF: CSR [R, F].
    """

    def __init__(self, matrix_RF: csr_matrix) -> None:
        columns = csr_matrix(matrix_RF.T, dtype=np.float32)
        columns.sort_indices()
        self._columns = Csr.of(columns)
        self._num_rows = matrix_RF.shape[0]
        self._some_rows = _SomeRows()

    def search(
        self, queries: Csr, num: int, query_P: Rows = NO_ROWS, row_P: Rows = NO_ROWS
    ) -> tuple[Floats, Rows, Floats]:
        """The rows with the largest positive inner products, best first, ties ordered by row; and
        the inner products of the given pairs.

        Args:
            query_P, row_P: pairs, sorted by query, then by row.

        Returns:
            inner products float32 [B, K] and rows int64 [B, K], 0 and -1 where there is no result;
            inner products of the pairs float32 [P].
        """
        num_queries = len(queries.begin) - 1
        score_BK = np.zeros((num_queries, num), dtype=np.float32)
        row_BK = np.full(score_BK.shape, -1, dtype=np.int64)
        score_P = np.zeros(len(row_P), dtype=np.float32)
        pairs = _Pairs(first_of_each(query_P, num_queries), row_P, score_P)
        index = _Index(self._columns, self._num_rows)
        _search(queries, index, self._some_rows.sums, pairs, score_BK, row_BK)
        return score_BK, row_BK, score_P

    def best(self, queries: Csr, num: int) -> tuple[Floats, Rows]:
        """The largest positive inner products, and their rows: see `search`."""
        score_BK, row_BK, _ = self.search(queries, num)
        return score_BK, row_BK

    def at(self, queries: Csr, query_P: Rows, row_P: Rows) -> Floats:
        """Inner products of pairs that are sorted by query, then by row: float32 [P]."""
        *_, score_P = self.search(queries, 0, query_P, row_P)
        return score_P

    def shared_squares(self, queries: Csr, row_B: Rows) -> Floats:
        """Sum of the squares of each query's values in the columns in which its row has an entry,
        float32 [B].
        """
        return _shared_squares(queries, self._columns, row_B)


class _Index(NamedTuple):
    """An inverted index for compiled code: the columns as CSR [F, R], with ascending rows."""

    columns: Csr
    num_rows: int


@compiled
def _shared_squares(queries: Csr, columns: Csr, row_B: Array) -> Any:
    sum_B = np.zeros(len(row_B), dtype=np.float32)
    for query, row in enumerate(row_B):
        for entry in range(queries.begin[query], queries.begin[query + 1]):
            column = queries.column[entry]
            rows = columns.column[columns.begin[column] : columns.begin[column + 1]]
            place = np.searchsorted(rows, row)
            if place < len(rows) and rows[place] == row:
                sum_B[query] += queries.value[entry] ** 2
    return sum_B


class _Pairs(NamedTuple):
    """Pairs sorted by query: offset of each query's first pair, rows, and inner products."""

    begin_B: Array
    row_P: Array
    score_P: Array


class _RowSums(NamedTuple):
    """Sums of `_ROWS_AT_ONCE` rows, 0 between two uses; and for each group of `_GROUP` rows,
    whether any row was reached.
    """

    total: NDArray[np.float32]
    is_reached: NDArray[np.bool_]


class _SomeRows(threading.local):
    """Thread-local `_RowSums`."""

    def __init__(self) -> None:
        total = np.zeros(_ROWS_AT_ONCE, dtype=np.float32)
        self.sums = _RowSums(total, np.zeros(_ROWS_AT_ONCE // _GROUP, dtype=bool))


@compiled
def _search(
    queries: Csr, index: _Index, sums: _RowSums, pairs: _Pairs, score_BK: Array, row_BK: Array
) -> None:
    """Process the rows in blocks whose sums fit in the processor's cache."""
    begin_F = index.columns.begin
    for query in range(len(score_BK)):
        column_E = queries.column[queries.begin[query] : queries.begin[query + 1]]
        weight_E = queries.value[queries.begin[query] : queries.begin[query + 1]]
        next_E = begin_F[column_E].astype(np.uint64)  # entries that are not yet added
        end_E = begin_F[column_E + np.uint32(1)].astype(np.uint64)
        pair = pairs.begin_B[query]
        num_kept = np.int64(0)
        for first_row in range(0, index.num_rows, _ROWS_AT_ONCE):
            after = first_row + _ROWS_AT_ONCE
            for e in range(len(column_E)):
                next_E[e] = _add_rows(
                    index.columns, weight_E[e], next_E[e], end_E[e], np.uint32(first_row), sums
                )
            while pair < pairs.begin_B[query + 1] and pairs.row_P[pair] < after:
                pairs.score_P[pair] = sums.total[pairs.row_P[pair] - first_row]
                pair += 1
            num_kept = _keep_sums(sums, first_row, score_BK[query], row_BK[query], num_kept)
        sort_kept(score_BK[query], row_BK[query], num_kept)


@compiled_inline
def _add_rows(
    columns: Csr, weight: float, place: Any, end: Any, first_row: Any, sums: _RowSums
) -> Any:
    """Add a column's entries in the current block of rows to the rows' sums; returns the index of
    the first entry after the block. Unsigned indices need no check for negative values.
    """
    while place < end:
        row = columns.column[place] - first_row
        if row >= np.uint64(_ROWS_AT_ONCE):
            break
        sums.total[row] += columns.value[place] * weight
        sums.is_reached[row // np.uint64(_GROUP)] = True
        place += np.uint64(1)
    return place


@compiled
def _keep_sums(sums: _RowSums, first_row: int, score_K: Array, row_K: Array, num_kept: int) -> Any:
    """Insert the positive sums into the heap of the K largest, and reset all sums. Returns the
    heap's size.
    """
    num_results = len(score_K)
    least = score_K[0] if 0 < num_kept == num_results else np.float32(0)
    for group in range(len(sums.is_reached)):
        if not sums.is_reached[group]:
            continue
        sums.is_reached[group] = False
        rows = range(group * _GROUP, (group + 1) * _GROUP)
        num_above = np.int32(0)
        for row in rows:
            num_above += sums.total[row] > least
        if num_above > 0 and num_results > 0:
            for row in rows:
                if sums.total[row] > least:  # of equal sums, the first row is kept
                    num_kept = keep(sums.total[row], first_row + row, score_K, row_K, num_kept)
                    if num_kept == num_results:
                        least = score_K[0]
        for row in rows:
            sums.total[row] = 0
    return num_kept
