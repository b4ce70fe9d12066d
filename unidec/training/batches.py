"""Prepares the batches of training steps: draws a pool for some queries and puts pairs and texts on
the device.

Legend: B queries in a batch, S pool labels, N queries of the data set, L labels, F ignored pairs, P
positive pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch

from unidec.config import TrainingSettings
from unidec.data.dataset import XMCDataset
from unidec.data.propensity import inverse_propensity, label_counts
from unidec.data.tokens import TokenCache
from unidec.errors import DataError
from unidec.model.additions import Drawn, Methods
from unidec.model.batch import ClassifierLabels, Prepared, TextCounts
from unidec.model.encoder_inputs import InputBuilder
from unidec.model.losses import BY_COLUMNS
from unidec.model.pairs import ALL_COLUMNS, Columns, PoolTargets, to_device
from unidec.model.pool import PoolBatch, PoolSampler, TrainingPairs
from unidec.training.distributed import ALONE, OwnColumns, Ranks
from unidec.training.gradient_cache import TextParts, cut_texts
from unidec.training.sampler import Labels, encoded_labels, head_labels, weighs_by_propensity


def query_pairs(dataset: XMCDataset) -> TrainingPairs:
    """The training queries and their pairs. Raises DataError: no training query has a positive."""
    rows = dataset.rows("train")
    if not np.diff(dataset.relevance.indptr)[rows].any():
        raise DataError(
            "nothing to train on: no training query has a positive",
            where=str(dataset.path),
            got=f"{len(rows)} training queries",
            fix="check the pairs and splits of the raw files",
        )
    return TrainingPairs(rows=rows, relevance=dataset.relevance, filter_pairs=dataset.filter_pairs)


def inverse_propensities(settings: TrainingSettings, dataset: XMCDataset) -> np.ndarray | None:
    """Inverse propensities from the training queries, float64 [L], if losses or the draw of
    positives are weighted by them, else None.
    """
    if not weighs_by_propensity(settings.loss, settings.pool):
        return None
    rows = dataset.rows("train")
    counts_L = label_counts(dataset.relevance, rows)
    return inverse_propensity(counts_L, len(rows), *settings.propensity)


@dataclass(frozen=True)
class TrainingTexts:
    """The texts of training rows: queries, and behind them the labels.

    Attributes:
        tokens: token caches "queries" and "labels".
    """

    tokens: dict[str, TokenCache]

    @property
    def num_queries(self) -> int:
        """N."""
        return len(self.tokens["queries"])

    def parts(self, rows: np.ndarray) -> TextParts:
        """Texts of training rows; `rows` must have those of queries first, then those of labels."""
        query_rows = rows[rows < self.num_queries]
        return self.of_queries(query_rows) + self.of_labels(
            rows[len(query_rows) :] - self.num_queries
        )

    def of_queries(self, rows: np.ndarray) -> TextParts:
        """Texts of queries."""
        return [("queries", self.tokens["queries"], rows)]

    def of_labels(self, labels: np.ndarray) -> TextParts:
        """Texts of labels; none for no labels."""
        return [("labels", self.tokens["labels"], labels)] if len(labels) else []


class Batches:
    """Prepares batches from row numbers of training rows.

    Args:
        pairs: the training rows and their pairs.
        build: puts texts on the device; device: the targets' device.
        inverse_L: float64 [L], from `inverse_propensities`.

    Attributes:
        sampler: draws pools of labels.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        texts: TrainingTexts,
        pairs: TrainingPairs,
        methods: Methods,
        *,
        build: InputBuilder,
        device: torch.device,
        ranks: Ranks = ALONE,
        inverse_L: np.ndarray | None = None,
    ):
        pool = settings.pool
        self.settings = settings
        self.texts = texts
        self.pairs = pairs
        self.methods = methods
        self.build = build
        self.device = device
        self.ranks = ranks
        self.inverse_L = inverse_L
        self.sampler = PoolSampler(
            pairs.relevance,
            pairs.filter_pairs,
            beta=pool.beta,
            eta=pool.eta,
            size=pool.size,
            seed=settings.seed,
            fill=pool.fill,
            weight_L=inverse_L if pool.positives == "tail" else None,
        )

    @property
    def rows(self) -> np.ndarray:
        """int64 [n]: training rows."""
        return self.pairs.rows

    @property
    def de_labels(self) -> Labels:
        """Labels in the dual encoder's loss."""
        return head_labels(self.settings.model, self.settings.pool)[0]

    @property
    def clf_labels(self) -> Labels:
        """Labels in the classifier's loss. "some" becomes "all" if gathering so many rows would
        take longer.
        """
        labels = head_labels(self.settings.model, self.settings.pool)[1]
        if labels != "some" or self.settings.run.table_place != "device":
            return labels
        return "all" if 2 * self._num_clf_labels >= self.sampler.num_labels else "some"

    @property
    def _num_clf_labels(self) -> int:
        """Number of labels "some"."""
        number = self.settings.pool.clf_labels
        return number if isinstance(number, int) else 0

    def _label_texts(self, labels: np.ndarray) -> TextParts:
        return (
            self.texts.parts(labels)
            if self.pairs.labels_are_texts
            else self.texts.of_labels(labels)
        )

    def prepare(
        self, rows_B: np.ndarray, epoch: int, step: int, negatives: np.ndarray | None
    ) -> Prepared:
        """Draw the pool of some queries, and put it and the texts to encode on the device.

        Args:
            rows_B: training rows.
            epoch: from 0; step: unique within the epoch. Both seed the batch's random numbers.
            negatives: int32 [rows, H], mined hard negatives by training row, or None.
        """
        is_label_B = rows_B >= self.texts.num_queries
        if is_label_B.any():  # queries first, then labels, as `parts` requires
            rows_B = rows_B[np.argsort(is_label_B, kind="stable")]
        drawn = self._draw(rows_B, epoch, step, negatives)
        added, further = self.methods.draw(drawn)
        texts, own_labels, counts = self._texts(drawn, further)
        size = self.settings.optim.encode_chunk
        losses = self.settings.loss
        targets = self._targets(drawn.pool)
        clf_targets = targets if drawn.clf_pool is drawn.pool else self._targets(drawn.clf_pool)
        return Prepared(
            pool=drawn.pool,
            targets=replace(targets, columns=self._columns(drawn.pool, self.de_labels, losses.de)),
            clf=self._classifier(drawn.clf_pool, clf_targets),
            texts=cut_texts(texts, self.build, size, self.device) if size else self.build(texts),
            counts=counts,
            own_labels=to_device(own_labels, self.device) if self.methods.reads_labels else None,
            added=added,
        )

    def _draw(
        self, rows_B: np.ndarray, epoch: int, step: int, negatives: np.ndarray | None
    ) -> Drawn:
        num_labels = self.sampler.num_labels
        most = {"pool": 0, "some": self._num_clf_labels, "all": num_labels}
        kind = "all" if self.de_labels == "all" else "pool"
        clf_kind = kind if self.clf_labels == "none" else self.clf_labels
        pools = {
            each: self.sampler.batch(
                rows_B, epoch=epoch, step=step, shortlist_NH=negatives, up_to=most[each]
            )
            for each in {kind, clf_kind}
        }
        encodes = encoded_labels(self.settings.model, self.settings.pool) != "none"
        return Drawn(
            pool=pools[kind],
            clf_pool=pools[clf_kind],
            encoded=pools[kind].pool_S if encodes else np.empty(0, dtype=np.int64),
            seed=self.settings.seed,
            epoch=epoch,
            step=step,
            device=self.device,
        )

    def _texts(self, drawn: Drawn, further: np.ndarray) -> tuple[TextParts, np.ndarray, TextCounts]:
        """The texts that this rank encodes, the labels among them, int64, and counts."""
        rows_B = drawn.pool.rows_B
        encoded = drawn.encoded
        own_rows = rows_B[slice(*self.ranks.part(len(rows_B)))]
        own_labels = encoded[slice(*self.ranks.part(len(encoded)))]
        others = self.texts.of_queries(further) if len(further) else []
        own_texts = self.texts.parts(own_rows) + self._label_texts(own_labels) + others
        all_texts = self.texts.parts(rows_B) + self._label_texts(encoded) + others
        counts = TextCounts(
            own_queries=len(own_rows),
            texts=sum(len(rows) for _, _, rows in all_texts),
            tokens=sum(int(tokens.lengths(rows).sum()) for _, tokens, rows in all_texts),
        )
        return own_texts, own_labels, counts

    def _targets(self, pool: PoolBatch) -> PoolTargets:
        weighted = self.settings.loss.weights == "propensity"
        importance_L = self.inverse_L if weighted else None
        return PoolTargets.from_batch(
            pool, self.device, soft=self.pairs.soft, importance_L=importance_L
        )

    def _columns(self, pool: PoolBatch, labels: Labels, loss: str) -> Columns:
        """Which labels of a head this rank scores, as columns of the logits."""
        if self.ranks.alone or labels != "all" or loss not in BY_COLUMNS:
            return ALL_COLUMNS
        begin, end = self.ranks.part(self.sampler.num_labels)
        own_P, own_F = (
            to_device(np.flatnonzero((begin <= column) & (column < end)), self.device)
            for column in (pool.positive_col_P, pool.ignored_col_F)
        )
        return OwnColumns(
            self.ranks, begin, self.sampler.num_labels, own_P, own_F, len(pool.positive_col_P)
        )

    def _classifier(self, clf_pool: PoolBatch, targets: PoolTargets) -> ClassifierLabels:
        num_labels = self.sampler.num_labels
        targets = replace(
            targets, columns=self._columns(clf_pool, self.clf_labels, self.settings.loss.clf)
        )
        if self.clf_labels not in ("pool", "some"):
            return ClassifierLabels(targets=targets, ids=None, sizes=self.ranks.sizes(num_labels))
        sizes = self.ranks.sizes_among(clf_pool.pool_S, num_labels)
        first = sum(sizes[: self.ranks.rank])
        own_S = clf_pool.pool_S[first : first + sizes[self.ranks.rank]]
        device = self.device if self.settings.run.table_place == "device" else "cpu"  # the table's
        return ClassifierLabels(targets=targets, ids=to_device(own_S, device), sizes=sizes)

    def ahead(
        self, batches: list[np.ndarray], epoch: int, first: int, negatives: np.ndarray | None
    ) -> Iterator[Prepared]:
        """Yields an epoch's prepared batches from number `first` on. For a GPU a thread prepares
        the next batch while the current one is used.
        """
        numbers = range(first, len(batches))
        if self.device.type == "cpu":
            yield from (
                self.prepare(batches[number], epoch, number, negatives) for number in numbers
            )
            return
        with ThreadPoolExecutor(1) as thread:
            upcoming = None
            for number in numbers:
                prepared = (
                    upcoming.result()
                    if upcoming
                    else self.prepare(batches[number], epoch, number, negatives)
                )
                if number + 1 < len(batches):
                    upcoming = thread.submit(
                        self.prepare, batches[number + 1], epoch, number + 1, negatives
                    )
                yield prepared
