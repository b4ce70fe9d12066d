"""The largest of some scores, by a heap whose root is the smallest of those that are kept.

Legend: B queries or rows of a matrix, N scores, K largest of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from unidec.ranking.compiled import Array, Csr, compiled


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
        num_kept = np.int64(0)
        for place in range(begin_B[query], begin_B[query + 1]):
            num_kept = keep(score_N[place], place, score_K, place_K, num_kept)
        sort_kept(score_K, place_K, num_kept)


@compiled
def _mark_largest(matrix: Csr, num: int, is_kept_N: Array) -> None:
    value_K = np.empty(num, dtype=np.float32)
    place_K = np.empty(num, dtype=np.int64)
    for row in range(len(matrix.begin) - 1):
        num_kept = np.int64(0)
        for place in range(matrix.begin[row], matrix.begin[row + 1]):
            num_kept = keep(matrix.value[place], place, value_K, place_K, num_kept)
        for n in range(num_kept):
            is_kept_N[place_K[n]] = True


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
