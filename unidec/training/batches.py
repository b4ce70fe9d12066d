"""What a step trains on: a batch of queries, its pool drawn, their texts on the device.

Legend: B queries in a batch, S pool labels, N queries of the data set, n training queries, L labels.

With Gandalf (Gandalf, section 3) label texts are training queries too: label l is row N + l, and its relevance is row
l of the label graph, soft targets in (0, 1]. A label whose row is empty is no query. With SimCSE (Gao et al. 2021)
these rows are the labels as well, each its own only positive: a step encodes its texts twice, by two dropout masks.
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

_MIX, _QUERIES = 0x6D6978, 0x717279  # apart from other random numbers of a step


@dataclass(frozen=True)
class Prepared:
    """A batch on the device.

    Attributes:
        pool: all of the batch's queries and the dual encoder's labels, whatever part of them this rank encodes (a
            classifier alone: its pool).
        targets, clf_targets: pairs of those labels, and of what the classifier sees.
        clf_labels: int64 label ids that the classifier sees, those of this rank's rows, where its table is; None: all.
        clf_sizes: how many of them are in each rank's rows.
        clf_places: int64, where they are among the encoded labels, for rows that hold their label's text; None: they
            are the encoded labels, or rows hold no texts.
        related: with `model.clf_graph` the pairs of labels that the classifier sees and that are related: places int64
            [E] of both among them, and how much they are, float32 [E]; with `model.clf_queries` pairs of such a label
            and a query drawn for it, by its place among those whose texts follow the labels'.
        mix: how the queries are mixed, with `loss.mixup`, else None.
        own_labels: with `model.auxiliary` int64 ids of the labels whose texts this rank encodes, else None.
        levels: pairs of the queries and the clusters of each of `model.levels`.
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
    related: tuple[Tensor, ...] | None
    mix: Mix | None
    own_labels: Tensor | None
    levels: list[PoolTargets]
    texts: EncoderInput | TextChunks
    num_own_queries: int
    num_texts: int
    num_tokens: int


class Batches:
    """Prepares batches, from row numbers.

    Args:
        tokens: token caches "queries" and "labels".
        build: puts texts on the device; device: of the targets.
        label_graph: csr [L, L] of soft targets; needed, and only read, with `pool.gandalf` or `model.clf_graph`.

    Attributes:
        rows: int64 [n], training rows: the data set's, with Gandalf those of the labels behind them.
        inverse_L: float64 [L], inverse propensities by the training queries alone, where something is weighted by
            them, else None.
        related_LN: csr [L, L], the label graph without its diagonal, with `model.clf_graph`; with `model.clf_queries`
            csr [L, n], 1 where a training query has the label; else None.
        sampler: draws pools; levels: the same of the clusters of each of `model.levels` (`add_levels`).

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
        self._some = pool.clf_labels if isinstance(pool.clf_labels, int) else 0
        relevance, filter_pairs, self.inverse_L = dataset.relevance, dataset.filter_pairs, None
        if not np.diff(relevance.indptr)[self.rows].any():
            raise DataError(
                "nothing to train on: no training query has a positive", where=str(dataset.path),
                got=f"{len(self.rows)} training queries", fix="look at the raw files' pairs and splits",
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
            relevance, filter_pairs, chosen = _with_labels(relevance, filter_pairs, label_graph)
            self.rows = np.concatenate([self.rows, self.num_queries + chosen])
        if pool.simcse:
            self.rows = np.concatenate([self.rows, self.num_queries + np.arange(dataset.num_labels)])
            relevance, filter_pairs = _texts_alone(filter_pairs)
        self._draw_from(relevance, filter_pairs)
        self.levels: list[PoolSampler] = []

    def _draw_from(self, relevance: sp.csr_matrix, filter_pairs: sp.csr_matrix) -> None:
        pool = self.settings.pool
        self.sampler = PoolSampler(
            relevance, filter_pairs, beta=pool.beta, eta=pool.eta, size=pool.size, seed=self.settings.seed,
            fill=pool.fill, weight_L=self.inverse_L if pool.positives == "tail" else None,
        )  # fmt: skip

    @property
    def clf_labels(self) -> Labels:
        """Which labels the classifier's loss sees: all of them where fetching so many rows would take longer."""
        if self._clf_labels != "some" or self.settings.run.table_place != "device":
            return self._clf_labels
        return "all" if 2 * self._some >= self.sampler.num_labels else "some"

    def label_by_cluster(self, cluster_L: np.ndarray, num_clusters: int) -> None:
        """From now on clusters are the labels: int64 [L], the cluster of each label (Astec's surrogate task)."""
        self._draw_from(*self._grouped(cluster_L, num_clusters))

    def add_levels(self, cluster_L: np.ndarray, counts: list[int]) -> None:
        """From now on a batch has the pairs of its queries and the clusters of a label tree, `counts` of each level:
        `cluster_L` int64 [L] are the finest one's, of which a cluster of a coarser level has several in a row."""
        for count in counts:
            pairs = self._grouped(cluster_L // (counts[-1] // count), count)
            beta, seed = self.settings.pool.beta, self.settings.seed
            self.levels.append(PoolSampler(*pairs, beta=beta, eta=0, size=0, seed=seed))

    def _grouped(self, cluster_L: np.ndarray, num_clusters: int) -> list[sp.csr_matrix]:
        """Relevance and filter pairs of clusters in place of labels, csr [rows, clusters]."""
        labels = np.arange(len(cluster_L))
        shape = (len(cluster_L), num_clusters)
        member_LC = sp.csr_matrix((np.ones(len(labels), dtype=np.float32), (labels, cluster_L)), shape)
        grouped = [sp.csr_matrix(pairs @ member_LC) for pairs in (self.sampler.relevance, self.sampler.filter_pairs)]
        for pairs in grouped:
            pairs.sort_indices()
            np.minimum(pairs.data, 1, out=pairs.data)
        return grouped

    def parts(self, rows: np.ndarray) -> TextParts:
        """Texts of training rows; rows of labels follow those of queries."""
        of_query = rows[rows < self.num_queries]
        parts: TextParts = [("queries", self.tokens["queries"], of_query)]
        return parts + self._texts_of(rows[len(of_query) :] - self.num_queries)

    def _texts_of(self, labels: np.ndarray) -> TextParts:
        return [("labels", self.tokens["labels"], labels)] if len(labels) else []

    def _label_parts(self, labels: np.ndarray) -> TextParts:
        """Texts of pool labels."""
        return self.parts(labels) if self.settings.pool.simcse else self._texts_of(labels)

    def prepare(self, rows_B: np.ndarray, epoch: int, step: int, negatives: np.ndarray | None) -> Prepared:
        """Draw the pool of some queries and put it, and the texts to encode, on the device.

        Args:
            rows_B: training rows.
            epoch: from 0; step: unique within it. Both name the batch's random numbers.
            negatives: int32 [rows, H] mined hard negatives by training row, or None.
        """
        if self.num_queries < self.sampler.relevance.shape[0]:  # queries first, then label texts, as `parts` has them
            rows_B = rows_B[np.argsort(rows_B >= self.num_queries, kind="stable")]
        kind = "all" if self.de_labels == "all" else "pool"
        of_clf = kind if self.clf_labels == "none" else self.clf_labels
        drawn = {each: self._draw(rows_B, epoch, step, negatives, each) for each in {kind, of_clf}}
        (pool, targets), (clf_pool, clf_targets) = drawn[kind], drawn[of_clf]
        own_rows = pool.rows_B[slice(*self.ranks.part(len(pool.rows_B)))]
        encoded = np.empty(0, dtype=np.int64) if self.encoded == "none" else pool.pool_S
        related, drawn_rows = self._related(clf_pool, (epoch, step))
        near: TextParts = [("queries", self.tokens["queries"], drawn_rows)] if len(drawn_rows) else []
        own_labels = encoded[slice(*self.ranks.part(len(encoded)))]
        own = self.parts(own_rows) + self._label_parts(own_labels) + near
        size = self.settings.optim.encode_chunk
        everyones = [*self.parts(pool.rows_B), *self._label_parts(encoded), *near]
        losses, soft = self.settings.loss, self.settings.pool.gandalf
        levels = [level.batch(pool.rows_B, epoch=epoch, step=step, up_to=level.num_labels) for level in self.levels]
        return Prepared(
            pool, replace(targets, columns=self._columns(pool, self.de_labels, losses.de)),
            replace(clf_targets, columns=self._columns(clf_pool, self.clf_labels, losses.clf)),
            *self._classified(clf_pool, encoded), related, self._mix(pool, epoch, step),
            to_device(own_labels, self.device) if self.settings.model.auxiliary else None,
            [PoolTargets.from_batch(level, self.device, soft=soft) for level in levels],
            cut_texts(own, self.build, size, self.device) if size else self.build(own), len(own_rows),
            num_texts=sum(len(rows) for _, _, rows in everyones),
            num_tokens=sum(int(tokens.lengths(rows).sum()) for _, tokens, rows in everyones),
        )  # fmt: skip

    def _draw(
        self, rows_B: np.ndarray, epoch: int, step: int, negatives: np.ndarray | None, kind: str
    ) -> tuple[PoolBatch, PoolTargets]:
        up_to = {"pool": 0, "some": self._some, "all": self.sampler.num_labels}[kind]
        pool = self.sampler.batch(rows_B, epoch=epoch, step=step, shortlist_NH=negatives, up_to=up_to)
        weighted = {"importance_L": self.inverse_L} if self.settings.loss.weights == "propensity" else {}
        return pool, PoolTargets.from_batch(pool, self.device, soft=self.settings.pool.gandalf, **weighted)

    def _columns(self, pool: PoolBatch, labels: str, loss: str) -> Columns:
        """Which of a head's labels this rank scores."""
        if self.ranks.alone or labels != "all" or loss not in BY_COLUMNS:
            return ALL_COLUMNS
        begin, end = self.ranks.part(self.sampler.num_labels)
        own_P, own_F = (
            to_device(np.flatnonzero((begin <= column) & (column < end)), self.device)
            for column in (pool.positive_col_P, pool.ignored_col_F)
        )
        return OwnColumns(self.ranks, begin, self.sampler.num_labels, own_P, own_F, len(pool.positive_col_P))

    def _classified(self, clf_pool: PoolBatch, encoded: np.ndarray) -> tuple[Tensor | None, list[int], Tensor | None]:
        """Ids of this rank's rows among those that the classifier sees, each rank's number of them, and their places
        among the encoded labels."""
        num_labels = self.sampler.num_labels
        if self.clf_labels not in ("pool", "some"):
            return None, self.ranks.sizes(num_labels), None
        sizes = self.ranks.sizes_among(clf_pool.pool_S, num_labels)
        first = sum(sizes[: self.ranks.rank])
        place = self.device if self.settings.run.table_place == "device" else "cpu"  # where the rows are looked up
        ids = to_device(clf_pool.pool_S[first : first + sizes[self.ranks.rank]], place)
        places = None
        if self.settings.model.clf_residual and len(encoded) > len(clf_pool.pool_S):
            places = to_device(np.searchsorted(encoded, clf_pool.pool_S), self.device)
        return ids, sizes, places

    def _related(self, pool: PoolBatch, number: tuple[int, int]) -> tuple[tuple[Tensor, ...] | None, np.ndarray]:
        """Pairs of a label and what is related to it, and rows of the queries among that."""
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
        """At most `model.clf_queries` training queries of each label, drawn by the step's number, none of its batch: a
        label would hold the text that it is compared with. (label's place, query's place, row of each query)."""
        row_E, query_E = pairs.row, self.rows[pairs.col]
        draw_E = np.random.default_rng((self.settings.seed, *number, _QUERIES)).random(len(row_E))
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
        return draw_mix(settings.loss, pool, (settings.seed, epoch, step, _MIX), self.device)

    def ahead(
        self, batches: list[np.ndarray], epoch: int, first: int, negatives: np.ndarray | None
    ) -> Iterator[Prepared]:
        """An epoch's batches from number `first` on; for a GPU the next is prepared while it works on this one."""
        numbers = range(first, len(batches))
        if self.device.type == "cpu":
            yield from (self.prepare(batches[number], epoch, number, negatives) for number in numbers)
            return
        with ThreadPoolExecutor(1) as thread:
            coming = None
            for number in numbers:
                prepared = coming.result() if coming else self.prepare(batches[number], epoch, number, negatives)
                if number + 1 < len(batches):
                    coming = thread.submit(self.prepare, batches[number + 1], epoch, number + 1, negatives)
                yield prepared


def _with_labels(
    relevance: sp.csr_matrix, filter_pairs: sp.csr_matrix, label_graph: sp.csr_matrix | None
) -> tuple[sp.csr_matrix, sp.csr_matrix, np.ndarray]:
    """Relevance and filter pairs of N + L rows, queries (every positive counts 1), then labels; and the labels that
    have targets, int64."""
    num_labels = relevance.shape[1]
    assert label_graph is not None and label_graph.shape == (num_labels, num_labels)
    ones = sp.csr_matrix((np.ones(relevance.nnz, np.float32), relevance.indices, relevance.indptr), relevance.shape)
    nothing = sp.csr_matrix((num_labels, num_labels), dtype=filter_pairs.dtype)
    chosen = np.flatnonzero(np.diff(label_graph.indptr))
    return sp.vstack([ones, label_graph], format="csr"), sp.vstack([filter_pairs, nothing], format="csr"), chosen


def _texts_alone(filter_pairs: sp.csr_matrix) -> tuple[sp.csr_matrix, sp.csr_matrix]:
    """Relevance and filter pairs of N + L texts: each is its own positive; a filtered query and label (the same thing,
    as a rule the same text) are no negatives of each other."""
    num_texts = sum(filter_pairs.shape)
    filtered = sp.bmat([[None, filter_pairs], [filter_pairs.T, None]], format="csr")
    return sp.eye_array(num_texts, dtype=np.float32, format="csr"), filtered
