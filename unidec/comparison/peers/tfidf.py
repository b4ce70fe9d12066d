"""TF-IDF without training: neighbours, label match, and their mix.

Shape legend: n queries that are predicted, M training queries, B queries of one block, L labels, F words, K predicted
labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from unidec.comparison.peers.task import PeerTask
from unidec.progress import progress

BLOCK = 512  # queries at most: a block holds a few dense [B, M] and [B, L] float32 matrices
BLOCK_SCORES = 2**26  # of one such matrix, at most

Scores = NDArray[np.float32]


def neighbour_votes(x_BF: Any, x_train_MF: Any, y_train_ML: Any, neighbours: int) -> Scores:
    """kNN: the nearest training queries vote for their labels with the square of their cosine; float32 [B, L]."""
    cosine_BM = (x_BF @ x_train_MF.T).toarray()
    nearest = min(neighbours, cosine_BM.shape[1])
    place = np.argpartition(-cosine_BM, nearest - 1, axis=1)[:, :nearest]
    vote = np.take_along_axis(cosine_BM, place, axis=1) ** 2
    indptr = np.arange(0, place.size + 1, nearest)
    votes_BM = csr_matrix((vote.ravel(), place.ravel(), indptr), shape=cosine_BM.shape)
    return (votes_BM @ y_train_ML).toarray()


def label_match(x_BF: Any, label_LF: Any) -> Scores:
    """Cosine of the query's and the label's text; float32 [B, L]."""
    return (x_BF @ label_LF.T).toarray()


def mix(votes_BL: Scores, match_BL: Scores, match_weight: float) -> Scores:
    """kNN votes + weight x label match, each scaled to a row maximum of 1; float32 [B, L], in place of the votes."""
    for score_BL in (votes_BL, match_BL):
        score_BL /= np.maximum(score_BL.max(axis=1, keepdims=True, initial=0.0), 1e-12)
    votes_BL += match_weight * match_BL
    return votes_BL


def top_labels(score_BL: Scores, width: int) -> tuple[NDArray[np.int64], Scores]:
    """The best labels with a score above 0, best first, padded with -1 and -inf: int64 and float32 [B, width].

    Among equal scores the lower label goes first.
    """
    place = np.argpartition(-score_BL, width - 1, axis=1)[:, :width]
    place = np.sort(place, axis=1)
    score = np.take_along_axis(score_BL, place, axis=1)
    order = np.argsort(-score, axis=1, kind="stable")
    place, score = np.take_along_axis(place, order, axis=1), np.take_along_axis(score, order, axis=1)
    return np.where(score > 0, place, -1).astype(np.int64), np.where(score > 0, score, -np.inf).astype(np.float32)


def scorer(name: str, task: PeerTask, options: Mapping[str, Any]) -> tuple[Callable[[Any], Scores], int]:
    """The function [B, F] -> [B, L] of a peer, and the numbers that it stores."""
    x_train_MF, y_train_ML, label_LF = (task.matrix(part) for part in ("X.train", "Y.train", "labels"))
    neighbours = options.get("neighbours", 0)
    stored = {"knn": x_train_MF.nnz + y_train_ML.nnz, "label-match": label_LF.nnz}
    stored["mix"] = sum(stored.values())

    def votes(x_BF: Any) -> Scores:
        return neighbour_votes(x_BF, x_train_MF, y_train_ML, neighbours)

    def match(x_BF: Any) -> Scores:
        return label_match(x_BF, label_LF)

    def both(x_BF: Any) -> Scores:
        return mix(votes(x_BF), match(x_BF), options["match_weight"])

    return {"knn": votes, "label-match": match, "mix": both}[name], stored[name]


def predict(
    score: Callable[[Any], Scores], x_NF: csr_matrix, width: int, most_columns: int, desc: str
) -> tuple[NDArray[np.int64], Scores]:
    """Predictions for all queries, [n, width], block by block; `most_columns`: of a dense row."""
    block = max(1, min(BLOCK, BLOCK_SCORES // max(most_columns, 1)))
    num_queries = x_NF.shape[0]
    parts = []
    with progress(total=num_queries, desc=desc, unit="query") as bar:
        for start in range(0, num_queries, block):
            x_BF = x_NF[start : start + block]
            parts.append(top_labels(score(x_BF), width))
            bar.update(x_BF.shape[0])
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
