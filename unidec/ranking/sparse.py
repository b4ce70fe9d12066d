"""Compiled loops over sparse arrays: sums that few entries reach, the largest scores of each query,
an inverted index, and votes. No array of all rows or labels is made for a query: each thread keeps
one, of which a query touches what it reaches.

numba compiles a function at its first call. The machine code is stored beside the source or in the
user's cache folder (`NUMBA_CACHE_DIR`), so that only the first process compiles. Sums are in
float32 and in a fixed order: the same for one query and for many.

Legend: B queries, L labels, R rows, F columns (words), K results, N entries of a matrix, scores of
pairs, or rows of a query; E entries of those rows, P pairs of a query and a row, T votes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
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
# votes of a label's text for co-occurring labels: weight, and smallest share
COMPANION = np.float32(0.5)
LEAST_SHARE = np.float32(0.1)
_ONE = np.float32(1)
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
            matrix.indices.astype(np.uint32),
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


@dataclass(frozen=True)
class PairScores:
    """Scores of pairs of a query and a label; a pair that is not stored has the score 0.

    Attributes:
        key_N: int64 [N], query * L + label, ascending and unique. score_N: float32 [N].
        shape: (B, L).
    """

    key_N: Rows
    score_N: Floats
    shape: tuple[int, int]

    @classmethod
    def none(cls, shape: tuple[int, int]) -> PairScores:
        """Scores without any stored pair."""
        return cls(np.zeros(0, np.int64), np.zeros(0, np.float32), shape)

    @classmethod
    def of(cls, matrix_BL: csr_matrix) -> PairScores:
        """Scores from the stored entries of a matrix with sorted indices."""
        num_labels_B = np.diff(matrix_BL.indptr)
        first_N = np.repeat(first_keys(*matrix_BL.shape), num_labels_B)
        key_N = first_N + matrix_BL.indices
        return cls(key_N, matrix_BL.data.astype(np.float32), matrix_BL.shape)

    def relative(self) -> PairScores:
        """Scores divided by the largest of their query; all must be positive."""
        query_N = self.key_N // self.shape[1]
        largest_B = np.zeros(self.shape[0], dtype=np.float32)
        np.maximum.at(largest_B, query_N, self.score_N)
        return replace(self, score_N=self.score_N / largest_B[query_N])

    def at(self, key_P: Rows) -> Floats:
        """Scores of the given pairs, float32 [P]."""
        if not len(self.key_N):
            return np.zeros(len(key_P), dtype=np.float32)
        last = len(self.key_N) - 1
        at_P = np.minimum(np.searchsorted(self.key_N, key_P), last)
        is_stored_P = self.key_N[at_P] == key_P
        return np.where(is_stored_P, self.score_N[at_P], np.float32(0))

    def best(self, count: int) -> tuple[Floats, Rows]:
        """Each query's `count` largest scores, largest first, and their keys: float32 and int64
        [B, count]; 0 and -1 where there is none.
        """
        num_queries, num_labels = self.shape
        begin_B = np.searchsorted(self.key_N, num_labels * np.arange(num_queries + 1))
        place_BT = largest_of_each(begin_B, self.score_N, count)
        if not len(self.key_N):
            return np.zeros(place_BT.shape, dtype=np.float32), place_BT
        score_BT = np.where(place_BT < 0, np.float32(0), self.score_N[place_BT])
        return score_BT, np.where(place_BT < 0, -1, self.key_N[place_BT])


def first_keys(num_queries: int, num_labels: int) -> Rows:
    """Key of each query's first label, [B, 1]."""
    return num_labels * np.arange(num_queries, dtype=np.int64)[:, None]


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
                num_kept = keep(score, np.int64(row), score_BK[query], row_BK[query], num_kept)
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


class Voters(NamedTuple):
    """What compiled code reads of the voters."""

    num_queries: int
    voted: Csr  # [voters, L]: labels of a training query; of a label, itself and co-occurring ones
    labels_ML: Csr
    label_counts: Array


class Ballots(NamedTuple):
    """The voters of each query, their weights, and the training query that is left out, or -1."""

    weight_BN: Array
    row_BN: Array
    left_out_B: Array


@compiled_inline
def _has(matrix: Csr, row: int, column: int) -> bool:
    for place in range(matrix.begin[row], matrix.begin[row + 1]):
        if matrix.column[place] == column:
            return True
    return False


@compiled_inline
def _share(voters: Voters, voter: int, place: int, left_out: int) -> Any:
    """Weight of a voter's vote for one of its labels, as if the training query `left_out` were
    absent: that changes only the shares of the labels that it has.
    """
    share = voters.voted.value[place]
    label = voters.voted.column[place]
    voting_label = voter - voters.num_queries
    if voting_label < 0 or voting_label == label:
        return share
    if left_out >= 0 and _has(voters.labels_ML, left_out, voting_label):
        count = voters.label_counts[voting_label]
        num_both = share * count
        if _has(voters.labels_ML, left_out, label):
            num_both -= _ONE
        share = num_both / max(count - _ONE, _ONE)
        if share < LEAST_SHARE:
            return np.float32(0)
    return COMPANION * share


@compiled
def count_votes(ballots: Ballots, voters: Voters, sums: Sums, key_T: Array, vote_T: Array) -> Any:
    """Fill in the positive sums of votes, query by query; returns their number."""
    num_labels = len(sums.total)
    num_queries, num_voters = ballots.row_BN.shape
    num_written = 0
    for query in range(num_queries):
        left_out = ballots.left_out_B[query]
        num_reached = np.int64(0)
        for n in range(num_voters):
            weight = ballots.weight_BN[query, n]
            if weight == 0:
                continue
            voter = ballots.row_BN[query, n]
            for place in range(voters.voted.begin[voter], voters.voted.begin[voter + 1]):
                label = voters.voted.column[place]
                vote = weight * _share(voters, voter, place, left_out)
                num_reached = add(sums, num_reached, label, vote)
        for n in range(num_reached):
            label = sums.reached[n]
            if sums.total[label] > 0:
                key_T[num_written] = query * num_labels + label
                vote_T[num_written] = sums.total[label]
                num_written += 1
            sums.total[label] = NOT_REACHED
    return num_written
