"""TF-IDF without training: votes of the nearest training queries, label match, and the mix of both.

Scores stay sparse and are computed for a block of queries at a time, so that memory depends on the block alone.

Shape legend: n queries that are ranked, M training queries, B queries of one block, L labels, F words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from unidec.errors import DataError
from unidec.progress import progress

METHODS = ("knn", "label-match", "mix")
NEIGHBOURS = 100  # training queries that vote
MATCH_WEIGHT = 0.5  # of label match in the mix
BLOCK = 512  # queries at most
BLOCK_SCORES = 2**24  # scores of one block at most: some 200 MB while a block is ranked


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


def rank(
    train_FM: csr_matrix, relevance_ML: csr_matrix, label_FL: csr_matrix, query_nF: csr_matrix,
    methods: Sequence[str], width: int, desc: str,
) -> dict[str, NDArray[np.int64]]:  # fmt: skip
    """The best labels of each query by each of some `METHODS`: {method: [n, width]}, as `top_rows` gives them.

    The nearest training queries vote for their labels with the square of their cosine; those that are exactly as near
    as the last of them vote too. The mix is votes + `MATCH_WEIGHT` x match, each scaled to a row maximum of 1.

    Args:
        train_FM, label_FL, query_nF: float32 CSR of unit vectors, which are columns of the first two.
        relevance_ML: float32 CSR of 0 and 1.
    """
    from sklearn.preprocessing import normalize

    block = max(1, min(BLOCK, BLOCK_SCORES // max(train_FM.shape[1], label_FL.shape[1], 1)))
    parts: dict[str, list[NDArray[np.int64]]] = {method: [] for method in methods}
    with progress(total=query_nF.shape[0], desc=desc, unit="query") as bar:
        for start in range(0, query_nF.shape[0], block):
            x_BF, scores = query_nF[start : start + block], {}
            if {"knn", "mix"} & set(methods):
                scores["knn"] = largest(csr_matrix(x_BF @ train_FM), NEIGHBOURS).power(2) @ relevance_ML
            if {"label-match", "mix"} & set(methods):
                scores["label-match"] = x_BF @ label_FL
            if "mix" in methods:
                votes, match = (normalize(scores[name], norm="max") for name in ("knn", "label-match"))
                scores["mix"] = votes + MATCH_WEIGHT * match
            for method in methods:
                parts[method].append(top_rows(largest(csr_matrix(scores[method]), width), width))
            bar.update(x_BF.shape[0])
    return {method: np.concatenate(own) for method, own in parts.items()}


def largest(score: csr_matrix, count: int) -> csr_matrix:
    """The `count` largest entries of each row, those equal to the last of them included; others are dropped."""
    keep = np.ones(score.nnz, dtype=bool)
    for start, end in zip(score.indptr[:-1], score.indptr[1:], strict=True):
        if end - start > count:
            row = score.data[start:end]
            keep[start:end] = row >= np.partition(row, end - start - count)[end - start - count]
    kept = np.concatenate([[0], np.cumsum(keep)])
    return csr_matrix((score.data[keep], score.indices[keep], kept[score.indptr]), shape=score.shape)


def top_rows(score: csr_matrix, width: int) -> NDArray[np.int64]:
    """Labels of sparse scores, CSR [n, L], as int64 [n, width], best first, padded with -1.

    Every stored entry is a prediction; among equal scores the lower label goes first.
    """
    score.sum_duplicates()
    length = np.diff(score.indptr)
    row = np.repeat(np.arange(len(length)), length)
    order = np.lexsort((score.indices, -score.data, row))
    place = np.arange(len(row)) - np.repeat(score.indptr[:-1], length)
    labels = np.full((len(length), width), -1, dtype=np.int64)
    keep = place < width
    labels[row[keep], place[keep]] = score.indices[order][keep]
    return labels
