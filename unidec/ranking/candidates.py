"""Sparse scores of pairs of a query and a label; candidates, and the k best of them.

Plain arrays: a query needs about a dozen sparse operations, and creating a scipy matrix for each
takes longer than the operation itself.

Legend: B queries, L labels, N pairs with a score, P pairs of a query and a candidate label, C
labels found for a query, K results; F rows and C columns of a matrix, T rows to sum, E entries of
those rows. A key is query * L + label.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix

from unidec.ranking.heads import Floats, Rows


@dataclass(frozen=True)
class Ranked:
    """The best labels of B queries.

    Attributes:
        rows: int64 [B, K] label rows, best first; -1 where a query has fewer than K results.
        scores: float32 [B, K]; -inf where there is no result.
        knn_scores: float32 [B, K], unweighted votes of similar training queries; NaN where there is
            no result; None if training queries do not vote.
        de_scores, clf_scores: float32 [B, K], each head's own score; NaN where there is no result;
            None if the model lacks the head, and before `Ranker.with_parts`.
    """

    rows: Rows
    scores: Floats
    knn_scores: Floats | None = None
    de_scores: Floats | None = None
    clf_scores: Floats | None = None


@dataclass(frozen=True)
class Candidates:
    """Candidate pairs of a query and a label, unique, sorted by query and label; no other pair can
    be among the best.

    Attributes:
        query_P, label_P: int64 [P]. votes_P: float32 [P], votes of each pair.
        num_queries: B.
    """

    query_P: Rows
    label_P: Rows
    votes_P: Floats
    num_queries: int

    @classmethod
    def of(cls, key_P: Rows, votes: PairScores) -> Candidates:
        """Candidates by their keys, ascending and unique."""
        num_queries, num_labels = votes.shape
        query_P, label_P = np.divmod(key_P, num_labels)
        return cls(query_P, label_P, votes.at(key_P), num_queries)

    def best(self, score_P: Floats, k: int) -> Ranked:
        """The k candidates of each query with the largest scores; ties are ordered by label row."""
        query_P = self.query_P
        count_B = np.bincount(query_P, minlength=self.num_queries)
        begin_B = np.cumsum(count_B) - count_B
        place_P = np.arange(len(query_P)) - begin_B[query_P]
        shape = (self.num_queries, count_B.max(initial=0))
        score_BC = np.full(shape, -np.inf, dtype=np.float32)
        score_BC[query_P, place_P] = score_P
        # three times as fast as one lexsort of all pairs
        order_BK = np.argsort(-score_BC, axis=1, kind="stable")[:, :k]
        num_best = order_BK.shape[1]
        found_BK = np.arange(num_best) < count_B[:, None]
        best = (begin_B[:, None] + order_BK)[found_BK]
        place = np.nonzero(found_BK)

        def ranked(value_P: Rows | Floats, missing: float) -> npt.NDArray[Any]:
            out_BK = np.full((self.num_queries, k), missing, dtype=value_P.dtype)
            out_BK[place] = value_P[best]
            return out_BK

        return Ranked(
            rows=ranked(self.label_P, -1),
            scores=ranked(score_P, -np.inf),
            knn_scores=ranked(self.votes_P, np.nan),
        )


class Compared:
    """Compares candidates with the reference candidates of their query.

    Args:
        reference_P: bool [P].
    """

    def __init__(self, pairs: Candidates, reference_P: npt.NDArray[np.bool_]) -> None:
        self.query_P = pairs.query_P
        self.num_queries = pairs.num_queries
        self.reference_P = reference_P

    def best(self, value_P: Floats) -> Floats:
        """The largest value of the query's reference candidates, float32 [P]; 0 without any."""
        reference_P = self.reference_P
        best_B = np.full(self.num_queries, -np.inf, dtype=np.float32)
        np.maximum.at(best_B, self.query_P[reference_P], value_P[reference_P])
        best_B[np.isneginf(best_B)] = 0
        return best_B[self.query_P]

    def rank(self, value_P: Floats) -> Floats:
        """The number of the query's reference candidates with a larger value, float32 [P]."""
        order = np.lexsort((-value_P, self.query_P))
        value = value_P[order]
        query = self.query_P[order]
        is_reference = self.reference_P[order]
        # reference candidates before each place
        before: Rows = np.cumsum(is_reference) - is_reference
        begins_query = np.diff(query, prepend=-1) > 0
        begins_run = begins_query.copy()  # of equal values
        begins_run[1:] |= value[1:] != value[:-1]
        run = np.flatnonzero(begins_run)[np.cumsum(begins_run) - 1]
        first = np.flatnonzero(begins_query)[np.cumsum(begins_query) - 1]
        rank_P = np.empty(len(order), dtype=np.float32)
        rank_P[order] = before[run] - before[first]
        return rank_P


def candidate_keys(
    found_BC: Rows, voted: Rows, num_labels: int, excluded: Rows | None = None
) -> Rows:
    """Keys of the retrieved labels and of those with votes, ascending, without excluded pairs.

    If `found_BC` holds the heads' k best labels without excluded ones and `voted` every label with
    a vote, the k best labels by heads + weight * votes are among them, for any weight >= 0.

    Args:
        found_BC: label rows, -1 for no result. voted, excluded: int64 keys.
    """
    key_BC = first_keys(len(found_BC), num_labels) + found_BC
    return without(np.union1d(key_BC[found_BC >= 0], voted), excluded)


def allowed_keys(
    allowed: Rows, num_queries: int, num_labels: int, excluded: Rows | None = None
) -> Rows:
    """Keys of the allowed labels (ascending rows) of each query, ascending, without excluded
    pairs.
    """
    key_BC = first_keys(num_queries, num_labels) + allowed
    return without(key_BC.ravel(), excluded)


def first_keys(num_queries: int, num_labels: int) -> Rows:
    """Key of each query's first label, [B, 1]."""
    return num_labels * np.arange(num_queries, dtype=np.int64)[:, None]


def without(key_P: Rows, excluded: Rows | None) -> Rows:
    """`key_P` without the excluded keys."""
    if excluded is None or not excluded.size:
        return key_P
    return key_P[~np.isin(key_P, excluded)]


def votes_alone(votes: PairScores, k: int, excluded: Rows | None = None) -> Ranked:
    """The k labels with the most votes; labels without votes are not returned."""
    candidates = Candidates.of(without(votes.key_N, excluded), votes)
    return candidates.best(candidates.votes_P, k)


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

    def at(self, key_P: Rows) -> Floats:
        """Scores of the given pairs, float32 [P]."""
        if not len(self.key_N):
            return np.zeros(len(key_P), dtype=np.float32)
        last = len(self.key_N) - 1
        at_P = np.minimum(np.searchsorted(self.key_N, key_P), last)
        is_stored_P = self.key_N[at_P] == key_P
        return np.where(is_stored_P, self.score_N[at_P], np.float32(0))

    def top(self, count: int) -> Floats:
        """Each query's `count` largest scores, largest first, padded with 0: float32 [B, count]."""
        query_N = self.key_N // self.shape[1]
        order, rank_N = _order_and_rank(query_N, self.score_N)
        top = rank_N < count
        top_BT = np.zeros((self.shape[0], count), dtype=np.float32)
        place = query_N[top], rank_N[top]
        top_BT[place] = self.score_N[order[top]]
        return top_BT

    def largest(self, count: int) -> Rows:
        """Rows of each query's `count` largest scores, ascending."""
        query_N = self.key_N // self.shape[1]
        return self.key_N[largest_of_each(query_N, self.score_N, count)]


class SparseRows:
    """A sparse matrix for weighted sums of a few of its rows. Thread-safe."""

    def __init__(self, matrix_FC: csr_matrix) -> None:
        self._matrix_FC = matrix_FC.astype(np.float32, copy=False)
        self.indptr = matrix_FC.indptr.astype(np.int64)
        self.column_N = self._matrix_FC.indices
        self.value_N = self._matrix_FC.data

    def entries(self, row_T: npt.NDArray) -> tuple[Rows, npt.NDArray, Floats]:
        """All entries of the rows `row_T`: position of the row in `row_T`, column and value, [E]
        each.
        """
        begin_T = self.indptr[row_T]
        count_T = self.indptr[row_T + 1] - begin_T
        place_E = np.repeat(np.arange(len(row_T)), count_T)
        shift_T = begin_T - np.cumsum(count_T) + count_T  # from a place in E to one in N
        at_E = np.arange(len(place_E)) + shift_T[place_E]
        return place_E, self.column_N[at_E], self.value_N[at_E]

    def sums(self, indptr: npt.NDArray, row_T: npt.NDArray, weight_T: Floats) -> PairScores:
        """Weighted sums of rows, as scores of (sum, column); sum b is over positions `indptr[b]` to
        `indptr[b + 1]`.
        """
        shape = len(indptr) - 1, self._matrix_FC.shape[1]
        first_T = np.repeat(first_keys(*shape), np.diff(indptr))
        place_E, column_E, value_E = self.entries(row_T)
        key_E = column_E + first_T[place_E]
        key_N, which_E = np.unique(key_E, return_inverse=True)
        weight_E = weight_T[place_E]
        sum_N = np.bincount(which_E, value_E * weight_E, minlength=len(key_N))
        return PairScores(key_N, sum_N.astype(np.float32), shape)


def _order_and_rank(row_N: npt.NDArray, value_N: npt.NDArray) -> tuple[npt.NDArray, npt.NDArray]:
    """Order of the entries by row, then by descending value (stable), and the rank of each sorted
    entry in its row.

    `row_N` must be ascending, so that the sorted entry n belongs to row `row_N[n]`.
    """
    first_N = np.searchsorted(row_N, row_N)
    return np.lexsort((-value_N, row_N)), np.arange(len(row_N)) - first_N


def largest_of_each(row_N: npt.NDArray, value_N: npt.NDArray, count: int) -> npt.NDArray[np.bool_]:
    """Mask of the `count` largest entries of each row, bool [N]; the first of equal values wins.
    Rows must ascend.
    """
    order, rank_N = _order_and_rank(row_N, value_N)
    mask_N = np.zeros(len(order), dtype=bool)
    mask_N[order[rank_N < count]] = True
    return mask_N


def keep_largest(matrix: csr_matrix, count: int) -> csr_matrix:
    """A copy with only the `count` largest entries of each row; the first of equal values wins."""
    num_entries = np.diff(matrix.indptr)
    row_N = np.repeat(np.arange(len(num_entries)), num_entries)
    mask_N = largest_of_each(row_N, matrix.data, count)
    kept = row_N[mask_N], matrix.indices[mask_N]
    return csr_matrix((matrix.data[mask_N], kept), shape=matrix.shape)
