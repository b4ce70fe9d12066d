"""What a step trains on: a batch of queries, its pool drawn, their texts on the device.

Legend: B queries in a batch, S pool labels, N queries of the data set, n training queries, L labels.

With Gandalf (Gandalf, section 3) label texts are training queries too: label l is row N + l, and its relevance is row
l of the label graph, soft targets in (0, 1]. A label whose row is empty is no query.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from unidec.config import Params
from unidec.data.dataset import XMCDataset
from unidec.data.propensity import inverse_propensity, label_counts
from unidec.data.tokens import TokenCache
from unidec.errors import ConfigError, DataError
from unidec.model.encoder import EncoderInput, InputBuilder
from unidec.model.losses import PoolTargets
from unidec.training.distributed import ALONE, Ranks
from unidec.training.gradient_cache import ChunkBuilder, TextChunks, TextParts
from unidec.training.needs import encoded_labels, head_labels, weighs_by_propensity
from unidec.training.sampler import PoolBatch, PoolSampler


@dataclass(frozen=True)
class Prepared:
    """A batch on the device.

    Attributes:
        pool: all of the batch's queries and the dual encoder's labels, whatever part of them this rank encodes (a
            classifier alone: its pool).
        targets, clf_targets: pairs of those labels, and of what the classifier sees.
        clf_labels: int64 label ids that the classifier sees, those of this rank's rows; None: all of them.
        clf_sizes: how many of them are in each rank's rows.
        clf_places: int64, where they are among the encoded labels, for rows that hold their label's text; None: they
            are the encoded labels, or nobody asks.
        texts: what this rank encodes: its part of the queries, then its part of the labels; in chunks where
            gradients are cached.
        num_own_queries: how many of the texts are queries.
        num_texts, num_tokens: of all ranks' texts.
    """

    pool: PoolBatch
    targets: PoolTargets
    clf_targets: PoolTargets
    clf_labels: Tensor | None
    clf_sizes: list[int]
    clf_places: Tensor | None
    texts: EncoderInput | TextChunks
    num_own_queries: int
    num_texts: int
    num_tokens: int


class Batches:
    """Makes batches ready, from row numbers.

    Args:
        params: all parameters.
        dataset: queries, labels and relevance.
        tokens: token caches "queries" and "labels".
        build: puts texts on the device.
        device: of the targets.
        ranks: processes that share the batch's texts.
        label_graph: csr [L, L] of soft targets; needed, and only read, with `pool.gandalf`.

    Attributes:
        rows: int64 [n], training rows: the data set's, with Gandalf those of the labels behind them.
        inverse_L: float64 [L], inverse propensities by the training queries alone, where something is weighted by
            them, else None.
        sampler: draws pools.
        all_labels: the same where a head sees all labels, else None.
        rows_to_device: puts ids of table rows on the device, and may begin to fetch the rows.

    Raises:
        DataError: no training query has a positive.
        ConfigError: Gandalf without a label graph of this data set.
    """

    def __init__(
        self,
        params: Params,
        dataset: XMCDataset,
        tokens: Mapping[str, TokenCache],
        build: InputBuilder,
        device: torch.device,
        ranks: Ranks = ALONE,
        label_graph: sp.csr_matrix | None = None,
    ):
        self.params, self.tokens, self.build, self.device, self.ranks = params, tokens, build, device, ranks
        self.num_queries, self.soft = dataset.num_queries, params.pool.gandalf
        (self.de_labels, self.clf_labels), self.encoded = head_labels(params), encoded_labels(params)
        self.rows = dataset.rows("train")
        if not np.diff(dataset.relevance.indptr)[self.rows].any():
            raise DataError(
                "nothing to train on: no training query has a positive", where=str(dataset.path),
                got=f"{len(self.rows)} training queries", fix="look at the raw files' pairs and splits",
            )  # fmt: skip
        self.inverse_L = _inverse_propensities(params, dataset)
        relevance, filter_pairs = dataset.relevance, dataset.filter_pairs
        if params.pool.gandalf:
            relevance, filter_pairs, chosen = _with_labels(relevance, filter_pairs, label_graph)
            self.rows = np.concatenate([self.rows, self.num_queries + chosen])
        pool = params.pool
        draws: dict[str, Any] = {"beta": pool.beta, "seed": params.seed}
        if pool.positives == "tail":
            draws["weight_L"] = self.inverse_L
        self.sampler = PoolSampler(relevance, filter_pairs, eta=pool.eta, size=pool.size, **draws)
        self.rows_to_device: Callable[[np.ndarray], Tensor] = lambda ids: torch.from_numpy(ids).to(device)
        self._chunks: ChunkBuilder | None = None
        if params.optim.encode_chunk:
            kept = np.arange(relevance.shape[1]) if self.encoded == "all" else None
            self._chunks = ChunkBuilder(params.optim.encode_chunk, device, kept)
        self.all_labels: PoolSampler | None = None
        if "all" in (self.de_labels, self.clf_labels):
            sampler = self.sampler
            self.all_labels = PoolSampler(sampler.relevance, sampler.filter_pairs, eta=0, size=0, full=True, **draws)

    def parts(self, rows: np.ndarray) -> TextParts:
        """Texts of training rows; rows of labels follow those of queries."""
        of_query = rows[rows < self.num_queries]
        parts: TextParts = [("queries", self.tokens["queries"], of_query)]
        if len(of_query) < len(rows):
            parts.append(("labels", self.tokens["labels"], rows[len(of_query) :] - self.num_queries))
        return parts

    def prepare(self, rows_B: np.ndarray, epoch: int, step: int, negatives: np.ndarray | None) -> Prepared:
        """Draw the pool of some queries and put it, and the texts to encode, on the device.

        Args:
            rows_B: training rows.
            epoch: from 0; step: unique within it. Both name the batch's random numbers.
            negatives: int32 [rows, H] mined hard negatives by training row, or None.
        """
        if self.soft:  # queries first, then label texts, as `parts` has them
            rows_B = rows_B[np.argsort(rows_B >= self.num_queries, kind="stable")]
        drawn = full = None
        if self.de_labels != "all" or self.clf_labels == "pool":
            drawn = self._draw(self.sampler, rows_B, epoch, step, negatives)
        if self.all_labels is not None:
            full = self._draw(self.all_labels, rows_B, epoch, step, None)
        seen = full if self.de_labels == "all" else drawn
        assert seen is not None
        pool, targets = seen
        clf_pool, clf_targets = (full if self.clf_labels == "all" else drawn) or seen
        own_rows = pool.rows_B[slice(*self.ranks.part(len(pool.rows_B)))]
        encoded = self._encoded(pool, clf_pool)
        parts = self.parts(own_rows) + self._label_parts(encoded[slice(*self.ranks.part(len(encoded)))])
        everyones = parts if self.ranks.alone else [*self.parts(pool.rows_B), *self._label_parts(encoded)]
        return Prepared(
            pool, targets, clf_targets, *self._classified(clf_pool, encoded), self._texts(parts), len(own_rows),
            num_texts=sum(len(rows) for _, _, rows in everyones),
            num_tokens=sum(int(tokens.lengths(rows).sum()) for _, tokens, rows in everyones),
        )  # fmt: skip

    def _draw(
        self, sampler: PoolSampler, rows_B: np.ndarray, epoch: int, step: int, negatives: np.ndarray | None
    ) -> tuple[PoolBatch, PoolTargets]:
        pool = sampler.batch(rows_B, epoch=epoch, step=step, shortlist_NH=negatives)
        weighted = {"importance_L": self.inverse_L} if self.params.loss.weights == "propensity" else {}
        return pool, PoolTargets.from_batch(pool, self.device, soft=self.soft, **weighted)

    def _encoded(self, pool: PoolBatch, clf_pool: PoolBatch) -> np.ndarray:
        """Labels whose texts the step encodes, ascending."""
        if self.encoded == "none":
            return np.empty(0, dtype=np.int64)
        return clf_pool.pool_S if self.de_labels == "none" else pool.pool_S

    def _label_parts(self, labels: np.ndarray) -> TextParts:
        return [("labels", self.tokens["labels"], labels)] if len(labels) else []

    def _texts(self, parts: TextParts) -> EncoderInput | TextChunks:
        return self.build(parts) if self._chunks is None else self._chunks(parts, self.build)

    def _classified(self, clf_pool: PoolBatch, encoded: np.ndarray) -> tuple[Tensor | None, list[int], Tensor | None]:
        """Ids of this rank's rows among those that the classifier sees, each rank's number of them, and their places
        among the encoded labels."""
        num_labels = self.sampler.relevance.shape[1]
        if self.clf_labels != "pool":
            return None, self.ranks.sizes(num_labels), None
        sizes = self.ranks.sizes_among(clf_pool.pool_S, num_labels)
        first = sum(sizes[: self.ranks.rank])
        ids = self.rows_to_device(clf_pool.pool_S[first : first + sizes[self.ranks.rank]])
        places = None
        if self.params.model.clf_residual and len(encoded) > len(clf_pool.pool_S):
            places = torch.from_numpy(np.searchsorted(encoded, clf_pool.pool_S)).to(self.device)
        return ids, sizes, places

    def ahead(
        self, batches: list[np.ndarray], epoch: int, first: int, negatives: np.ndarray | None
    ) -> Iterator[Prepared]:
        """An epoch's batches from number `first` on; for a GPU the next is made while it works on this one."""
        numbers = range(first, len(batches))
        if self.device.type == "cpu":
            yield from (self.prepare(batches[number], epoch, number, negatives) for number in numbers)
            return
        with ThreadPoolExecutor(1) as thread:
            coming = thread.submit(self.prepare, batches[first], epoch, first, negatives) if numbers else None
            for number in numbers:
                assert coming is not None
                prepared = coming.result()
                if number + 1 < len(batches):
                    coming = thread.submit(self.prepare, batches[number + 1], epoch, number + 1, negatives)
                yield prepared


def _inverse_propensities(params: Params, dataset: XMCDataset) -> np.ndarray | None:
    """Of all labels, float64 [L], from the training queries as they are; None where nothing reads them."""
    if not weighs_by_propensity(params):
        return None
    rows = dataset.rows("train")
    counts_L = label_counts(dataset.relevance, rows)
    return inverse_propensity(counts_L, len(rows), params.data.propensity_a, params.data.propensity_b)


def _with_labels(
    relevance: sp.csr_matrix, filter_pairs: sp.csr_matrix, label_graph: sp.csr_matrix | None
) -> tuple[sp.csr_matrix, sp.csr_matrix, np.ndarray]:
    """Relevance and filter pairs of N + L rows, queries (every positive counts 1), then labels; and the labels that
    have targets, int64."""
    num_labels = relevance.shape[1]
    if label_graph is None or label_graph.shape != (num_labels, num_labels):
        raise ConfigError(
            "Gandalf needs the label graph of this data set", where="pool.gandalf",
            got="none" if label_graph is None else f"{label_graph.shape[0]} labels", expected=f"{num_labels} labels",
            fix="unidec data label-graph",
        )  # fmt: skip
    ones = sp.csr_matrix((np.ones(relevance.nnz, np.float32), relevance.indices, relevance.indptr), relevance.shape)
    nothing = sp.csr_matrix((num_labels, num_labels), dtype=filter_pairs.dtype)
    chosen = np.flatnonzero(np.diff(label_graph.indptr))
    return sp.vstack([ones, label_graph], format="csr"), sp.vstack([filter_pairs, nothing], format="csr"), chosen
