"""Batches of queries, and the pool of labels on which each batch's losses are computed (UniDEC, Algorithm 1).

Legend: B queries in a batch, S pool labels, P positive pairs in the pool, F filter pairs in the pool, H mined hard
negatives of a query, Q entries of some rows of a CSR matrix, C candidates, N all queries, L all labels.

Nothing keeps a random state: every draw comes from (seed, epoch, step), so a resumed run needs only those two counters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy.sparse as sp

from unidec.sections import Loss, Model, Pool

# A stream of random numbers each: the same (epoch, step) never gives two uses the same numbers.
_POOL, _RANDOM_BATCHES, _CLUSTER_ORDER = 0, 1, 2


def _rng(seed: int, epoch: int, step: int, stream: int) -> np.random.Generator:
    return np.random.default_rng([seed % 2**63, epoch, step, stream])


@dataclass(frozen=True)
class PoolBatch:
    """One batch: its queries, its pool of labels, and the pairs between them as positions (sparse COO, row-major
    order).

    Attributes:
        rows_B: int64, data set rows of the queries, in batch order.
        pool_S: int64, label ids, each once, ascending.
        positive_row_P, positive_col_P: int64, position in the batch and in the pool of each true positive in the pool
            (all of P_i ∩ L_B, sampled or not).
        sampled_P: bool, the label was sampled as this query's own positive.
        relevance_P: float32, stored relevance of the pair.
        num_positives_B: int64, |P_i|: positives of the query, in the pool or not.
        ignored_row_F, ignored_col_F: int64, the same of each filter pair that is not a positive: never a negative.
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


def row_entries(matrix: sp.csr_matrix, rows_B: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Entries of some rows of a CSR matrix: batch positions int64 [Q], labels int64 [Q], values [Q]."""
    chosen = matrix[rows_B]
    return np.repeat(np.arange(len(rows_B)), np.diff(chosen.indptr)), chosen.indices.astype(np.int64), chosen.data


def contains(sorted_keys: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Whether each key is among the ascending `sorted_keys`."""
    if not len(sorted_keys):
        return np.zeros(keys.shape, dtype=bool)
    place = np.searchsorted(sorted_keys, keys)
    return sorted_keys[np.minimum(place, len(sorted_keys) - 1)] == keys


class PoolSampler:
    """Draws the pool of a batch: sampled positives, hard negatives, and the pairs among them.

    Up to `beta` positives a query without replacement, all alike or in proportion to a weight of the label, and `eta`
    hard negatives a query, uniformly from its shortlist; never one of its positives, never one of its filter pairs.
    With a size limit (detail 5 of the published implementations): sampled positives first, then hard negatives, then
    with `fill` further positives; within each, the most frequent in the batch first, ties at random.

    Args:
        relevance, filter_pairs: csr [N, L] in canonical format, the positives, and pairs never to be used as negatives.
        size: at most so many labels in a pool; 0: no limit.
        fill: the other positives of the batch's queries take the room that is left; without a limit all of them do.
        weight_L: float [L], finite and above 0: each of a query's positives that are left is the next one drawn with a
            chance in proportion to its weight (inverse propensities: tail labels more often); None: all alike.
    """

    def __init__(
        self,
        relevance: sp.csr_matrix,
        filter_pairs: sp.csr_matrix,
        *,
        beta: int,
        eta: int,
        size: int,
        seed: int,
        fill: bool = False,
        weight_L: np.ndarray | None = None,
    ) -> None:
        self.relevance, self.filter_pairs, self.num_labels = relevance, filter_pairs, relevance.shape[1]
        self.beta, self.eta, self.size, self.seed, self.weight_L = beta, eta, size, seed, weight_L
        self.fill = fill

    def batch(
        self,
        rows_B: np.ndarray,
        *,
        epoch: int,
        step: int,
        shortlist_NH: np.ndarray | None = None,
        up_to: int = 0,
    ) -> PoolBatch:
        """The pool of some queries at a step; the same arguments always give the same batch.

        Args:
            rows_B: int [B], data set rows.
            epoch, step: from 0; the step is unique within its epoch.
            shortlist_NH: int32 [N, H] mined labels by data set row, -1 where there is none; or None: no hard negatives.
            up_to: other labels, all alike, are drawn into the pool until it has about so many, whatever the limit; from
                L on it is all labels.
        """
        rows_B = np.asarray(rows_B, dtype=np.int64)
        rng = _rng(self.seed, epoch, step, _POOL)
        row_Q, label_Q, relevance_Q = row_entries(self.relevance, rows_B)
        filter_row_Q, filter_label_Q, _ = row_entries(self.filter_pairs, rows_B)
        count_B = np.bincount(row_Q, minlength=len(rows_B))
        sampled_Q = self._sample_positives(row_Q, label_Q, count_B, rng)
        if up_to >= self.num_labels:
            pool_S = np.arange(self.num_labels)
        else:
            banned_Q = np.concatenate([row_Q, filter_row_Q]) * self.num_labels
            banned_Q += np.concatenate([label_Q, filter_label_Q])
            hard_C = self._sample_hard(rows_B, shortlist_NH, banned_Q, rng)
            further_C = label_Q[~sampled_Q] if self.fill else label_Q[:0]
            pool_S = self._choose_pool((label_Q[sampled_Q], hard_C, further_C), rng)
            if up_to > len(pool_S):
                others_C = rng.choice(self.num_labels, up_to - len(pool_S), replace=False, shuffle=False)
                pool_S = np.union1d(pool_S, others_C)
        kept_Q = contains(pool_S, label_Q)
        # a pair that is filtered and a positive is a positive
        kept_F = contains(pool_S, filter_label_Q) & ~contains(
            row_Q * self.num_labels + label_Q, filter_row_Q * self.num_labels + filter_label_Q
        )
        return PoolBatch(
            rows_B=rows_B,
            pool_S=pool_S,
            positive_row_P=row_Q[kept_Q],
            positive_col_P=np.searchsorted(pool_S, label_Q[kept_Q]),
            sampled_P=sampled_Q[kept_Q],
            relevance_P=relevance_Q[kept_Q].astype(np.float32, copy=False),
            num_positives_B=count_B,
            ignored_row_F=filter_row_Q[kept_F],
            ignored_col_F=np.searchsorted(pool_S, filter_label_Q[kept_F]),
        )

    def _sample_positives(
        self, row_Q: np.ndarray, label_Q: np.ndarray, count_B: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """Marks at most beta entries a row, without replacement: bool [Q].

        With weights the entries of a row are ordered by exponential times whose rates are the weights: the first is an
        entry with a chance in proportion to its weight, the next is so among the rest (Efraimidis and Spirakis, 2006).
        """
        draw_Q = rng.random(len(row_Q))
        if self.weight_L is None:
            # Row number + a random fraction: one sort shuffles each row within itself, rows staying in order.
            order_Q = np.argsort(row_Q + draw_Q)
        else:
            order_Q = np.lexsort((-np.log1p(-draw_Q) / self.weight_L[label_Q], row_Q))
        rank_Q = np.arange(len(row_Q)) - (np.cumsum(count_B) - count_B)[row_Q]
        sampled_Q = np.zeros(len(row_Q), dtype=bool)
        sampled_Q[order_Q[rank_Q < self.beta]] = True
        return sampled_Q

    def _sample_hard(
        self, rows_B: np.ndarray, shortlist_NH: np.ndarray | None, banned_Q: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """Labels sampled as hard negatives, at most eta a row, int64 [C]; `banned_Q` are pairs as row * L + label."""
        if shortlist_NH is None or self.eta == 0 or shortlist_NH.shape[1] == 0:
            return np.empty(0, dtype=np.int64)
        label_BH = shortlist_NH[rows_B].astype(np.int64)
        row_B1 = np.arange(len(rows_B))[:, None]
        # Mined lists hold no positives when fresh; checked again, since a list outlives the mining that wrote it.
        allowed_BH = (label_BH >= 0) & ~contains(np.sort(banned_Q), row_B1 * self.num_labels + label_BH)
        key_BH = np.where(allowed_BH, rng.random(label_BH.shape), 2.0)
        if self.eta < label_BH.shape[1]:
            pick_BE = np.argpartition(key_BH, self.eta - 1, axis=1)[:, : self.eta]
            label_BH, allowed_BH = label_BH[row_B1, pick_BE], allowed_BH[row_B1, pick_BE]
        return label_BH[allowed_BH]

    def _choose_pool(self, groups: Sequence[np.ndarray], rng: np.random.Generator) -> np.ndarray:
        """Label ids of the pool, ascending: group after group, each cut to the room that is left."""
        if self.size == 0:
            return np.unique(np.concatenate(groups))
        pool_S = np.empty(0, dtype=np.int64)
        for group in groups:
            label_C, frequency_C = np.unique(group, return_counts=True)
            new_C = ~contains(pool_S, label_C)
            label_C, frequency_C = label_C[new_C], frequency_C[new_C]
            room = self.size - len(pool_S)
            if len(label_C) > room:
                # Ties at random: by label id, the same labels would lose in every batch.
                best_C = np.lexsort((rng.random(len(label_C)), -frequency_C))[:room]
                label_C = label_C[best_C]
            pool_S = np.sort(np.concatenate([pool_S, label_C]))
        return pool_S


def random_batches(rows: np.ndarray, batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """ceil(n / batch_size) shuffled batches, int64, whose sizes differ by at most one."""
    shuffled = _rng(seed, epoch, 0, _RANDOM_BATCHES).permutation(np.asarray(rows, dtype=np.int64))
    return np.array_split(shuffled, -(-len(rows) // batch_size))


def queries_a_batch(pool: Pool, num_rows: int) -> int:
    """Queries of the largest batch: `pool.batch_size`, or with `pool.batch_fit: least` the smallest N / 2^depth,
    rounded up, that is not below it (spec, detail 7: published 1,152 on 131K and 1,098 on 1.3M are such numbers)."""
    if pool.batch_fit == "most" or pool.batches == "random":
        return pool.batch_size
    depth = max(num_rows // pool.batch_size, 1).bit_length() - 1
    return -(-num_rows // 2**depth)


def clustered_batches(
    order: np.ndarray, offsets: np.ndarray, seed: int, epoch: int, num_batches: int
) -> list[np.ndarray]:
    """Whole clusters, one or several a batch, in an order of the epoch's own; empty batches are left out.

    Args:
        order: int [n], data set rows, cluster after cluster; offsets: int [C + 1], where each begins.
        num_batches: with more clusters than this they are dealt to so many batches at random; sizes of batches then
            differ by at most one where those of clusters do.
    """
    order, offsets = np.asarray(order, dtype=np.int64), np.asarray(offsets, dtype=np.int64)
    clusters = _rng(seed, epoch, 0, _CLUSTER_ORDER).permutation(len(offsets) - 1)
    groups = list(clusters[:, None])
    if num_batches < len(clusters):
        # dealt in turn, larger ones first: each batch gets its even share of both sizes
        dealt = clusters[np.argsort(-np.diff(offsets)[clusters], kind="stable")]
        groups = [dealt[number::num_batches] for number in range(num_batches)]
    batches = [np.concatenate([order[offsets[c] : offsets[c + 1]] for c in group]) for group in groups]
    return [batch for batch in batches if len(batch)]


Labels = Literal["none", "pool", "some", "all"]  # some: the pool, and others drawn alike


def head_labels(model: Model, pool: Pool) -> tuple[Labels, Labels]:
    """Labels in the dual encoder's loss, and in the classifier's; "none" for a head that the model does not have."""
    of_clf: Labels = "some" if isinstance(pool.clf_labels, int) else pool.clf_labels
    return "none" if model.heads == "clf" else pool.de_labels, "none" if model.heads == "de" else of_clf


def draws_pools(model: Model, pool: Pool) -> bool:
    """Whether a loss runs over a pool: hard negatives are mined for nothing else."""
    return not {"pool", "some"}.isdisjoint(head_labels(model, pool))


def encoded_labels(model: Model, pool: Pool) -> Labels:
    """Labels whose texts a step encodes: the dual encoder's; else those whose classifier rows hold their text."""
    de, clf = head_labels(model, pool)
    return clf if de == "none" and model.clf_residual else de


def weighs_by_propensity(loss: Loss, pool: Pool) -> bool:
    """Whether inverse propensities of labels weight losses or the draw of positives."""
    return loss.weights == "propensity" or pool.positives == "tail"
