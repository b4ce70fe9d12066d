"""TF-IDF without training: votes of the nearest training queries, label match, and the mix of both.

Scores stay sparse and are computed for a block of queries at a time, so that memory depends on the block alone.

Shape legend: n queries that are ranked, M training queries, B queries of one block, L labels, F words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from unidec.errors import DataError
from unidec.progress import progress

METHODS = ("knn", "label-match", "mix")
BLOCK = 512  # queries at most
BLOCK_SCORES = 2**24  # scores of one block at most: some 200 MB while a block is ranked

Ranked = tuple[NDArray[np.int64], NDArray[np.float32]]


def fit_words(texts: Iterable[str], where: str) -> tuple[Any, csr_matrix]:
    """scikit-learn's `TfidfVectorizer` of these texts (sublinear, without English stop words), and their unit vectors.

    Raises:
        DataError: no text has a word.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(sublinear_tf=True, stop_words="english", dtype=np.float32)
    try:
        return vectorizer, vectorizer.fit_transform(texts)
    except ValueError as error:  # scikit-learn's "empty vocabulary"
        raise DataError("texts without a word to count", where=where, got=str(error)[:200]) from error


@dataclass(frozen=True)
class TfidfRanker:
    """Ranks labels for queries given as TF-IDF vectors.

    Attributes:
        train_FM, label_FL: float32 CSR, texts as columns. relevance_ML: float32 CSR of 0 and 1.
        neighbours: training queries that vote. match_weight: of label match in the mix.
    """

    train_FM: csr_matrix
    relevance_ML: csr_matrix
    label_FL: csr_matrix
    neighbours: int = 100
    match_weight: float = 0.5

    def votes(self, x_BF: csr_matrix) -> csr_matrix:
        """The nearest training queries vote for their labels with the square of their cosine: CSR [B, L].

        Training queries that are exactly as near as the last of them vote too.
        """
        near_BM = largest(csr_matrix(x_BF @ self.train_FM), self.neighbours)
        return csr_matrix(near_BM.power(2) @ self.relevance_ML)

    def rank(self, x_nF: csr_matrix, methods: Sequence[str], width: int, desc: str) -> dict[str, Ranked]:
        """The best labels of each query by each of some `METHODS`: {method: (labels, scores)} as `top_rows` gives."""
        block = max(1, min(BLOCK, BLOCK_SCORES // max(self.train_FM.shape[1], self.label_FL.shape[1], 1)))
        parts: dict[str, list[Ranked]] = {method: [] for method in methods}
        with progress(total=x_nF.shape[0], desc=desc, unit="query") as bar:
            for start in range(0, x_nF.shape[0], block):
                x_BF = x_nF[start : start + block]
                scores = {}
                if {"knn", "mix"} & set(methods):
                    scores["knn"] = self.votes(x_BF)
                if {"label-match", "mix"} & set(methods):
                    scores["label-match"] = csr_matrix(x_BF @ self.label_FL)
                if "mix" in methods:
                    scores["mix"] = mixed(scores["knn"], scores["label-match"], self.match_weight)
                for method in methods:
                    parts[method].append(top_rows(largest(scores[method], width), width))
                bar.update(x_BF.shape[0])
        return {
            method: (np.concatenate([one[0] for one in own]), np.concatenate([one[1] for one in own]))
            for method, own in parts.items()
        }


def largest(score: csr_matrix, count: int) -> csr_matrix:
    """The `count` largest entries of each row, those equal to the last of them included; others are dropped."""
    keep = np.ones(score.nnz, dtype=bool)
    for start, end in zip(score.indptr[:-1], score.indptr[1:], strict=True):
        if end - start > count:
            row = score.data[start:end]
            keep[start:end] = row >= np.partition(row, end - start - count)[end - start - count]
    kept = np.concatenate([[0], np.cumsum(keep)])
    return csr_matrix((score.data[keep], score.indices[keep], kept[score.indptr]), shape=score.shape)


def mixed(votes_BL: csr_matrix, match_BL: csr_matrix, match_weight: float) -> csr_matrix:
    """votes + weight x match, each scaled to a row maximum of 1: CSR [B, L]."""
    scaled = []
    for score_BL in (votes_BL, match_BL):
        highest_B = np.maximum(score_BL.max(axis=1).toarray().ravel(), 1e-12)
        scale_P = np.repeat(highest_B, np.diff(score_BL.indptr))
        scaled.append(csr_matrix((score_BL.data / scale_P, score_BL.indices, score_BL.indptr), shape=score_BL.shape))
    return csr_matrix(scaled[0] + match_weight * scaled[1])


def top_rows(predicted: csr_matrix, width: int) -> Ranked:
    """Sparse scores, CSR [n, L], as labels int64 [n, width] and scores float32, best first, padded with -1 and -inf.

    Every stored entry is a prediction; among equal scores the lower label goes first.
    """
    predicted.sum_duplicates()
    length = np.diff(predicted.indptr)
    row = np.repeat(np.arange(len(length)), length)
    order = np.lexsort((predicted.indices, -predicted.data, row))
    column = np.arange(len(row)) - np.repeat(predicted.indptr[:-1], length)
    labels = np.full((len(length), width), -1, dtype=np.int64)
    scores = np.full(labels.shape, -np.inf, dtype=np.float32)
    keep = column < width
    labels[row[keep], column[keep]] = predicted.indices[order][keep]
    scores[row[keep], column[keep]] = predicted.data[order][keep]
    return labels, scores
