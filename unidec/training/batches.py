"""Prepares the batches of training steps: draws a pool for some queries, and puts pairs and texts
on the device.

Legend: B queries in a batch, S pool labels, N queries of the data set, L labels, F ignored pairs, P
positive pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from unidec.config import TrainingSettings
from unidec.cores import in_order
from unidec.data.dataset import XMCDataset
from unidec.data.propensity import inverse_propensity, label_counts
from unidec.data.tokens import TokenCache
from unidec.errors import DataError
from unidec.model.additions import NO_ROWS, Drawn, Methods
from unidec.model.batch import ClassifierLabels, Prepared, TextCounts
from unidec.model.encoder_inputs import InputBuilder
from unidec.model.losses import BY_COLUMNS
from unidec.model.pairs import PoolTargets, to_device
from unidec.model.pool import PoolBatch, PoolSampler, TrainingPairs
from unidec.training.distributed import ALONE, Ranks
from unidec.training.gradient_cache import TextParts, cut_texts
from unidec.training.own_columns import OwnColumns
from unidec.training.sampler import Labels, encoded_labels, head_labels, weighs_by_propensity

AHEAD = 2  # batches that are prepared for a GPU before the current one is done


def query_pairs(dataset: XMCDataset) -> TrainingPairs:
    """The training queries and their pairs. Raises DataError: no training query has a positive."""
    rows = dataset.rows("train")
    if not np.diff(dataset.relevance.indptr)[rows].any():
        raise DataError(
            "nothing to train on: no training query has a positive",
            where=dataset.path,
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
    """The texts of training rows: queries, followed by labels.

    Attributes:
        tokens: token caches "queries" and "labels".
    """

    tokens: dict[str, TokenCache]

    @property
    def num_queries(self) -> int:
        """N."""
        return len(self.tokens["queries"])

    def parts(self, rows: np.ndarray) -> TextParts:
        """Texts of training rows; `rows` must have rows of queries first, then rows of labels."""
        is_query = rows < self.num_queries
        return self.of_queries(rows[is_query]) + self.of_labels(rows[~is_query] - self.num_queries)

    def of_queries(self, rows: np.ndarray) -> TextParts:
        """Texts of queries."""
        return [("queries", self.tokens["queries"], rows)]

    def of_labels(self, labels: np.ndarray) -> TextParts:
        """Texts of labels; none for no labels."""
        return [("labels", self.tokens["labels"], labels)] if len(labels) else []


@dataclass
class Batches:
    """Prepares batches from row numbers of training rows.

    Attributes:
        pairs: the training rows and their pairs.
        build: puts texts on the device; device: the targets' device.
        inverse_L: float64 [L], from `inverse_propensities`.
    """

    settings: TrainingSettings
    texts: TrainingTexts
    pairs: TrainingPairs
    methods: Methods
    _: KW_ONLY
    build: InputBuilder
    device: torch.device
    ranks: Ranks = ALONE
    inverse_L: np.ndarray | None = None

    @cached_property
    def sampler(self) -> PoolSampler:
        """Draws pools of labels."""
        pool = self.settings.pool
        return PoolSampler(
            self.pairs.relevance,
            self.pairs.filter_pairs,
            beta=pool.beta,
            eta=pool.eta,
            size=pool.size,
            seed=self.settings.seed,
            fill=pool.fill,
            weight_L=self.inverse_L if pool.positives == "tail" else None,
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
        return "all" if 2 * self._num_some >= self.sampler.num_labels else "some"

    @property
    def _num_some(self) -> int:
        """Number of labels "some"."""
        number = self.settings.pool.clf_labels
        return number if isinstance(number, int) else 0

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
        own_labels = self.ranks.own(drawn.encoded)
        texts, counts = self._texts(drawn, own_labels, further)
        chunk = self.settings.optim.encode_chunk
        losses = self.settings.loss
        targets = self._targets(drawn.pool)
        clf_targets = targets if drawn.clf_pool is drawn.pool else self._targets(drawn.clf_pool)
        clf_targets = self._in_columns(clf_targets, drawn.clf_pool, self.clf_labels, losses.clf)
        return Prepared(
            pool=drawn.pool,
            targets=self._in_columns(targets, drawn.pool, self.de_labels, losses.de),
            clf=self._classifier(drawn.clf_pool, clf_targets),
            texts=cut_texts(texts, self.build, chunk, self.device) if chunk else self.build(texts),
            counts=counts,
            own_labels=to_device(own_labels, self.device) if self.methods.reads_labels else None,
            added=added,
        )

    def _draw(
        self, rows_B: np.ndarray, epoch: int, step: int, negatives: np.ndarray | None
    ) -> Drawn:
        settings = self.settings
        num_labels = self.sampler.num_labels

        def draw(labels: Labels, further: int = 0) -> PoolBatch:
            up_to = {"some": self._num_some, "all": num_labels}.get(labels, 0)
            return self.sampler.batch(
                rows_B,
                epoch=epoch,
                step=step,
                shortlist_NH=negatives,
                up_to=up_to,
                further=further,
            )

        labels: Labels = "all" if self.de_labels == "all" else "pool"
        pool = draw(labels)
        further = settings.pool.clf_beta
        same = self.clf_labels == "none" or (self.clf_labels == labels and not further)
        rows_hold_text = self.methods.rows.holds_text
        encodes = encoded_labels(settings.model, settings.pool, rows_hold_text) != "none"
        return Drawn(
            pool=pool,
            clf_pool=pool if same else draw(self.clf_labels, further),
            encoded=pool.pool_S if encodes else NO_ROWS,
            seed=settings.seed,
            epoch=epoch,
            step=step,
            device=self.device,
        )

    def _texts(
        self, drawn: Drawn, own_labels: np.ndarray, further: np.ndarray
    ) -> tuple[TextParts, TextCounts]:
        """The texts that this rank encodes, and the counts of all ranks' texts."""
        texts = self.texts
        label_texts = texts.parts if self.pairs.labels_are_texts else texts.of_labels
        others = texts.of_queries(further) if len(further) else []
        queries = texts.parts(drawn.pool.rows_B)
        own_rows = self.ranks.own(drawn.pool.rows_B)
        own_queries = texts.parts(own_rows)
        if self.methods.texts is not None:
            # drawn for the queries of all ranks, so that their number does not matter
            source, tokens, places = self.methods.texts.apply(queries, drawn)
            own_queries = [(source, tokens, self.ranks.own(places))]
        own_texts = own_queries + label_texts(own_labels) + others
        all_texts = queries + label_texts(drawn.encoded) + others
        lengths = [tokens.lengths(rows) for _, tokens, rows in all_texts]
        counts = TextCounts(
            own_queries=len(own_rows),
            texts=sum(len(each) for each in lengths),
            tokens=sum(int(each.sum()) for each in lengths),
        )
        return own_texts, counts

    def _targets(self, pool: PoolBatch) -> PoolTargets:
        weighted = self.settings.loss.weights == "propensity"
        importance_L = self.inverse_L if weighted else None
        return PoolTargets.from_batch(
            pool, self.device, soft=self.pairs.soft, importance_L=importance_L
        )

    def _in_columns(
        self, targets: PoolTargets, pool: PoolBatch, labels: Labels, loss: str
    ) -> PoolTargets:
        """Targets of a head, with the labels that this rank scores as columns of the logits."""
        if self.ranks.alone or labels != "all" or loss not in BY_COLUMNS:
            return targets
        begin, end = self.ranks.part(self.sampler.num_labels)

        def own(column: np.ndarray) -> Tensor:
            is_own = (begin <= column) & (column < end)
            return to_device(np.flatnonzero(is_own), self.device)

        columns = OwnColumns(
            ranks=self.ranks,
            first=begin,
            num_columns=self.sampler.num_labels,
            own_P=own(pool.positive_col_P),
            own_F=own(pool.ignored_col_F),
            num_pairs=len(pool.positive_col_P),
        )
        return replace(targets, columns=columns)

    def _classifier(self, clf_pool: PoolBatch, targets: PoolTargets) -> ClassifierLabels:
        num_labels = self.sampler.num_labels
        if self.clf_labels not in ("pool", "some"):
            return ClassifierLabels(targets=targets, ids=None, sizes=self.ranks.sizes(num_labels))
        sizes = self.ranks.sizes_among(clf_pool.pool_S, num_labels)
        begin, end = np.searchsorted(clf_pool.pool_S, self.ranks.part(num_labels))
        # on the table's device
        device = self.device if self.settings.run.table_place == "device" else "cpu"
        ids = to_device(clf_pool.pool_S[begin:end], device)
        return ClassifierLabels(targets=targets, ids=ids, sizes=sizes)

    def ahead(
        self, batches: list[np.ndarray], epoch: int, first: int, negatives: np.ndarray | None
    ) -> Iterator[Prepared]:
        """Yields an epoch's prepared batches from number `first` on. For a GPU a thread prepares
        the next `AHEAD` batches while the current one is used, and copies them from pinned memory.
        """

        def prepare(number: int) -> Prepared:
            return self.prepare(batches[number], epoch, number, negatives)

        numbers = range(first, len(batches))
        if self.device.type == "cpu":
            yield from map(prepare, numbers)
            return
        with ThreadPoolExecutor(1) as thread:
            futures = (thread.submit(prepare, number) for number in numbers)
            yield from in_order(futures, 1 + AHEAD)
