"""Sizes of a data set, and of the largest step of a training on it.

Legend: N queries of all splits, L labels, B queries in a batch, S labels in its pool, H mined negatives a query.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from unidec.config import Params
from unidec.data.dataset import XMCDataset
from unidec.data.tokens import CHUNK_TEXTS, Tokens
from unidec.errors import ConfigError
from unidec.training.needs import draws_pools, encoded_labels, head_labels


@dataclass(frozen=True)
class Sizes:
    """Sizes of a data set.

    Attributes:
        num_queries: N of all splits; num_train: of that split; num_labels: L.
        num_pairs: stored query-label pairs.
        query_lengths, label_lengths: number of texts with 0, 1, 2, ... tokens.
        vocab_size: of the tokenizer.
        text_bytes: of the stored label texts; 0: unknown.
        num_graph_pairs: entries of the label graph (Gandalf's soft targets); 0: unknown.
    """

    num_queries: int
    num_train: int
    num_labels: int
    num_pairs: int
    query_lengths: tuple[int, ...]
    label_lengths: tuple[int, ...]
    vocab_size: int
    text_bytes: int = 0
    num_graph_pairs: int = 0

    @classmethod
    def of(cls, dataset: XMCDataset, query_tokens: Tokens, label_tokens: Tokens, num_graph_pairs: int = 0) -> Sizes:
        """Of a data set, its token caches and, for Gandalf, the entries of its label graph."""
        queries, labels = (tuple(np.bincount(of.lengths()).tolist()) for of in (query_tokens, label_tokens))
        return cls(
            dataset.num_queries, len(dataset.rows("train")), dataset.num_labels, int(dataset.relevance.nnz), queries,
            labels, query_tokens.vocab_size, int(dataset.labels.nbytes), num_graph_pairs,
        )  # fmt: skip

    @classmethod
    def given(cls, labels: int, queries: int, tokens: int, pairs: int | None = None, vocab_size: int = 30522) -> Sizes:
        """From counts alone: every text has `tokens` tokens; without `pairs` each query has 5 labels (the sets of the
        papers have 2 to 22)."""
        if min(labels, queries, tokens) < 1:
            raise ConfigError("sizes must be at least 1", where="--labels, --queries, --tokens",
                              got=f"{labels}, {queries}, {tokens}")  # fmt: skip
        all_equal, pairs = (0,) * tokens, 5 * queries if pairs is None else pairs
        return cls(queries, queries, labels, pairs, (*all_equal, queries), (*all_equal, labels), vocab_size)

    @property
    def num_tokens(self) -> int:
        """Of all texts."""
        return sum(length * n for of in (self.query_lengths, self.label_lengths) for length, n in enumerate(of))


def typical_lengths(histogram: tuple[int, ...], num_texts: int, max_length: int) -> np.ndarray:
    """Lengths of a typical batch of texts, ascending: evenly spaced quantiles, the longest text among them.

    Returns:
        int64 [num_texts], cut to `max_length`.
    """
    cumulative = np.cumsum(histogram)
    if not num_texts or not cumulative[-1]:
        return np.zeros(num_texts, dtype=np.int64)
    rank = np.ceil(np.arange(1, num_texts + 1) * (cumulative[-1] / num_texts))
    return np.minimum(np.searchsorted(cumulative, rank), max_length).astype(np.int64)


@dataclass(frozen=True)
class Texts:
    """Texts that are encoded together, in chunks of similar length as the encoder pads them.

    Attributes:
        count: texts. tokens: without padding. padded: with padding. squares: token pairs within texts, with padding.
    """

    count: int
    tokens: int
    padded: int
    squares: int

    @classmethod
    def of(cls, parts: list[np.ndarray]) -> Texts:
        """What `InputBuilder` makes of parts (queries, labels) with these ascending lengths."""
        chunks = [part[start : start + CHUNK_TEXTS] for part in parts for start in range(0, len(part), CHUNK_TEXTS)]
        sizes = [(len(chunk), int(chunk[-1])) for chunk in chunks]
        padded, squares = (sum(count * longest**power for count, longest in sizes) for power in (1, 2))
        return cls(sum(map(len, parts)), sum(int(part.sum()) for part in parts), padded, squares)


@dataclass(frozen=True)
class Batch:
    """Sizes of the largest training step.

    Attributes:
        queries: B. labels: in the dual encoder's logits (S or L; without a dual encoder: S). classifier_labels: in
            the classifier's (S or L; 0: no classifier).
        steps: steps an epoch. negatives: H, columns of the mined shortlist (0: nothing is mined).
        texts: queries and labels that one rank encodes.
        held: those of them whose activations are in memory at once; fewer with `run.recompute` and
            `optim.encode_chunk`.
    """

    queries: int
    labels: int
    classifier_labels: int
    steps: int
    negatives: int
    texts: Texts
    held: Texts


def batch_sizes(params: Params, sizes: Sizes) -> Batch:
    """The largest step that these parameters make on this data (`Trainer`, `PoolSampler`)."""
    pool, ranks, longest = params.pool, params.run.devices, params.tokens.max_length
    num_train = training_rows(params, sizes)
    batches = math.ceil(num_train / pool.batch_size)
    if pool.batches == "clustered":
        batches = 2 ** math.ceil(math.log2(batches))
    num_queries = math.ceil(num_train / batches)
    # mean of min(count, beta) <= min(mean count, beta): a batch's queries sample no more positives than this
    positives = min(pool.beta, sizes.num_pairs / sizes.num_queries)
    mines = pool.eta > 0 and draws_pools(params.model, params.pool)
    sampled = math.ceil(num_queries * (positives + (pool.eta if mines else 0)))
    drawn = max(1, min(sampled, sizes.num_labels, pool.size or sampled))
    count = {"none": 0, "pool": drawn, "all": sizes.num_labels}
    de_labels, clf_labels = (count[labels] for labels in head_labels(params.model, params.pool))
    num_encoded = count[encoded_labels(params.model, params.pool)]
    counts = ((sizes.query_lengths, num_queries), (sizes.label_lengths, num_encoded))
    parts = [typical_lengths(histogram, -(-number // ranks), longest) for histogram, number in counts if number]
    texts = held = Texts.of(parts)
    at_once = min(params.optim.encode_chunk or texts.count, CHUNK_TEXTS if params.run.recompute else texts.count)
    if at_once < texts.count:
        held = Texts.of([np.full(at_once, max(int(part[-1]) for part in parts))])
    negatives = pool.eta * pool.refresh if mines else 0
    return Batch(num_queries, de_labels or drawn, clf_labels, batches, negatives, texts, held)


def training_rows(params: Params, sizes: Sizes) -> int:
    """Training queries; with Gandalf a share of the label texts too."""
    labels = math.ceil(params.label_graph.share * sizes.num_labels) if params.pool.gandalf else 0
    return sizes.num_train + labels
