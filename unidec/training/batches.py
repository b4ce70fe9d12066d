"""What a step trains on: a batch of queries, its pool drawn, their texts on the device.

Legend: B queries in a batch, S pool labels, N queries of the data set, n training queries, L labels.

With Gandalf (Gandalf, section 3) label texts are training queries too: label l is row N + l, and its relevance is row
l of the label graph, soft targets in (0, 1].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from unidec.config import Params
from unidec.data.dataset import XMCDataset
from unidec.data.tokens import TokenCache, Tokens
from unidec.errors import ConfigError, DataError
from unidec.model.encoder import EncoderInput, InputBuilder
from unidec.model.losses import PoolTargets
from unidec.training.distributed import ALONE, Ranks
from unidec.training.sampler import PoolBatch, PoolSampler

TextParts = list[tuple[str, Tokens, np.ndarray]]


@dataclass(frozen=True)
class Prepared:
    """A batch on the device.

    Attributes:
        pool: all of the batch's queries and pool labels, whatever part of them this rank encodes.
        targets, clf_targets: pairs of the pool, and of what the classifier sees.
        clf_labels: int64 label ids that the classifier sees, those of this rank's rows; None: all of them.
        clf_sizes: how many of them are in each rank's rows.
        texts: what this rank encodes: its part of the queries, then its part of the pool.
        num_own_queries: how many of the texts are queries.
        num_texts, num_tokens: of all ranks' texts.
    """

    pool: PoolBatch
    targets: PoolTargets
    clf_targets: PoolTargets
    clf_labels: Tensor | None
    clf_sizes: list[int]
    texts: EncoderInput
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
        sampler: draws pools.
        all_labels: the same where the classifier sees all labels, else None.
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
        self.heads, self.tokens, self.build, self.device, self.ranks = params.model.heads, tokens, build, device, ranks
        self.num_queries, self.soft = dataset.num_queries, params.pool.gandalf
        self.rows = dataset.rows("train")
        if not np.diff(dataset.relevance.indptr)[self.rows].any():
            raise DataError(
                "nothing to train on: no training query has a positive", where=str(dataset.path),
                got=f"{len(self.rows)} training queries", fix="look at the raw files' pairs and splits",
            )  # fmt: skip
        relevance, filter_pairs = dataset.relevance, dataset.filter_pairs
        if params.pool.gandalf:
            relevance, filter_pairs = _with_labels(relevance, filter_pairs, label_graph)
            self.rows = np.concatenate([self.rows, np.arange(self.num_queries, relevance.shape[0])])
        pool = params.pool
        self.sampler = PoolSampler(
            relevance, filter_pairs, beta=pool.beta, eta=pool.eta, size=pool.size, seed=params.seed
        )
        self.rows_to_device: Callable[[np.ndarray], Tensor] = lambda ids: torch.from_numpy(ids).to(device)
        self.all_labels: PoolSampler | None = None
        if pool.clf_labels == "all" and self.heads != "de":
            self.all_labels = PoolSampler(
                self.sampler.relevance, self.sampler.filter_pairs, beta=pool.beta, eta=0, size=0, seed=params.seed,
                full=True,
            )  # fmt: skip

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
        pool = self.sampler.batch(rows_B, epoch=epoch, step=step, shortlist_NH=negatives)
        targets = clf_targets = PoolTargets.from_batch(pool, self.device, soft=self.soft)
        clf_labels, num_labels = None, self.sampler.relevance.shape[1]
        clf_sizes = self.ranks.sizes(num_labels)
        if self.all_labels is not None:
            full = self.all_labels.batch(rows_B, epoch=epoch, step=step, shortlist_NH=None)
            clf_targets = PoolTargets.from_batch(full, self.device, soft=self.soft)
        elif self.heads != "de":
            clf_sizes = self.ranks.sizes_among(pool.pool_S, num_labels)
            first = sum(clf_sizes[: self.ranks.rank])
            clf_labels = self.rows_to_device(pool.pool_S[first : first + clf_sizes[self.ranks.rank]])
        own_rows = pool.rows_B[slice(*self.ranks.part(len(pool.rows_B)))]

        def pool_part(part: slice) -> TextParts:
            return [] if self.heads == "clf" else [("labels", self.tokens["labels"], pool.pool_S[part])]

        parts = self.parts(own_rows) + pool_part(slice(*self.ranks.part(len(pool.pool_S))))
        everyones = parts if self.ranks.alone else [*self.parts(pool.rows_B), *pool_part(slice(None))]
        return Prepared(
            pool, targets, clf_targets, clf_labels, clf_sizes, self.build(parts), len(own_rows),
            num_texts=sum(len(rows) for _, _, rows in everyones),
            num_tokens=sum(int(tokens.lengths(rows).sum()) for _, tokens, rows in everyones),
        )  # fmt: skip

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


def _with_labels(
    relevance: sp.csr_matrix, filter_pairs: sp.csr_matrix, label_graph: sp.csr_matrix | None
) -> tuple[sp.csr_matrix, sp.csr_matrix]:
    """Relevance and filter pairs of N + L rows: queries (every positive counts 1), then labels."""
    num_labels = relevance.shape[1]
    if label_graph is None or label_graph.shape != (num_labels, num_labels):
        raise ConfigError(
            "Gandalf needs the label graph of this data set", where="pool.gandalf",
            got="none" if label_graph is None else f"{label_graph.shape[0]} labels", expected=f"{num_labels} labels",
            fix="unidec label-graph",
        )  # fmt: skip
    ones = sp.csr_matrix((np.ones(relevance.nnz, np.float32), relevance.indices, relevance.indptr), relevance.shape)
    nothing = sp.csr_matrix((num_labels, num_labels), dtype=filter_pairs.dtype)
    return sp.vstack([ones, label_graph], format="csr"), sp.vstack([filter_pairs, nothing], format="csr")
