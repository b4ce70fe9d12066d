"""Sparse scores of pairs of a query and a label; candidates, and the k best of them.

Plain arrays: a query needs about a dozen sparse operations, and creating a scipy matrix for each
takes longer than the operation itself.

Legend: B queries, L labels, N pairs with a score, P pairs of a query and a candidate label, C
labels found for a query, K results; F rows and C columns of a matrix, T rows to sum, E entries of
those rows. A key is query * L + label.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix

from unidec.ranking.heads import Floats, Rows
from unidec.ranking.largest import largest_of_each


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
        begin_B = np.searchsorted(self.query_P, np.arange(self.num_queries + 1))
        place_BK = largest_of_each(begin_B, score_P, k)
        is_missing_BK = place_BK < 0

        def ranked(value_P: Rows | Floats, missing: float) -> npt.NDArray[Any]:
            if not len(value_P):
                return np.full(place_BK.shape, missing, dtype=value_P.dtype)
            value_BK = value_P[place_BK]
            value_BK[is_missing_BK] = missing
            return value_BK

        return Ranked(
            rows=ranked(self.label_P, -1),
            scores=ranked(score_P, -np.inf),
            knn_scores=ranked(self.votes_P, np.nan),
        )


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
