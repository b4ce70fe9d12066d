"""Scores of pairs of a query and a label, sparse; candidates, and the k best of them.

Plain arrays: a single query needs about a dozen sparse operations, and creating a scipy matrix for
each takes longer
than the operation itself.

Legend: B queries, L labels, N pairs with a score, P pairs of a query and a candidate label, C
labels found for a query,
K results; F rows and C columns of a matrix, T rows to sum, E entries of those rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix

Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]


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

    rows: Labels
    scores: Floats
    knn_scores: Floats | None = None
    de_scores: Floats | None = None
    clf_scores: Floats | None = None


@dataclass(frozen=True)
class Candidates:
    """Candidate pairs of a query and a label, unique, sorted by query and label; no other pair can
    be among the best.

    Attributes:
        query_P, label_P: int64 [P]. heads_P, votes_P: float32 [P], score of the heads and votes of
        each pair.
        num_queries: B.
    """

    query_P: Labels
    label_P: Labels
    heads_P: Floats
    votes_P: Floats
    num_queries: int

    @classmethod
    def of(cls, key_P: Labels, heads_P: Floats, votes: PairScores) -> Candidates:
        """Candidates by their keys query * L + label, ascending and unique (`candidate_keys`,
        `allowed_keys`).
        """
        query_P, label_P = np.divmod(key_P, votes.shape[1])
        return cls(query_P, label_P, heads_P, votes.at(key_P), votes.shape[0])

    def top(self, weight: float, k: int) -> Ranked:
        """The k best labels by heads + weight * votes; ties are ordered by label row."""
        total_P = self.heads_P + np.float32(weight) * self.votes_P
        return best_of(self.query_P, self.label_P, total_P, self.votes_P, self.num_queries, k)


def candidate_keys(
    found_BC: Labels, voted: Labels, num_labels: int, excluded: Labels | None = None
) -> Labels:
    """Keys query * L + label of the retrieved labels and of those with votes, ascending, without
    excluded pairs.

    If `found_BC` holds the heads' k best labels without excluded ones and `voted` every label with
    a vote, the k best labels by heads + weight * votes are among them, for any weight >= 0.

    Args:
        found_BC: label rows, -1 for no result. voted, excluded: int64 keys.
    """
    place_BC = np.arange(len(found_BC), dtype=np.int64)[:, None] * num_labels + found_BC
    return without(np.union1d(place_BC[found_BC >= 0], voted), excluded)


def allowed_keys(
    allowed: Labels, num_queries: int, num_labels: int, excluded: Labels | None = None
) -> Labels:
    """Keys of the allowed labels (ascending rows) for each query, ascending, without excluded
    pairs.
    """
    return without(
        (np.arange(num_queries, dtype=np.int64)[:, None] * num_labels + allowed).ravel(), excluded
    )


def without(key_P: Labels, excluded: Labels | None) -> Labels:
    """`key_P` without the excluded keys."""
    return key_P if excluded is None or not excluded.size else key_P[~np.isin(key_P, excluded)]


def best_of(
    query_P: Labels, label_P: Labels, score_P: Floats, votes_P: Floats, num_queries: int, k: int
) -> Ranked:
    """The k pairs of each query with the largest scores; ties are ordered by label row.

    Args:
        query_P, label_P: int64 [P], unique pairs, ascending by query and label. score_P, votes_P:
        float32 [P].
    """
    count_B = np.bincount(query_P, minlength=num_queries)
    begin_B = np.cumsum(count_B) - count_B
    score_BC = np.full((num_queries, count_B.max(initial=0)), -np.inf, dtype=np.float32)
    score_BC[query_P, np.arange(len(query_P)) - begin_B[query_P]] = score_P
    # three times as fast as one lexsort of all pairs
    order = np.argsort(-score_BC, axis=1, kind="stable")[:, :k]
    query, rank = np.nonzero(np.arange(order.shape[1]) < count_B[:, None])
    best = begin_B[query] + order[query, rank]
    rows = np.full((num_queries, k), -1, dtype=np.int64)
    scores = np.full((num_queries, k), -np.inf, dtype=np.float32)
    votes = np.full((num_queries, k), np.nan, dtype=np.float32)
    rows[query, rank], scores[query, rank], votes[query, rank] = (
        label_P[best],
        score_P[best],
        votes_P[best],
    )
    return Ranked(rows, scores, votes)


def votes_alone(votes: PairScores, k: int, excluded: Labels | None = None) -> Ranked:
    """The k labels with the most votes; labels without votes are not returned."""
    key_P = without(votes.key_N, excluded)
    return Candidates.of(key_P, np.zeros(len(key_P), dtype=np.float32), votes).top(1.0, k)


@dataclass(frozen=True)
class PairScores:
    """Scores of pairs of a query and a label; a pair that is not stored has the score 0.

    Attributes:
        key_N: int64 [N], query * L + label, ascending and unique. score_N: float32 [N].
        shape: (B, L).
    """

    key_N: Labels
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

    def at(self, key_P: Labels) -> Floats:
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

    def largest(self, count: int) -> Labels:
        """Labels of each query's `count` largest scores, ascending."""
        return self.key_N[largest_of_each(self.key_N // self.shape[1], self.score_N, count)]


class DenseScores:
    """The scores of all pairs, read as `PairScores` are: at some pairs, or the largest of each
    query.

    Args:
        score_BL: float32 [B, L]; it is not handed out again, so that a sparse computation can take
        its place.
    """

    def __init__(self, score_BL: Floats) -> None:
        self._score_BL = score_BL
        self.shape = score_BL.shape

    def at(self, key_P: Labels) -> Floats:
        """Scores of the given pairs, float32 [P]."""
        return self._score_BL[np.divmod(key_P, self.shape[1])]

    def put(self, key_P: Labels, score_P: Floats) -> None:
        """Replace the scores of some pairs."""
        self._score_BL[np.divmod(key_P, self.shape[1])] = score_P

    def columns(self, begin: int, end: int) -> DenseScores:
        """The scores of some columns."""
        return DenseScores(self._score_BL[:, begin:end])

    def top(self, count: int) -> Floats:
        """Each query's `count` largest scores (or all), in any order: float32 [B, count]."""
        last = min(count, self.shape[1]) - 1
        # with many equal values (zeros), numpy partitions ten times as fast for the smallest as for
        # the largest
        return -np.partition(-self._score_BL, last, axis=1)[:, :count]

    def largest(self, count: int) -> Labels:
        """Keys of each query's `count` largest positive scores."""
        last = min(count, self.shape[1]) - 1
        best_BT = np.argpartition(-self._score_BL, last, axis=1)[:, :count]
        key_BT = best_BT + np.arange(len(best_BT))[:, None] * self.shape[1]
        return key_BT[np.take_along_axis(self._score_BL, best_BT, axis=1) > 0]

    def best(self, num: int) -> tuple[Floats, Labels]:
        """The `num` largest positive scores of each query, best first, ties by column: float32
        scores and int64 columns [B, num], padded with 0 and -1.
        """
        score_BN = np.zeros((self.shape[0], num), dtype=np.float32)
        column_BN = np.full(score_BN.shape, -1, dtype=np.int64)
        # most are 0: one query at a time is faster than all at once
        for query, score_L in enumerate(self._score_BL):
            column_C = np.flatnonzero(score_L > 0)
            score_C = score_L[column_C]
            if len(column_C) > num:
                column_C = column_C[score_C >= -np.partition(-score_C, num - 1)[num - 1]]
            best = column_C[np.argsort(-score_L[column_C], kind="stable")][:num]
            score_BN[query, : len(best)] = score_L[best]
            column_BN[query, : len(best)] = best
        return score_BN, column_BN


# from this number of queries on, scipy's product is faster, including the creation of matrices
_SCIPY_QUERIES = 16


class SparseRows:
    """A sparse matrix for weighted sums of a few of its rows. Thread-safe."""

    def __init__(self, matrix_FC: csr_matrix) -> None:
        self.indptr = matrix_FC.indptr.astype(np.int64)
        self.column_N = matrix_FC.indices
        self.value_N = matrix_FC.data.astype(np.float32, copy=False)
        self.num_columns = int(matrix_FC.shape[1])
        self._matrix_FC = csr_matrix(
            (self.value_N, self.column_N, matrix_FC.indptr), matrix_FC.shape
        )

    def entries(self, row_T: npt.NDArray) -> tuple[Labels, npt.NDArray, Floats]:
        """All entries of the rows `row_T`: position of the row in `row_T`, column and value, [E]
        each.
        """
        begin_T = self.indptr[row_T]
        count_T = self.indptr[row_T + 1] - begin_T
        place_E = np.repeat(np.arange(len(row_T)), count_T)
        at_E = np.arange(len(place_E)) + (begin_T - np.cumsum(count_T) + count_T)[place_E]
        return place_E, self.column_N[at_E], self.value_N[at_E]

    def product(self, matrix_BF: csr_matrix) -> DenseScores:
        """The product `matrix_BF` @ this matrix, [B, C]."""
        if matrix_BF.shape[0] >= _SCIPY_QUERIES:
            return DenseScores(
                (matrix_BF.astype(np.float32, copy=False) @ self._matrix_FC).toarray()
            )
        return self.sums(matrix_BF.indptr, matrix_BF.indices, matrix_BF.data)

    def sums(self, indptr: npt.NDArray, row_T: npt.NDArray, weight_T: Floats) -> DenseScores:
        """Weighted sums of rows, [B, C]; sum b is over positions `indptr[b]` to `indptr[b + 1]`."""
        num_queries = len(indptr) - 1
        query_T = np.repeat(np.arange(num_queries), np.diff(indptr))
        place_E, column_E, value_E = self.entries(row_T)
        key_E = column_E + (query_T * self.num_columns)[place_E]
        sums = np.bincount(
            key_E, value_E * weight_T[place_E], minlength=num_queries * self.num_columns
        )
        return DenseScores(sums.astype(np.float32).reshape(num_queries, self.num_columns))


def _order_and_rank(row_N: npt.NDArray, value_N: npt.NDArray) -> tuple[npt.NDArray, npt.NDArray]:
    """Order of the entries by row, then by descending value (stable), and the rank of each sorted
    entry in its row.

    `row_N` must be ascending, so that the sorted entry n belongs to row `row_N[n]`.
    """
    return np.lexsort((-value_N, row_N)), np.arange(len(row_N)) - np.searchsorted(row_N, row_N)


def largest_of_each(row_N: npt.NDArray, value_N: npt.NDArray, count: int) -> npt.NDArray[np.bool_]:
    """Mask of the `count` largest entries of each row, bool [N]; the first of equal values wins.
    Rows must ascend.
    """
    order, rank_N = _order_and_rank(row_N, value_N)
    mask_N = np.empty(len(order), dtype=bool)
    mask_N[order] = rank_N < count
    return mask_N


def keep_largest(matrix: csr_matrix, count: int) -> csr_matrix:
    """A copy with only the `count` largest entries of each row; the first of equal values wins."""
    row_N = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    mask_N = largest_of_each(row_N, matrix.data, count)
    return csr_matrix(
        (matrix.data[mask_N], (row_N[mask_N], matrix.indices[mask_N])), shape=matrix.shape
    )
