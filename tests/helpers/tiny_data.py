"""A small synthetic data set, and transformers that know its words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from helpers.tiny_transformer import write_transformer
from scipy.sparse import csr_matrix

from unidec.data.raw import RawData, text_table

TOPICS = ("river", "music", "engine", "garden", "letter", "planet", "bread", "window")


def make_raw(
    num_train: int = 48,
    num_test: int = 12,
    num_labels: int = 40,
    *,
    filters: bool = True,
    seed: int = 0,
) -> RawData:
    """A synthetic data set with structure: queries and labels speak of topics, and share a topic
    with their positives.

    Query 0 of the test split has no positives; the last label has no training point (both legal).
    """
    rng = np.random.default_rng(seed)
    topic_L = rng.integers(0, len(TOPICS), num_labels)

    def texts(topics: np.ndarray, what: str) -> list[str]:
        words = rng.integers(0, 50, (len(topics), 2))
        return [f"{TOPICS[t]} {what} w{a} w{b}" for t, (a, b) in zip(topics, words, strict=True)]

    def split(name: str, num_queries: int) -> tuple:
        topic_N = rng.integers(0, len(TOPICS), num_queries)
        likely = (topic_N[:, None] == topic_L[None, :]) * 0.6 + 0.02
        chosen = rng.random((num_queries, num_labels)) < likely
        chosen[:, -1] &= name == "test" or num_labels == 1
        chosen[np.arange(num_queries), rng.integers(0, max(num_labels - 1, 1), num_queries)] = True
        if name == "test" and num_queries:
            chosen[0] = False
        # about every fourth query is linked to its neighbour by a filtered label
        filtered = np.zeros_like(chosen)
        if filters:
            linked = np.flatnonzero(rng.random(num_queries) < 0.25)
            filtered[linked, rng.integers(0, num_labels, linked.size)] = True
            filtered &= ~chosen
        uids = [f"{name}-{row}" for row in range(num_queries)]
        table = text_table(uids, texts(topic_N, "query"), texts(topic_N, "long text"))
        return table, csr_matrix(chosen.astype(np.float32)), csr_matrix(filtered)

    parts = {"train": split("train", num_train), "test": split("test", num_test)}
    return RawData(
        "tiny",
        {name: part[0] for name, part in parts.items()},
        text_table(
            [f"label-{row}" for row in range(num_labels)],
            texts(topic_L, "label"),
            texts(topic_L, "about"),
        ),
        {name: part[1] for name, part in parts.items()},
        {name: part[2] for name, part in parts.items()},
    )


def tiny_transformer(kind: str, raw: RawData, folder: Path) -> Path:
    """A tiny transformer that knows the words of a data set's titles."""
    texts = [
        text for table in (*raw.queries.values(), raw.labels) for text in table["title"].to_pylist()
    ]
    return write_transformer(folder, texts, kind)
