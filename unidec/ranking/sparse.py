"""Compiled loops over sparse arrays: sums that few entries reach, the largest scores of each query,
and an inverted index. No array of all rows or labels is made for a query: each thread keeps one, of
which a query touches what it reaches.

numba compiles a function at its first call. The machine code is stored beside the source or in the
user's cache folder (`NUMBA_CACHE_DIR`), so that only the first process compiles. Sums are in
float32 and in a fixed order: the same for one query and for many.

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

Array = NDArray[Any]
Floats = NDArray[np.float32]
Rows = NDArray[np.int64]
NOT_REACHED = np.float32(-np.inf)
_ROUNDED = np.float32(0.999)  # more than the order of a sum changes it
_READ_WHOLE = 1 << 15  # entries of a query's columns, if not more
_READ_OR_MULTIPLY = 16  # entries that are read in the time in which a row is multiplied
NO_ROWS = np.zeros(0, dtype=np.int64)


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a function; it releases the interpreter's lock while it runs."""
    compile_it = partial(numba.njit, nogil=True, error_model="numpy", **options)
    try:
        return compile_it(cache=True)(function)
    except RuntimeError:  # no folder can be written: each process compiles
        return compile_it()(function)


# for sums of many products: they are computed by vector instructions, in another order
compiled_reordered = partial(compiled, fastmath={"reassoc", "contract", "nsz"})
# for the innermost calls: a call of its own takes several times as long
compiled_inline = partial(compiled, inline="always")


class Csr(NamedTuple):
    """A CSR matrix as compiled code reads it.

    Attributes:
        begin: int64 [R + 1], place of each row's first entry. value: float32 [N].
        column: uint32 [N]; compiled code need not check whether it is negative.
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
    """Sums of columns to which few entries contribute.

    Attributes:
        total: float32, the sum of each column that was reached; `NOT_REACHED` for others, and for
            all between two uses.
        reached: uint32, the columns that were reached, in the order in which they were.
    """

    total: NDArray[np.float32]
    reached: NDArray[np.uint32]


class Workspace(threading.local):
    """Each thread's own `Sums` of a number of columns, made at its first use."""

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


def largest_of_each(begin_B: Array, score_N: Array, num: int) -> NDArray[np.int64]:
    """Places of the `num` largest scores of each query, largest first, of equals the first one
    first: int64 [B, K], -1 where a query has fewer scores.

    Args:
        begin_B: int [B + 1], place of each query's first score.
    """
    place_BK = np.full((len(begin_B) - 1, num), -1, dtype=np.int64)
    _largest_of_each(begin_B, score_N, place_BK)
    return place_BK


def keep_largest(matrix: csr_matrix, num: int) -> csr_matrix:
    """A copy with only the `num` largest entries of each row; the first of equal values wins."""
    is_kept_N = np.zeros(matrix.nnz, dtype=bool)
    _mark_largest(Csr.of(matrix), num, is_kept_N)
    before_N = np.concatenate([[0], np.cumsum(is_kept_N)])
    kept = (matrix.data[is_kept_N], matrix.indices[is_kept_N], before_N[matrix.indptr])
    return csr_matrix(kept, shape=matrix.shape)


@compiled
def _largest_of_each(begin_B: Array, score_N: Array, place_BK: Array) -> None:
    num = place_BK.shape[1]
    score_K = np.empty(num, dtype=np.float32)
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
    """Make a heap of the largest scores of some places; returns their number."""
    num_kept = np.int64(0)
    for place in range(begin, end):
        num_kept = keep(score_N[place], place, score_K, place_K, num_kept)
    return num_kept


@compiled
def keep(score: Any, place: Any, score_K: Array, place_K: Array, num_kept: int) -> Any:
    """Put a score into the heap of the K largest, if it is one of them; of equal scores, the
    smaller place is larger. Returns the number of scores in the heap.
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
    """Order the heap, largest first."""
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
        rows: [R, F], whose columns ascend.
    """

    def __init__(self, rows: Csr, num_columns: int) -> None:
        num_rows = len(rows.begin) - 1
        matrix_RF = csr_matrix(
            (rows.value, rows.column.view(np.int32), rows.begin), shape=(num_rows, num_columns)
        )
        self._rows = rows
        self._columns = Csr.of(csr_matrix(matrix_RF.T))
        self._most_F = _most_of_each(self._columns)
        self._of_rows = Workspace(num_rows)
        self._of_columns = Weights(num_columns)

    @classmethod
    def of(cls, matrix_RF: csr_matrix) -> Postings:
        """An index of the rows of a CSR matrix [R, F]."""
        matrix_RF.sort_indices()
        return cls(Csr.of(matrix_RF), matrix_RF.shape[1])

    def search(
        self, queries: Csr, num: int, query_P: Rows = NO_ROWS, row_P: Rows = NO_ROWS
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
        index = _Index(self._rows, self._columns, self._most_F)
        work = _Work(self._of_rows.sums, self._of_columns.weight_F)
        pairs = _Pairs(begin_B, row_P, score_P)
        _search(queries, index, work, pairs, score_BK, row_BK)
        return score_BK, row_BK, score_P

    def best(self, queries: Csr, num: int) -> tuple[Floats, Rows]:
        """The rows with the largest positive inner products, and those: see `search`."""
        score_BK, row_BK, _ = self.search(queries, num)
        return score_BK, row_BK

    def at(self, queries: Csr, query_P: Rows, row_P: Rows) -> Floats:
        """Inner products of some pairs, ascending by query: float32 [P]."""
        *_, score_P = self.search(queries, 0, query_P, row_P)
        return score_P


class Weights(threading.local):
    """Each thread's own weight of each column: that of a query while it is compared, else 0."""

    def __init__(self, num_columns: int) -> None:
        self.weight_F = np.zeros(num_columns, dtype=np.float32)


class _Index(NamedTuple):
    """What compiled code reads of an index; most_F bounds the values of each column."""

    rows: Csr
    columns: Csr
    most_F: Array


class _Work(NamedTuple):
    """Where compiled code adds up the rows of a query, and the query's weight of each column."""

    sums: Sums
    weight_F: Array


class _Pairs(NamedTuple):
    """Pairs in the order of their queries: the first of each query, and their inner products."""

    begin_B: Array
    row_P: Array
    score_P: Array


@compiled
def _most_of_each(columns: Csr) -> Array:
    """Bound on what an entry of each column adds to a sum: its largest value; infinite if one is
    negative, as then a sum that was begun is no bound.
    """
    most_F = np.zeros(len(columns.begin) - 1, dtype=np.float32)
    for column in range(len(most_F)):
        for place in range(columns.begin[column], columns.begin[column + 1]):
            value = columns.value[place]
            most_F[column] = max(most_F[column], value if value >= 0 else np.float32(np.inf))
    return most_F


@compiled_inline
def _multiply(rows: Csr, row: int, weight_F: Array) -> Any:
    """Inner product of a row and a query, summed in the order of the columns."""
    score = np.float32(0)
    for place in range(rows.begin[row], rows.begin[row + 1]):
        score += rows.value[place] * weight_F[rows.column[place]]
    return score


@compiled
def _rests(columns_E: Array, weight_E: Array, most_F: Array) -> Array:
    """Bound on what each entry and those after it add to a sum, float32 [E + 1]."""
    rest_E = np.zeros(len(columns_E) + 1, dtype=np.float32)
    for entry in range(len(columns_E) - 1, -1, -1):
        weight = weight_E[entry]
        most = weight * most_F[columns_E[entry]] if weight >= 0 else np.float32(np.inf)
        rest_E[entry] = rest_E[entry + 1] + most
    return rest_E


@compiled
def _add_column(columns: Csr, column: int, weight: float, sums: Sums, num_reached: int) -> Any:
    for place in range(columns.begin[column], columns.begin[column + np.uint32(1)]):
        product = columns.value[place] * weight
        num_reached = add(sums, num_reached, columns.column[place], product)
    return num_reached


@compiled
def _least_of_best(sums: Sums, num_reached: int, score_K: Array, row_K: Array) -> Any:
    """A little less than the smallest of the K largest sums: the order of a sum changes it by less
    than that. 0 if fewer were reached.
    """
    num_kept = np.int64(0)
    for n in range(num_reached):
        total = sums.total[sums.reached[n]]
        if num_kept < len(score_K) or total > score_K[0]:
            num_kept = keep(total, np.int64(sums.reached[n]), score_K, row_K, num_kept)
    return score_K[0] * _ROUNDED if num_kept == len(score_K) else np.float32(0)


@compiled
def _num_above(sums: Sums, num_reached: int, least: float) -> Any:
    """Number of sums that are at least this large."""
    num_above = np.int64(0)
    for n in range(num_reached):
        num_above += sums.total[sums.reached[n]] >= least
    return num_above


@compiled
def _search(
    queries: Csr, index: _Index, work: _Work, pairs: _Pairs, score_BK: Array, row_BK: Array
) -> None:
    columns = index.columns
    sums = work.sums
    for query in range(len(score_BK)):
        first = queries.begin[query]
        end = queries.begin[query + 1]
        num_entries = np.int64(0)
        for entry in range(first, end):
            column = queries.column[entry]
            num_entries += columns.begin[column + np.uint32(1)] - columns.begin[column]
        if num_entries <= _READ_WHOLE:
            num_reached = np.int64(0)
            for entry in range(first, end):
                column = queries.column[entry]
                num_reached = _add_column(columns, column, queries.value[entry], sums, num_reached)
            _read_pairs(query, pairs, sums)
            _keep_sums(sums, num_reached, score_BK[query], row_BK[query])
            continue
        for entry in range(first, end):
            work.weight_F[queries.column[entry]] = queries.value[entry]
        if score_BK.shape[1]:
            _search_long(queries, query, index, work, score_BK[query], row_BK[query])
        for pair in range(pairs.begin_B[query], pairs.begin_B[query + 1]):
            pairs.score_P[pair] = _multiply(index.rows, pairs.row_P[pair], work.weight_F)
        for entry in range(first, end):
            work.weight_F[queries.column[entry]] = 0


@compiled
def _read_pairs(query: int, pairs: _Pairs, sums: Sums) -> None:
    for pair in range(pairs.begin_B[query], pairs.begin_B[query + 1]):
        score = sums.total[pairs.row_P[pair]]
        if score != NOT_REACHED:
            pairs.score_P[pair] = score


@compiled
def _keep_sums(sums: Sums, num_reached: int, score_K: Array, row_K: Array) -> None:
    """Keep the K largest sums; none are left."""
    num_kept = np.int64(0)
    least = np.float32(0)
    for n in range(num_reached):
        row = sums.reached[n]
        score = sums.total[row]
        sums.total[row] = NOT_REACHED
        if score > 0 and score >= least and len(score_K) > 0:
            num_kept = keep(score, np.int64(row), score_K, row_K, num_kept)
            if num_kept == len(score_K):
                least = score_K[0]
    sort_kept(score_K, row_K, num_kept)


@compiled
def _search_long(
    queries: Csr, query: int, index: _Index, work: _Work, score_K: Array, row_K: Array
) -> None:
    """Find the best rows of a query whose columns have many entries. Most of those are in frequent
    columns, which say the least: rare columns are read first (MaxScore: Turtle and Flood 1995).

    Reading ends when no other row can be among the K best, and when it takes less time to multiply
    those that can. Their inner products are summed in the order of the columns, as those of other
    queries are.
    """
    sums = work.sums
    first = queries.begin[query]
    column_E = queries.column[first : queries.begin[query + 1]]
    weight_E = queries.value[first : queries.begin[query + 1]]
    begin_F = index.columns.begin
    num_entries_E = begin_F[column_E + np.uint32(1)] - begin_F[column_E]
    order_E = np.argsort(num_entries_E)
    rest_E = _rests(column_E[order_E], weight_E[order_E], index.most_F)
    num_left = num_entries_E.sum()
    num_reached = np.int64(0)
    num_read = 0
    least = np.float32(0)
    for entry in order_E:
        if num_entries_E[entry] > num_reached >= len(score_K):
            least = _least_of_best(sums, num_reached, score_K, row_K)
            can_end = rest_E[num_read] < least
            lowest = least - rest_E[num_read]
            if can_end and _num_above(sums, num_reached, lowest) * _READ_OR_MULTIPLY < num_left:
                break
        num_reached = _add_column(
            index.columns, column_E[entry], weight_E[entry], sums, num_reached
        )
        num_left -= num_entries_E[entry]
        num_read += 1
    else:
        least = _least_of_best(sums, num_reached, score_K, row_K)
    lowest = least - rest_E[num_read]
    num_kept = np.int64(0)
    for n in range(num_reached):
        row = sums.reached[n]
        is_open = sums.total[row] >= lowest
        sums.total[row] = NOT_REACHED
        if is_open:
            score = _multiply(index.rows, row, work.weight_F)
            if score > 0:
                num_kept = keep(score, np.int64(row), score_K, row_K, num_kept)
    sort_kept(score_K, row_K, num_kept)
    score_K[num_kept:] = 0
    row_K[num_kept:] = -1
