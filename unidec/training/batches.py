"""Prepares the batches of training steps: draws a pool for some queries and puts pairs and texts on the device.

Legend: B queries in a batch, S pool labels, N queries of the data set, n training queries, L labels, E related pairs, M
related queries.

With Gandalf (Gandalf, section 3) label texts are also training queries: label l is row N + l, and its relevances are
row l of the label graph, soft targets in (0, 1]. A label whose row is empty is not a query. With SimCSE (Gao et al.
2021) all N + L texts are both queries and labels, and the only positive of each is itself: a step encodes the texts
twice, with different dropout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from unidec.data.dataset import XMCDataset
from unidec.data.propensity import inverse_propensity, label_counts
from unidec.data.tokens import TokenCache
from unidec.errors import DataError
from unidec.model.encoder import EncoderInput, InputBuilder
from unidec.model.losses import BY_COLUMNS
from unidec.model.pairs import ALL_COLUMNS, Columns, PoolTargets, to_device
from unidec.params import TrainingSettings
from unidec.training.distributed import ALONE, OwnColumns, Ranks
from unidec.training.gradient_cache import TextChunks, TextParts, cut_texts
from unidec.training.mixup import Mix, draw_mix
from unidec.training.sampler import Labels, PoolBatch, PoolSampler, encoded_labels, head_labels, weighs_by_propensity

_MIX_STREAM, _QUERY_STREAM = 0x6D6978, 0x717279  # seeds that separate these random numbers from others of a step


@dataclass(frozen=True)
class Prepared:
    """A batch on the device.

    Attributes:
        pool: all queries and labels of the dual encoder's loss, also those that other ranks encode (of a model without
            a dual encoder: the classifier's).
        targets, clf_targets: pairs of the queries with the labels of the dual encoder's and of the classifier's loss.
        clf_labels: int64 ids of the labels in the classifier's loss whose rows this rank holds, on the table's device;
            None: all labels.
        clf_sizes: for each rank the number of labels in the classifier's loss whose rows it holds.
        clf_places: int64, positions of `clf_labels` among the encoded labels, for a residual classifier; None: they are
            the same labels, or the classifier is not residual.
        related: with `model.clf_graph` pairs of related labels in the classifier's loss: positions of both among these
            labels, int64 [E], and how much they are related, float32 [E]. With `model.clf_queries` pairs of a label and
            a query drawn for it, the latter by its position among the query texts that follow the label texts.
        mix: with `loss.mixup` how the queries are mixed, else None.
        own_labels: with `model.auxiliary` int64 ids of the labels whose texts this rank encodes, else None.
        levels: for each of `model.levels` the pairs of queries and clusters.
        texts: the texts that this rank encodes: its part of the queries, then its part of the labels, then related
            queries; in chunks if gradients are cached.
        num_own_queries: number of queries at the start of `texts`.
        num_texts, num_tokens: sums over the texts of all ranks.
    """

    pool: PoolBatch
    targets: PoolTargets
    clf_targets: PoolTargets
    clf_labels: Tensor | None
    clf_sizes: list[int]
    clf_places: Tensor | None
    related: tuple[Tensor, ...] | None
    mix: Mix | None
    own_labels: Tensor | None
    levels: list[PoolTargets]
    texts: EncoderInput | TextChunks
    num_own_queries: int
    num_texts: int
    num_tokens: int


class Batches:
    """Prepares batches from row numbers of queries.

    Args:
        tokens: token caches "queries" and "labels".
        build: puts texts on the device; device: the targets' device.
        label_graph: csr [L, L] of soft targets; needed with `pool.gandalf` or `model.clf_graph`, otherwise not read.

    Attributes:
        rows: int64 [n], training rows of the data set, and behind them with Gandalf or SimCSE the rows of labels.
        inverse_L: float64 [L], inverse propensities from the training queries, if losses or the draw of positives are
            weighted by them, else None.
        related_LN: with `model.clf_graph` the label graph without its diagonal, csr [L, L]; with `model.clf_queries`
            csr [L, n], 1 where a training query has the label; else None.
        sampler: draws pools of labels; levels: samplers of the clusters of each of `model.levels` (`add_levels`).

    Raises:
        DataError: no training query has a positive.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        dataset: XMCDataset,
        tokens: Mapping[str, TokenCache],
        build: InputBuilder,
        device: torch.device,
        ranks: Ranks = ALONE,
        label_graph: sp.csr_matrix | None = None,
    ):
        pool = settings.pool
        self.settings, self.tokens, self.build, self.device, self.ranks = settings, tokens, build, device, ranks
        self.num_queries, self.rows = dataset.num_queries, dataset.rows("train")
        self.de_labels, self._clf_labels = head_labels(settings.model, pool)
        self.encoded = encoded_labels(settings.model, pool)
        self._num_clf_labels = pool.clf_labels if isinstance(pool.clf_labels, int) else 0  # of labels "some"
        relevance, filter_pairs, self.inverse_L = dataset.relevance, dataset.filter_pairs, None
        if not np.diff(relevance.indptr)[self.rows].any():
            raise DataError(
                "nothing to train on: no training query has a positive", where=str(dataset.path),
                got=f"{len(self.rows)} training queries", fix="check the pairs and splits of the raw files",
            )  # fmt: skip
        if weighs_by_propensity(settings.loss, pool):
            self.inverse_L = inverse_propensity(
                label_counts(relevance, self.rows), len(self.rows), *settings.propensity
            )
        self.related_LN: sp.csr_matrix | None = None
        if settings.model.clf_queries and settings.model.heads != "de":
            self.related_LN = sp.csr_matrix((relevance[self.rows] > 0).T, dtype=np.float32)
        elif settings.model.clf_graph and settings.model.heads != "de":
            assert label_graph is not None
            self.related_LN = sp.csr_matrix(label_graph - sp.diags(label_graph.diagonal(), format="csr"))
            self.related_LN.eliminate_zeros()
        if pool.gandalf:
            relevance, filter_pairs, label_queries = _with_label_queries(relevance, filter_pairs, label_graph)
            self.rows = np.concatenate([self.rows, self.num_queries + label_queries])
        if pool.simcse:
            self.rows = np.concatenate([self.rows, self.num_queries + np.arange(dataset.num_labels)])
            relevance, filter_pairs = _texts_as_labels(filter_pairs)
        self._set_sampler(relevance, filter_pairs)
        self.levels: list[PoolSampler] = []

    def _set_sampler(self, relevance: sp.csr_matrix, filter_pairs: sp.csr_matrix) -> None:
        pool = self.settings.pool
        self.sampler = PoolSampler(
            relevance, filter_pairs, beta=pool.beta, eta=pool.eta, size=pool.size, seed=self.settings.seed,
            fill=pool.fill, weight_L=self.inverse_L if pool.positives == "tail" else None,
        )  # fmt: skip

    @property
    def clf_labels(self) -> Labels:
        """Labels in the classifier's loss. "some" becomes "all" if gathering so many rows would take longer."""
        if self._clf_labels != "some" or self.settings.run.table_place != "device":
            return self._clf_labels
        return "all" if 2 * self._num_clf_labels >= self.sampler.num_labels else "some"

    def label_by_cluster(self, cluster_L: np.ndarray, num_clusters: int) -> None:
        """Replace labels by clusters in all further batches (Astec's surrogate task); cluster_L: int64 [L], the cluster
        of each label."""
        self._set_sampler(*self._cluster_pairs(cluster_L, num_clusters))

    def add_levels(self, cluster_L: np.ndarray, counts: list[int]) -> None:
        """Add the pairs of queries and clusters of a label tree to all further batches.

        Args:
            cluster_L: int64 [L], each label's cluster of the finest level; a cluster of a coarser level consists of
                consecutive clusters of it.
            counts: number of clusters of each level.
        """
        for count in counts:
            pairs = self._cluster_pairs(cluster_L // (counts[-1] // count), count)
            beta, seed = self.settings.pool.beta, self.settings.seed
            self.levels.append(PoolSampler(*pairs, beta=beta, eta=0, size=0, seed=seed))

    def _cluster_pairs(self, cluster_L: np.ndarray, num_clusters: int) -> list[sp.csr_matrix]:
        """Relevance and filter pairs of clusters in place of labels, csr [rows, clusters]."""
        labels = np.arange(len(cluster_L))
        shape = (len(cluster_L), num_clusters)
        member_LC = sp.csr_matrix((np.ones(len(labels), dtype=np.float32), (labels, cluster_L)), shape)
        matrices = [sp.csr_matrix(pairs @ member_LC) for pairs in (self.sampler.relevance, self.sampler.filter_pairs)]
        for pairs in matrices:
            pairs.sort_indices()
            np.minimum(pairs.data, 1, out=pairs.data)
        return matrices

    def parts(self, rows: np.ndarray) -> TextParts:
        """Texts of training rows; `rows` must have those of queries first, then those of labels."""
        query_rows = rows[rows < self.num_queries]
        parts: TextParts = [("queries", self.tokens["queries"], query_rows)]
        return parts + self._label_texts(rows[len(query_rows) :] - self.num_queries)

    def _label_texts(self, labels: np.ndarray) -> TextParts:
        return [("labels", self.tokens["labels"], labels)] if len(labels) else []

    def _pool_texts(self, labels: np.ndarray) -> TextParts:
        """Texts of pool labels, which with SimCSE are rows of queries and labels."""
        return self.parts(labels) if self.settings.pool.simcse else self._label_texts(labels)

    def prepare(self, rows_B: np.ndarray, epoch: int, step: int, negatives: np.ndarray | None) -> Prepared:
        """Draw the pool of some queries, and put it and the texts to encode on the device.

        Args:
            rows_B: training rows.
            epoch: from 0; step: unique within the epoch. Both seed the batch's random numbers.
            negatives: int32 [rows, H], mined hard negatives by training row, or None.
        """
        if self.num_queries < self.sampler.relevance.shape[0]:  # queries first, then labels, as `parts` requires
            rows_B = rows_B[np.argsort(rows_B >= self.num_queries, kind="stable")]
        kind = "all" if self.de_labels == "all" else "pool"
        clf_kind = kind if self.clf_labels == "none" else self.clf_labels
        drawn = {each: self._draw(rows_B, epoch, step, negatives, each) for each in {kind, clf_kind}}
        (pool, targets), (clf_pool, clf_targets) = drawn[kind], drawn[clf_kind]
        own_rows = pool.rows_B[slice(*self.ranks.part(len(pool.rows_B)))]
        encoded = np.empty(0, dtype=np.int64) if self.encoded == "none" else pool.pool_S
        related, related_rows = self._related(clf_pool, (epoch, step))
        related_texts: TextParts = [("queries", self.tokens["queries"], related_rows)] if len(related_rows) else []
        own_labels = encoded[slice(*self.ranks.part(len(encoded)))]
        own_texts = self.parts(own_rows) + self._pool_texts(own_labels) + related_texts
        size = self.settings.optim.encode_chunk
        all_texts = [*self.parts(pool.rows_B), *self._pool_texts(encoded), *related_texts]
        losses, soft = self.settings.loss, self.settings.pool.gandalf
        levels = [level.batch(pool.rows_B, epoch=epoch, step=step, up_to=level.num_labels) for level in self.levels]
        return Prepared(
            pool, replace(targets, columns=self._columns(pool, self.de_labels, losses.de)),
            replace(clf_targets, columns=self._columns(clf_pool, self.clf_labels, losses.clf)),
            *self._clf_rows(clf_pool, encoded), related, self._mix(pool, epoch, step),
            to_device(own_labels, self.device) if self.settings.model.auxiliary else None,
            [PoolTargets.from_batch(level, self.device, soft=soft) for level in levels],
            cut_texts(own_texts, self.build, size, self.device) if size else self.build(own_texts), len(own_rows),
            num_texts=sum(len(rows) for _, _, rows in all_texts),
            num_tokens=sum(int(tokens.lengths(rows).sum()) for _, tokens, rows in all_texts),
        )  # fmt: skip

    def _draw(
        self, rows_B: np.ndarray, epoch: int, step: int, negatives: np.ndarray | None, kind: str
    ) -> tuple[PoolBatch, PoolTargets]:
        up_to = {"pool": 0, "some": self._num_clf_labels, "all": self.sampler.num_labels}[kind]
        pool = self.sampler.batch(rows_B, epoch=epoch, step=step, shortlist_NH=negatives, up_to=up_to)
        weighted = {"importance_L": self.inverse_L} if self.settings.loss.weights == "propensity" else {}
        return pool, PoolTargets.from_batch(pool, self.device, soft=self.settings.pool.gandalf, **weighted)

    def _columns(self, pool: PoolBatch, labels: str, loss: str) -> Columns:
        """Which labels of a head this rank scores, as columns of the logits."""
        if self.ranks.alone or labels != "all" or loss not in BY_COLUMNS:
            return ALL_COLUMNS
        begin, end = self.ranks.part(self.sampler.num_labels)
        own_P, own_F = (
            to_device(np.flatnonzero((begin <= column) & (column < end)), self.device)
            for column in (pool.positive_col_P, pool.ignored_col_F)
        )
        return OwnColumns(self.ranks, begin, self.sampler.num_labels, own_P, own_F, len(pool.positive_col_P))

    def _clf_rows(self, clf_pool: PoolBatch, encoded: np.ndarray) -> tuple[Tensor | None, list[int], Tensor | None]:
        """The fields `clf_labels`, `clf_sizes` and `clf_places` of a batch."""
        num_labels = self.sampler.num_labels
        if self.clf_labels not in ("pool", "some"):
            return None, self.ranks.sizes(num_labels), None
        sizes = self.ranks.sizes_among(clf_pool.pool_S, num_labels)
        first = sum(sizes[: self.ranks.rank])
        device = self.device if self.settings.run.table_place == "device" else "cpu"  # the table's
        ids = to_device(clf_pool.pool_S[first : first + sizes[self.ranks.rank]], device)
        places = None
        if self.settings.model.clf_residual and len(encoded) > len(clf_pool.pool_S):
            places = to_device(np.searchsorted(encoded, clf_pool.pool_S), self.device)
        return ids, sizes, places

    def _related(self, pool: PoolBatch, number: tuple[int, int]) -> tuple[tuple[Tensor, ...] | None, np.ndarray]:
        """The field `related` of a batch, and the rows of the related queries, int64 [M]."""
        rows_M, labels_S = np.empty(0, dtype=np.int64), pool.pool_S
        if self.related_LN is None:
            return None, rows_M
        if self.settings.model.clf_queries:
            row_E, col_E, rows_M = self._drawn_queries(self.related_LN[labels_S].tocoo(), pool.rows_B, number)
            weight_E = np.ones(len(row_E))
        else:
            pairs = self.related_LN[labels_S][:, labels_S].tocoo()
            row_E, col_E, weight_E = pairs.row, pairs.col, pairs.data
        arrays = (row_E.astype(np.int64), col_E.astype(np.int64), weight_E.astype(np.float32))
        return tuple(to_device(array, self.device) for array in arrays), rows_M

    def _drawn_queries(
        self, pairs: sp.coo_matrix, rows_B: np.ndarray, number: tuple[int, int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw at most `model.clf_queries` training queries for each label. Queries of the batch are excluded:
        otherwise a label's row would contain the text that it is compared with.

        Args:
            pairs: [S, n], labels and their training queries.
            number: (epoch, step), seeds the draw.

        Returns:
            (position of the label int64 [E], position of the query int64 [E], row of each query int64 [M]).
        """
        row_E, query_E = pairs.row, self.rows[pairs.col]
        draw_E = np.random.default_rng((self.settings.seed, *number, _QUERY_STREAM)).random(len(row_E))
        draw_E[np.isin(query_E, rows_B)] = 2.0
        order = np.lexsort((draw_E, row_E))
        row_E, query_E, draw_E = row_E[order], query_E[order], draw_E[order]
        first_E = np.searchsorted(row_E, row_E)
        chosen = (np.arange(len(row_E)) - first_E < self.settings.model.clf_queries) & (draw_E < 1)
        rows_M, col_E = np.unique(query_E[chosen], return_inverse=True)
        return row_E[chosen], col_E, rows_M

    def _mix(self, pool: PoolBatch, epoch: int, step: int) -> Mix | None:
        settings = self.settings
        if settings.loss.mixup == "none":
            return None
        return draw_mix(settings.loss, pool, (settings.seed, epoch, step, _MIX_STREAM), self.device)

    def ahead(
        self, batches: list[np.ndarray], epoch: int, first: int, negatives: np.ndarray | None
    ) -> Iterator[Prepared]:
        """Yields an epoch's prepared batches from number `first` on. For a GPU a thread prepares the next batch while
        the current one is used."""
        numbers = range(first, len(batches))
        if self.device.type == "cpu":
            yield from (self.prepare(batches[number], epoch, number, negatives) for number in numbers)
            return
        with ThreadPoolExecutor(1) as thread:
            upcoming = None
            for number in numbers:
                prepared = upcoming.result() if upcoming else self.prepare(batches[number], epoch, number, negatives)
                if number + 1 < len(batches):
                    upcoming = thread.submit(self.prepare, batches[number + 1], epoch, number + 1, negatives)
                yield prepared


def _with_label_queries(
    relevance: sp.csr_matrix, filter_pairs: sp.csr_matrix, label_graph: sp.csr_matrix | None
) -> tuple[sp.csr_matrix, sp.csr_matrix, np.ndarray]:
    """Relevance and filter pairs of N + L rows: queries, whose positives all have relevance 1, then labels with soft
    targets. The third result are the labels that have targets, int64."""
    num_labels = relevance.shape[1]
    assert label_graph is not None and label_graph.shape == (num_labels, num_labels)
    ones = sp.csr_matrix((np.ones(relevance.nnz, np.float32), relevance.indices, relevance.indptr), relevance.shape)
    no_pairs = sp.csr_matrix((num_labels, num_labels), dtype=filter_pairs.dtype)
    with_targets = np.flatnonzero(np.diff(label_graph.indptr))
    return sp.vstack([ones, label_graph], format="csr"), sp.vstack([filter_pairs, no_pairs], format="csr"), with_targets


def _texts_as_labels(filter_pairs: sp.csr_matrix) -> tuple[sp.csr_matrix, sp.csr_matrix]:
    """Relevance and filter pairs of N + L texts, each of which is its own only positive. The query and the label of a
    filter pair (the same item, usually with the same text) are ignored for each other."""
    num_texts = sum(filter_pairs.shape)
    filtered = sp.bmat([[None, filter_pairs], [filter_pairs.T, None]], format="csr")
    return sp.eye_array(num_texts, dtype=np.float32, format="csr"), filtered
