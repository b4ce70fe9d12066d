"""Draws the pool of labels on which the losses of a batch are computed (UniDEC, Algorithm 1).

Legend: B queries in a batch, S pool labels, P positive pairs in the pool, F filter pairs in the
pool, H mined hard negatives of a query, Q entries of some rows of a CSR matrix, R those that were
not sampled, C candidates, N all queries, L all labels.

No random state is kept: every draw is seeded by (seed, epoch, step), so a resumed run needs only
the two counters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
import scipy.sparse as sp

from unidec.data.csr import rows_of
from unidec.data.tokens import places

_POOL = 0  # stream of random numbers; `unidec.training.sampler` has others


def step_rng(seed: int, epoch: int, step: int, stream: int) -> np.random.Generator:
    """Random numbers of a step; different uses in the same (epoch, step) have different streams."""
    return np.random.default_rng([seed % 2**63, epoch, step, stream])


def num_clusters(num_rows: int, size: int) -> int:
    """Smallest power of two of clusters with at most `size` rows (`balanced_clusters`)."""
    return 2 ** max(-(-num_rows // size) - 1, 0).bit_length()


@dataclass(frozen=True, kw_only=True)
class TrainingPairs:
    """The training rows and their pairs with labels.

    Attributes:
        rows: int64 [n]; a row below the number of queries is a query, a later one the text of a
            label.
        relevance, filter_pairs: csr [rows, L]: positives, and pairs that must not become negatives.
        soft: whether relevances are soft targets; otherwise each positive counts the same.
        labels_are_texts: whether labels are numbered as the texts of training rows, not as the data
            set's labels.
    """

    rows: np.ndarray
    relevance: sp.csr_matrix
    filter_pairs: sp.csr_matrix
    soft: bool = False
    labels_are_texts: bool = False


@dataclass(frozen=True)
class PoolBatch:
    """A batch: its queries, its pool of labels, and the pairs between them as positions (sparse
    COO, row-major order).

    Attributes:
        rows_B: int64, data set rows of the queries, in batch order.
        pool_S: int64, label ids, each once, ascending.
        positive_row_P, positive_col_P: int64, positions in the batch and in the pool of all true
            positives in the pool (P_i ∩ L_B, sampled or not).
        sampled_P: bool, whether the label was sampled as a positive of this query.
        relevance_P: float32, stored relevance of the pair.
        num_positives_B: int64, |P_i|, positives of the query in the pool or not.
        ignored_row_F, ignored_col_F: int64, positions of the filter pairs that are not positives;
            they are not used as negatives.
    """

    rows_B: np.ndarray
    pool_S: np.ndarray
    positive_row_P: np.ndarray
    positive_col_P: np.ndarray
    sampled_P: np.ndarray
    relevance_P: np.ndarray
    num_positives_B: np.ndarray
    ignored_row_F: np.ndarray
    ignored_col_F: np.ndarray


def row_entries(matrix: sp.csr_matrix, rows_B: np.ndarray) -> tuple[np.ndarray, ...]:
    """Entries of some rows: batch positions int64 [Q], labels int64 [Q], values [Q]."""
    chosen = matrix[rows_B]
    return rows_of(chosen), chosen.indices.astype(np.int64), chosen.data


@dataclass(frozen=True)
class PoolSampler:
    """Draws the pool of a batch: sampled positives, hard negatives, and the pairs among queries and
    pool labels.

    For each query up to `beta` positives are drawn without replacement, uniformly or in proportion
    to label weights, and up to `eta` hard negatives uniformly from its shortlist, without its
    positives and filter pairs. A pool with a size limit takes sampled positives
    first, then hard negatives, then with `fill` further positives; within each group the labels
    that are most frequent in the batch first, ties at random.

    Attributes:
        relevance, filter_pairs: csr [N, L] in canonical format: positives, and pairs that must not
            become negatives.
        size: maximum labels of a pool; 0: no limit.
        fill: add the other positives of the batch's queries, as far as the size limit allows.
        weight_L: float [L], finite and above 0: the probability that a positive is drawn next,
            among the remaining ones of the query, is proportional to it (inverse propensities:
            tail labels more often); None: uniform.
    """

    relevance: sp.csr_matrix
    filter_pairs: sp.csr_matrix
    _: KW_ONLY
    beta: int
    eta: int
    size: int
    seed: int
    fill: bool = False
    weight_L: np.ndarray | None = None

    @property
    def num_labels(self) -> int:
        """L."""
        return self.relevance.shape[1]

    def batch(
        self,
        rows_B: np.ndarray,
        *,
        epoch: int,
        step: int,
        shortlist_NH: np.ndarray | None = None,
        up_to: int = 0,
        further: int = 0,
    ) -> PoolBatch:
        """Draw the pool of some queries at a step; the same arguments always return the same batch.

        Args:
            rows_B: int [B], data set rows.
            epoch, step: from 0; the step is unique within its epoch.
            shortlist_NH: int32 [N, H], mined labels by data set row, padded with -1; None: no hard
                negatives.
            up_to: add uniformly drawn labels until the pool has about this many, whatever the size
                limit; L or more: the pool is all labels.
            further: add up to this many further positives of each query, whatever the size limit
                (beta_C: UniDEC v1, appendix C, POS-CLF).
        """
        rows_B = np.asarray(rows_B, dtype=np.int64)
        rng = step_rng(self.seed, epoch, step, _POOL)
        row_Q, label_Q, relevance_Q = row_entries(self.relevance, rows_B)
        filter_row_Q, filter_label_Q, _ = row_entries(self.filter_pairs, rows_B)
        count_B = np.bincount(row_Q, minlength=len(rows_B))
        sampled_Q = self._sample_positives(row_Q, label_Q, self.beta, rng)
        # pairs as numbers
        key_Q = row_Q * self.num_labels + label_Q
        filter_key_Q = filter_row_Q * self.num_labels + filter_label_Q
        if up_to >= self.num_labels:
            pool_S = np.arange(self.num_labels)
        else:
            hard_C = np.empty(0, dtype=np.int64)
            if shortlist_NH is not None and self.eta and shortlist_NH.shape[1]:
                banned_Q = np.concatenate([key_Q, filter_key_Q])
                hard_C = self._sample_hard(shortlist_NH[rows_B], banned_Q, rng)
            groups = [label_Q[sampled_Q], hard_C]
            if self.fill:
                groups.append(label_Q[~sampled_Q])
            pool_S = self._choose_pool(groups, rng)
            if further:
                row_R, label_R = row_Q[~sampled_Q], label_Q[~sampled_Q]
                is_added_R = self._sample_positives(row_R, label_R, further, rng)
                pool_S = np.union1d(pool_S, label_R[is_added_R])
            missing = up_to - len(pool_S)
            if missing > 0:
                others_C = rng.choice(self.num_labels, missing, replace=False, shuffle=False)
                pool_S = np.union1d(pool_S, others_C)
        in_pool_Q = np.isin(label_Q, pool_S)
        # a filter pair that is a positive counts as a positive
        ignored_Q = np.isin(filter_label_Q, pool_S) & ~np.isin(filter_key_Q, key_Q)
        return PoolBatch(
            rows_B=rows_B,
            pool_S=pool_S,
            positive_row_P=row_Q[in_pool_Q],
            positive_col_P=np.searchsorted(pool_S, label_Q[in_pool_Q]),
            sampled_P=sampled_Q[in_pool_Q],
            relevance_P=relevance_Q[in_pool_Q].astype(np.float32, copy=False),
            num_positives_B=count_B,
            ignored_row_F=filter_row_Q[ignored_Q],
            ignored_col_F=np.searchsorted(pool_S, filter_label_Q[ignored_Q]),
        )

    def _sample_positives(
        self, row_Q: np.ndarray, label_Q: np.ndarray, most: int, rng: np.random.Generator
    ) -> np.ndarray:
        """Mask of at most `most` entries of each row, drawn without replacement, bool [Q].

        With weights, the entries of a row are ordered by exponential random times whose rates are
        the weights: each next entry is one of the remaining ones with a probability proportional to
        its weight (Efraimidis and Spirakis, 2006).
        """
        draw_Q = rng.random(len(row_Q))
        if self.weight_L is None:
            # row number + random fraction: one sort shuffles the entries of each row and keeps the
            # rows in order
            order_Q = np.argsort(row_Q + draw_Q)
        else:
            time_Q = -np.log1p(-draw_Q) / self.weight_L[label_Q]
            order_Q = np.lexsort((time_Q, row_Q))
        sampled_Q = np.zeros(len(row_Q), dtype=bool)
        sampled_Q[order_Q[places(np.bincount(row_Q)) < most]] = True
        return sampled_Q

    def _sample_hard(
        self, label_BH: np.ndarray, banned_Q: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """Labels sampled as hard negatives, at most eta for each row, int64 [C].

        Args:
            label_BH: the queries' shortlists. Lists from mining contain no banned pairs, but a
                method's may.
            banned_Q: pairs that must not be sampled, as row * L + label.
        """
        label_BH = label_BH.astype(np.int64)
        row_B1 = np.arange(len(label_BH))[:, None]
        is_banned_BH = np.isin(row_B1 * self.num_labels + label_BH, banned_Q)
        allowed_BH = (label_BH >= 0) & ~is_banned_BH
        key_BH = np.where(allowed_BH, rng.random(label_BH.shape), 2.0)
        if self.eta < label_BH.shape[1]:
            pick_BE = np.argpartition(key_BH, self.eta - 1, axis=1)[:, : self.eta]
            label_BH = label_BH[row_B1, pick_BE]
            allowed_BH = allowed_BH[row_B1, pick_BE]
        return label_BH[allowed_BH]

    def _choose_pool(self, groups: Sequence[np.ndarray], rng: np.random.Generator) -> np.ndarray:
        """Label ids of the pool, ascending: group after group, each cut to the remaining size."""
        if self.size == 0:
            return np.unique(np.concatenate(groups))
        pool_S = np.empty(0, dtype=np.int64)
        for group in groups:
            label_C, frequency_C = np.unique(group, return_counts=True)
            is_new_C = ~np.isin(label_C, pool_S)
            label_C = label_C[is_new_C]
            room = self.size - len(pool_S)
            if len(label_C) > room:
                # random ties: in the order of label ids the same labels would be left out of every
                # batch
                tie_C = rng.random(len(label_C))
                best_C = np.lexsort((tie_C, -frequency_C[is_new_C]))
                label_C = label_C[best_C[:room]]
            pool_S = np.union1d(pool_S, label_C)
        return pool_S
