"""Sizes of a data set, and synthetic texts of these sizes, for planning memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from unidec.config import Params
from unidec.data.chunks import offsets_of
from unidec.data.tokens import TokenCache, Tokens
from unidec.pipeline import paths

_TEXTS = 4093  # number of different texts; a prime, so that texts at regular intervals differ


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a data set.

    Attributes:
        num_queries: queries of all splits; num_train: training queries; num_labels: L.
        num_pairs: stored query-label pairs, plus entries of the label graph if training uses it.
        query_tokens, label_tokens: mean and maximum number of tokens of a text.
        vocab_size: size of the tokenizer's vocabulary.
    """

    num_queries: int
    num_train: int
    num_labels: int
    num_pairs: int
    query_tokens: tuple[float, int]
    label_tokens: tuple[float, int]
    vocab_size: int = 30522

    @classmethod
    def given(cls, labels: int, queries: int, tokens: int, pairs: int | None = None) -> Sizes:
        """Sizes from counts alone. `pairs` defaults to 5 labels per query (the papers' data sets
        have 2 to 22).
        """
        length = (float(tokens), tokens)
        return cls(
            num_queries=queries,
            num_train=queries,
            num_labels=labels,
            num_pairs=5 * queries if pairs is None else pairs,
            query_tokens=length,
            label_tokens=length,
        )

    @property
    def labels_a_query(self) -> int:
        """Mean number of labels per query, rounded up."""
        return min(math.ceil(self.num_pairs / self.num_queries), self.num_labels)


def stored_sizes(params: Params) -> Sizes:
    """Sizes of the ingested data set and its token caches."""
    dataset = paths.open_dataset()
    queries = paths.open_tokens("queries")
    labels = paths.open_tokens("labels")
    graph = paths.open_label_graph(params) if paths.LABEL_GRAPH.is_dir() else None
    num_pairs = dataset.relevance.nnz
    if graph is not None:
        num_pairs += graph.nnz
    return Sizes(
        num_queries=dataset.num_queries,
        num_train=len(dataset.rows("train")),
        num_labels=dataset.num_labels,
        num_pairs=int(num_pairs),
        query_tokens=_mean_and_most(queries.for_transformer),
        label_tokens=_mean_and_most(labels.for_transformer),
        vocab_size=queries.vocab_size,
    )


def _mean_and_most(tokens: Tokens) -> tuple[float, int]:
    """Mean and maximum number of tokens of a text."""
    lengths = tokens.lengths()
    return float(lengths.mean()), int(lengths.max())


class RepeatedTexts(TokenCache):
    """Any number of texts, by repeating `_TEXTS` different ones. Their lengths are the maximum or
    one token, in proportions that give the mean length.
    """

    def __init__(self, count: int, tokens: tuple[float, int], most: int, vocab_size: int) -> None:
        longest = min(tokens[1], most)
        share = (min(tokens[0], most) - 1) / max(longest - 1, 1)
        shuffled = np.random.default_rng(0).permutation(_TEXTS)
        lengths = np.where(shuffled < share * _TEXTS, longest, 1)
        offsets = offsets_of(lengths)
        ids = np.arange(offsets[-1]) % vocab_size
        super().__init__(ids, offsets, vocab_size, 0, longest)
        self.count = count

    def __len__(self) -> int:
        return self.count

    def lengths(self, rows: Any = None) -> Any:
        return super().lengths(rows % _TEXTS)

    def starts(self, rows_B: Any) -> Any:
        return super().starts(rows_B % _TEXTS)
