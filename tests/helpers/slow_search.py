"""Exact search by all products, and searches by several threads at once."""

from __future__ import annotations

import threading

import numpy as np

from unidec.ranking.index import LabelIndex


def slow_search(queries: np.ndarray, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """All products in float64, a full stable sort: equal scores by label number."""
    scores = queries.astype(np.float64) @ vectors.astype(np.float64).T
    labels = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, labels, axis=1), labels


def wrong_in_threads(index: LabelIndex, queries: np.ndarray) -> list[int]:
    """Four threads search ten times each; k of each answer that is not the one of a single
    thread.
    """
    wanted = {k: index.search(queries, k)[1] for k in (3, 20)}
    wrong: list[int] = []

    def work(k: int) -> None:
        wrong.extend(
            k for _ in range(10) if not np.array_equal(index.search(queries, k)[1], wanted[k])
        )

    threads = [threading.Thread(target=work, args=(k,)) for k in (3, 20, 3, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong
