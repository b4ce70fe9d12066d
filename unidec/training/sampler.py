"""Batches of queries, and the pool of labels on which each batch's losses are computed (UniDEC, Algorithm 1).

Legend: B queries in a batch, S pool labels, P positive pairs in the pool, F filter pairs in the pool, H mined hard
negatives of a query, Q entries gathered from a CSR matrix, C candidates, N all queries, L all labels.

Nothing keeps a random state: every draw comes from (seed, epoch, step), so a resumed run needs only those two counters.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

from unidec.errors import ConfigError, DataError

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
        positive_row_P: int64, position in the batch of each true positive in the pool (all of P_i ∩ L_B, sampled or
            not).
        positive_col_P: int64, its position in the pool.
        sampled_P: bool, the label was sampled as this query's own positive.
        relevance_P: float32, stored relevance of the pair.
        num_positives_B: int64, |P_i|: positives of the query, in the pool or not.
        ignored_row_F: int64, position in the batch of each filter pair in the pool that is not a positive: never a
            negative.
        ignored_col_F: int64, its position in the pool.
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


def _gather(matrix: sp.csr_matrix, rows_B: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Entries of some rows of a CSR matrix: (batch position int64 [Q], place in `indices` int64 [Q], entries a row
    int64 [B]).
    """
    start_B = matrix.indptr[rows_B].astype(np.int64)
    count_B = matrix.indptr[rows_B + 1] - start_B
    shift_B = start_B - np.cumsum(count_B) + count_B
    row_Q = np.repeat(np.arange(len(rows_B)), count_B)
    return row_Q, shift_B[row_Q] + np.arange(len(row_Q)), count_B


def _contains(sorted_keys: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Whether each key is among the ascending `sorted_keys`."""
    if not len(sorted_keys):
        return np.zeros(keys.shape, dtype=bool)
    place = np.searchsorted(sorted_keys, keys)
    return sorted_keys[np.minimum(place, len(sorted_keys) - 1)] == keys


def _canonical_csr(matrix: sp.csr_matrix) -> sp.csr_matrix:
    """The same matrix with rows sorted by label and each pair once; shares memory where it already is so."""
    # Plain arrays: fancy indexing of a np.memmap wraps every result again.
    parts = (np.asarray(matrix.data), np.asarray(matrix.indices), np.asarray(matrix.indptr))
    plain = sp.csr_matrix(parts, shape=matrix.shape, copy=False)
    if not plain.has_canonical_format:
        plain = plain.copy()
        plain.sum_duplicates()
    return plain


class PoolSampler:
    """Draws the pool of a batch: sampled positives, hard negatives, and the pairs among them.

    Up to `beta` positives a query without replacement, all alike or in proportion to a weight of the label, and `eta`
    hard negatives a query, uniformly from its shortlist; never one of its positives, never one of its filter pairs.
    With a size limit (detail 5 of the published implementations): sampled positives first, then hard
    negatives; within each, the most frequent in the batch first, ties at random.

    Args:
        relevance: csr [N, L], positive entries are the positives.
        filter_pairs: csr [N, L], pairs never to be used as negatives.
        beta: positives sampled a query, at least 1.
        eta: hard negatives sampled a query.
        size: at most so many labels in a pool; 0: no limit.
        seed: seed of every draw.
        full: the pool is all labels; `size` and `eta` are not used.
        weight_L: float [L], finite and above 0: of a query's positives that are left, each is the next one drawn with
            a chance in proportion to its weight (inverse propensities: tail labels more often); None: all alike.

    Raises:
        DataError: the matrices differ in shape, or a relevance or weight is not positive and finite.
        ConfigError: beta < 1, or eta or size below 0.
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
        full: bool = False,
        weight_L: np.ndarray | None = None,
    ) -> None:
        if relevance.shape != filter_pairs.shape:
            raise DataError(
                "relevance and filter pairs differ in shape", got=filter_pairs.shape, expected=relevance.shape
            )
        if beta < 1 or eta < 0 or size < 0:
            raise ConfigError(
                "pool parameters out of range", where="pool", got=f"beta {beta}, eta {eta}, size {size}",
                expected="beta >= 1, eta >= 0, size >= 0",
            )  # fmt: skip
        self.relevance = _canonical_csr(relevance)
        self.filter_pairs = _canonical_csr(filter_pairs)
        if not (np.isfinite(self.relevance.data).all() and (self.relevance.data > 0).all()):
            raise DataError("relevance must hold positive, finite values only", fix="drop the other pairs at ingest")
        self.num_queries, self.num_labels = self.relevance.shape
        self.beta, self.eta, self.size, self.seed = beta, eta, size, seed
        self.full = full
        self.weight_L = None if weight_L is None else _checked_weights(weight_L, self.num_labels)
        self._position_L = np.full(self.num_labels, -1, dtype=np.int32)
        self._all_labels = np.arange(self.num_labels) if full else None

    def batch(self, rows_B: np.ndarray, *, epoch: int, step: int, shortlist_NH: np.ndarray | None) -> PoolBatch:
        """The pool of some queries at a step; the same arguments always give the same batch.

        Args:
            rows_B: int [B], data set rows.
            epoch: current epoch, from 0.
            step: current step; unique within an epoch.
            shortlist_NH: int32 [N, H] mined labels by data set row, -1 where there is none; or None: no hard negatives.
        """
        rows_B = np.asarray(rows_B, dtype=np.int64)
        rng = _rng(self.seed, epoch, step, _POOL)
        row_Q, place_Q, count_B = _gather(self.relevance, rows_B)
        label_Q = self.relevance.indices[place_Q].astype(np.int64)
        filter_row_Q, filter_place_Q, _ = _gather(self.filter_pairs, rows_B)
        filter_label_Q = self.filter_pairs.indices[filter_place_Q].astype(np.int64)

        sampled_Q = self._sample_positives(row_Q, label_Q, count_B, rng)
        if self._all_labels is not None:
            pool_S = self._all_labels
        else:
            hard_C = self._sample_hard(rows_B, shortlist_NH, row_Q, label_Q, filter_row_Q, filter_label_Q, rng)
            pool_S = self._choose_pool(label_Q, sampled_Q, hard_C, rng)

        position_L = self._position_L
        try:
            position_L[pool_S] = np.arange(len(pool_S), dtype=np.int32)
            col_Q, filter_col_Q = position_L[label_Q], position_L[filter_label_Q]
        finally:
            position_L[pool_S] = -1
        kept_Q = np.flatnonzero(col_Q >= 0)
        positive_row_P, positive_col_P = row_Q[kept_Q], col_Q[kept_Q].astype(np.int64)
        kept_F = filter_col_Q >= 0
        ignored_row_F, ignored_col_F = filter_row_Q[kept_F], filter_col_Q[kept_F].astype(np.int64)
        width = max(len(pool_S), 1)
        negative_F = ~_contains(positive_row_P * width + positive_col_P, ignored_row_F * width + ignored_col_F)
        return PoolBatch(
            rows_B=rows_B,
            pool_S=pool_S,
            positive_row_P=positive_row_P,
            positive_col_P=positive_col_P,
            sampled_P=sampled_Q[kept_Q],
            relevance_P=self.relevance.data[place_Q[kept_Q]].astype(np.float32, copy=False),
            num_positives_B=count_B,
            ignored_row_F=ignored_row_F[negative_F],
            ignored_col_F=ignored_col_F[negative_F],
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
        first_B = np.cumsum(count_B) - count_B
        rank_Q = np.arange(len(row_Q)) - first_B[row_Q]
        sampled_Q = np.zeros(len(row_Q), dtype=bool)
        sampled_Q[order_Q[rank_Q < self.beta]] = True
        return sampled_Q

    def _sample_hard(
        self,
        rows_B: np.ndarray,
        shortlist_NH: np.ndarray | None,
        row_Q: np.ndarray,
        label_Q: np.ndarray,
        filter_row_Q: np.ndarray,
        filter_label_Q: np.ndarray,
        rng: np.random.Generator,
    ) -> np.ndarray:
        """Labels sampled as hard negatives, at most eta a row, none of them a positive or filter pair of that row:
        int64 [C].
        """
        if shortlist_NH is None or self.eta == 0 or shortlist_NH.shape[1] == 0:
            return np.empty(0, dtype=np.int64)
        if shortlist_NH.shape[0] != self.num_queries:
            raise DataError(
                "the shortlist has another number of rows", got=len(shortlist_NH), expected=self.num_queries
            )
        label_BH = shortlist_NH[rows_B].astype(np.int64)
        row_B1 = np.arange(len(rows_B))[:, None]
        # Mined lists hold no positives when fresh; checked again, since a list outlives the mining that wrote it.
        banned_Q = np.concatenate([row_Q * self.num_labels + label_Q, filter_row_Q * self.num_labels + filter_label_Q])
        allowed_BH = (label_BH >= 0) & self._not_banned(label_BH, row_B1, banned_Q)
        key_BH = np.where(allowed_BH, rng.random(label_BH.shape), 2.0)
        if self.eta < label_BH.shape[1]:
            pick_BE = np.argpartition(key_BH, self.eta - 1, axis=1)[:, : self.eta]
            label_BH, allowed_BH = label_BH[row_B1, pick_BE], allowed_BH[row_B1, pick_BE]
        return label_BH[allowed_BH]

    def _not_banned(self, label_BH: np.ndarray, row_B1: np.ndarray, banned_Q: np.ndarray) -> np.ndarray:
        """Whether (row, label) is outside the banned keys `row * L + label`; labels that no banned pair has are
        passed cheaply.
        """
        position_L, banned_label_Q = self._position_L, banned_Q % self.num_labels
        try:
            position_L[banned_label_Q] = 0
            suspect_BH = (position_L[label_BH] == 0) & (label_BH >= 0)
        finally:
            position_L[banned_label_Q] = -1
        result_BH = np.ones(label_BH.shape, dtype=bool)
        result_BH[suspect_BH] = ~_contains(np.sort(banned_Q), (row_B1 * self.num_labels + label_BH)[suspect_BH])
        return result_BH

    def _choose_pool(
        self, label_Q: np.ndarray, sampled_Q: np.ndarray, hard_C: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """Label ids of the pool, ascending; groups by priority, each cut to the room that is left."""
        groups = [label_Q[sampled_Q], hard_C]
        if self.size == 0:
            return np.unique(np.concatenate(groups))
        pool_S = np.empty(0, dtype=np.int64)
        for group in groups:
            label_C, frequency_C = np.unique(group, return_counts=True)
            new_C = ~_contains(pool_S, label_C)
            label_C, frequency_C = label_C[new_C], frequency_C[new_C]
            room = self.size - len(pool_S)
            if len(label_C) > room:
                # Ties at random: by label id, the same labels would lose in every batch.
                best_C = np.lexsort((rng.random(len(label_C)), -frequency_C))[:room]
                label_C = label_C[best_C]
            pool_S = np.sort(np.concatenate([pool_S, label_C]))
        return pool_S


def random_batches(rows: np.ndarray, batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Shuffled batches of at most `batch_size` rows whose sizes differ by at most one: ceil(n / batch_size) int64
    arrays.
    """
    if batch_size < 1:
        raise ConfigError("a batch needs at least one query", where="pool.batch_size", got=batch_size)
    rows = np.asarray(rows, dtype=np.int64)
    if not len(rows):
        return []
    shuffled = _rng(seed, epoch, 0, _RANDOM_BATCHES).permutation(rows)
    return np.array_split(shuffled, -(-len(rows) // batch_size))


def num_clusters(num_rows: int, size: int) -> int:
    """2^depth with the smallest depth that leaves at most `size` rows in a cluster (as `balanced_clusters` cuts)."""
    return 2 ** max(-(-num_rows // size) - 1, 0).bit_length() if num_rows else 1


def clustered_batches(
    order: np.ndarray, offsets: np.ndarray, seed: int, epoch: int, num_batches: int | None = None
) -> list[np.ndarray]:
    """One batch a cluster, or several whole clusters a batch, in random order; empty batches are left out.

    Args:
        order: int [n], members, cluster after cluster. `balanced_clusters` gives positions in what was clustered:
            pass `rows[order]`.
        offsets: int [C + 1], where each cluster begins in `order`.
        seed: seed of the order.
        epoch: each epoch has its own order.
        num_batches: with more clusters than this they are dealt to so many batches at random; sizes of batches then
            differ by at most one where those of clusters do. None: a batch a cluster.
    """
    order, offsets = np.asarray(order, dtype=np.int64), np.asarray(offsets, dtype=np.int64)
    clusters = _rng(seed, epoch, 0, _CLUSTER_ORDER).permutation(len(offsets) - 1)
    if num_batches is not None and num_batches < len(clusters):
        # dealt in turn, larger ones first: each batch gets its even share of both sizes
        dealt = clusters[np.argsort(-np.diff(offsets)[clusters], kind="stable")]
        of_batch = [dealt[number::num_batches] for number in range(num_batches)]
        batches = [np.concatenate([order[offsets[c] : offsets[c + 1]] for c in some]) for some in of_batch]
        return [batch for batch in batches if len(batch)]
    return [order[offsets[c] : offsets[c + 1]] for c in clusters if offsets[c + 1] > offsets[c]]


def _checked_weights(weight_L: np.ndarray, num_labels: int) -> np.ndarray:
    weight_L = np.asarray(weight_L, dtype=np.float64)
    if weight_L.shape != (num_labels,) or not (np.isfinite(weight_L).all() and (weight_L > 0).all()):
        raise DataError(
            "weights of labels must be positive and finite, one a label", where="pool.positives",
            got=f"shape {list(weight_L.shape)}", expected=f"{num_labels} values above 0",
        )  # fmt: skip
    return weight_L
