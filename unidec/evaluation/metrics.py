"""Ranking metrics, overall and by label frequency, vectorised over CSR matrices.

Shape legend: B queries of one block, N all queries, K predicted labels per query, L labels, E
positive (query, label) pairs.

Definitions. Relevance above 0 counts as relevant; predictions are label ids, best first, -1 = none
(a miss at that rank). Every metric is a percentage, 100 * sum(above) / sum(below), where above and
below are each query's contributions to numerator and denominator (`by_query`). With P_i = the
relevant labels of query i, y_ij = 1 if the label predicted at rank j is in P_i, w_l = inverse
propensity, d_j = 1 / log2(j + 1), D(n) = d_1 + ... + d_n:

- P@k      mean over all queries of sum_{j<=k} y_ij / k
- R@k      mean of sum_{j<=k} y_ij / |P_i|
- nDCG@k   mean of sum_{j<=k} d_j y_ij / D(min(k, |P_i|))
- MRR      mean of 1 / rank of the first relevant label among the first 100, 0 if there is none
- PSP@k    sum_i sum_{j<=k} w y_ij, divided by the largest sum that any prediction could reach
  (ratio of data-set sums)
- PSnDCG@k sum_i sum_{j<=k} d_j w y_ij / D(min(k, |P_i|)), divided by the largest value that any
  prediction could reach
- coverage@k  share of the labels relevant to any query that are predicted correctly within k at
  least once

Queries without a relevant label count as 0 in every mean. Sources: Bhatia et al., the extreme
classification repository (P, nDCG, PSP, PSnDCG), Jain et al. 2016 (propensities). The repository's
page divides PSDCG@k by D(k), but its published programs divide by D(min(k, |P_i|)), as nDCG does.
So does this module, because published figures come from these programs.

By group (tail, torso, head): truth is restricted to the group's labels, predictions keep their
ranks. P@k is then that group's contribution, over all queries, so the three groups add up to the
whole. R@k, nDCG@k and MRR are means over the queries that have a relevant label in the group (their
number is `<group>/num_queries`). PSP@k, PSnDCG@k and coverage@k use the restricted truth above and
below the line. A group without relevant labels gives 0.

The truth must be filtered: `remove_filtered` removes filtered pairs from predictions,
`filtered_truth` from the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from unidec.data.chunks import blocks
from unidec.data.csr import keys_of, ones_at
from unidec.data.tokens import Bools, Ints
from unidec.errors import DataError
from unidec.metric_names import DEFAULT_KS, GROUPS, metric_names, parse

_NO_RANK = np.iinfo(np.int64).max
_BLOCK = 8192  # queries per block: bounds the temporaries at some 100 bytes x block x K
_RECIPROCAL_RANK = max(DEFAULT_KS)  # ranks that MRR considers

Floats = NDArray[np.float64]
QueryParts = dict[str, tuple[Floats, Floats]]
"""Metric -> each query's contributions (above [N], below [N]), see the module docstring."""


def pair_keys(matrix: csr_matrix, positive_only: bool = False) -> Ints:
    """Stored pairs of a CSR matrix as sorted, unique int64 keys `row * columns + column`."""
    key_E = keys_of(matrix)
    if positive_only:
        key_E = key_E[np.asarray(matrix.data) > 0]
    return np.unique(key_E)


def _lookup(label_BK: Ints, key_E: Ints, num_labels: int) -> Bools:
    """Whether each (row, label) is among the sorted keys; False for label -1."""
    if key_E.size == 0 or label_BK.size == 0:
        return np.zeros(label_BK.shape, dtype=bool)
    row_B = np.arange(len(label_BK), dtype=np.int64)
    wanted_BK = row_B[:, None] * num_labels + label_BK
    place_BK = np.searchsorted(key_E, wanted_BK).clip(max=key_E.size - 1)
    return (key_E[place_BK] == wanted_BK) & (label_BK >= 0)


def _check_predictions(predicted: Any, truth: csr_matrix, num_labels: int) -> Ints:
    """Predictions as int64 [B, K]; a DataError names the first invalid row."""
    label_BK = np.asarray(predicted)
    if label_BK.ndim != 2 or (label_BK.size and label_BK.dtype.kind not in "iu"):
        raise DataError(
            "predictions must be a matrix of label ids",
            got=f"shape {label_BK.shape}, dtype {label_BK.dtype}",
            expected="[queries, k] integers, -1 = none",
        )
    label_BK = label_BK.astype(np.int64, copy=False)
    if truth.shape != (len(label_BK), num_labels):
        raise DataError(
            "predictions and relevance do not fit together",
            got=f"{len(label_BK)} rows of predictions, relevance {truth.shape}",
            expected=f"{num_labels} labels",
        )
    outside_BK = (label_BK < -1) | (label_BK >= num_labels)
    _refuse(label_BK, outside_BK, "a predicted label does not exist", num_labels)
    sorted_BK = np.sort(label_BK, axis=1)
    later_BK = sorted_BK[:, 1:]
    twice_BK = (later_BK == sorted_BK[:, :-1]) & (later_BK >= 0)
    _refuse(label_BK, twice_BK, "a label is predicted twice for one query", num_labels)
    return label_BK


def _refuse(label_BK: Ints, invalid_BK: Bools, what: str, num_labels: int) -> None:
    invalid_B = invalid_BK.any(axis=1)
    if invalid_B.any():
        row = int(np.argmax(invalid_B))
        raise DataError(
            what,
            where=f"predictions row {row}",
            got=label_BK[row].tolist()[:20],
            expected=f"different labels from 0 to {num_labels - 1}, -1 for none",
        )


class Ranked:
    """Predictions with their hits, and all relevant pairs: the basis of every metric."""

    def __init__(
        self, predicted_NK: Any, relevance: csr_matrix, weight_L: Floats, group_L: NDArray[Any]
    ) -> None:
        num_labels = len(weight_L)
        label_NK = _check_predictions(predicted_NK, relevance, num_labels)
        if not label_NK.shape[1]:
            label_NK = np.full((len(label_NK), 1), -1, dtype=np.int64)
        self.label_NK = label_NK
        key_E = pair_keys(relevance, positive_only=True)
        self.hit_NK = _lookup(label_NK, key_E, num_labels)
        row_E, label_E = np.divmod(key_E, max(num_labels, 1))
        # the best prediction lists a query's relevant labels by descending inverse propensity
        order_E = np.lexsort((-weight_L[label_E], row_E))
        self.row_E = row_E[order_E]
        self.label_E = label_E[order_E]
        self.weight_E = weight_L[self.label_E]
        self.group_E = group_L[self.label_E]
        # the appended values are those of label -1
        predicted_weight_NK = np.append(weight_L, 0.0)[label_NK]
        self.weight_NK = np.where(self.hit_NK, predicted_weight_NK, 0.0)
        self.group_NK = np.append(group_L, -1)[label_NK]


class Scope:
    """Hits and relevant pairs, restricted to the labels of a frequency group ("": all labels)."""

    def __init__(self, ranked: Ranked, group: str) -> None:
        inside_NK = np.ones(ranked.hit_NK.shape, dtype=bool)
        inside_E = np.ones(len(ranked.row_E), dtype=bool)
        if group:
            number = GROUPS.index(group)
            inside_NK = ranked.group_NK == number
            inside_E = ranked.group_E == number
        self.hit_NK = ranked.hit_NK & inside_NK
        self.weight_NK = ranked.weight_NK * inside_NK
        # by query, then by descending weight
        self.row_E = ranked.row_E[inside_E]
        self.weight_E = ranked.weight_E[inside_E]
        self.positives_N = np.bincount(self.row_E, minlength=len(self.hit_NK))
        is_counted_N = (self.positives_N > 0) | (not group)
        self.counted_N = is_counted_N.astype(np.float64)
        start_N = np.cumsum(self.positives_N) - self.positives_N
        self.rank_E = np.arange(len(self.row_E)) - start_N[self.row_E]

    def parts(self, kind: str, k: int) -> tuple[Floats, Floats]:
        """Each query's contributions to a metric's numerator and denominator, float64 [N] each."""
        hit_NK = self.hit_NK[:, :k]
        hits_N = hit_NK.sum(axis=1).astype(np.float64)
        if kind == "P":
            return hits_N, np.full(len(hits_N), float(k))
        if kind == "R":
            return hits_N / np.maximum(self.positives_N, 1), self.counted_N
        if kind == "MRR":
            reciprocal_N = 1.0 / (1.0 + hit_NK.argmax(axis=1))
            return np.where(hits_N > 0, reciprocal_N, 0.0), self.counted_N
        discount_k = 1.0 / np.log2(np.arange(2, k + 2))
        discount_K = discount_k[: hit_NK.shape[1]]
        ideal_k = np.concatenate([[1.0], np.cumsum(discount_k)])  # 1 avoids 0 / 0
        ideal_N = ideal_k[np.minimum(self.positives_N, k)]
        if kind == "nDCG":
            return (hit_NK * discount_K).sum(axis=1) / ideal_N, self.counted_N
        gain_NK = self.weight_NK[:, :k]
        best_E = np.where(self.rank_E < k, self.weight_E, 0.0)
        if kind == "PSnDCG":
            gain_NK = gain_NK * discount_K / ideal_N[:, None]
            discount_E = discount_k[np.minimum(self.rank_E, k - 1)]
            best_E = best_E * discount_E / ideal_N[self.row_E]
        elif kind != "PSP":
            raise ValueError(f"{kind} has no contributions of single queries")
        best_N = np.bincount(self.row_E, weights=best_E, minlength=len(hits_N))
        return gain_NK.sum(axis=1), best_N.astype(np.float64)


def by_query(
    predicted_NK: Any,
    relevance: csr_matrix,
    names: Sequence[str],
    inverse_propensity_L: Any,
    group_L: Any = None,
) -> QueryParts:
    """Each query's contributions to metrics; errors as `evaluate`.

    Args:
        predicted_NK, relevance: as for `evaluate`.
        names: such as "nDCG@5", "tail/R@10", "MRR"; not coverage, which has no contributions of
            single queries.
        inverse_propensity_L: float [L].
        group_L: int [L], 0 tail, 1 torso, 2 head; needed for metrics of a group.
    """
    weight_L = np.asarray(inverse_propensity_L, dtype=np.float64)
    if group_L is None:
        group_L = np.zeros(len(weight_L), dtype=np.int64)
    ranked = Ranked(predicted_NK, relevance, weight_L, np.asarray(group_L))
    return _parts(ranked, names)


def _parts(ranked: Ranked, names: Sequence[str]) -> QueryParts:
    scopes: dict[str, Scope] = {}
    parts = {}
    for name in names:
        group, kind, k = parse(name)
        if group not in scopes:
            scopes[group] = Scope(ranked, group)
        parts[name] = scopes[group].parts(kind, k or _RECIPROCAL_RANK)
    return parts


def percent(part: float, whole: float) -> float:
    """`part` as a percentage of `whole`; 0 if `whole` is 0."""
    if whole > 0:
        return float(100.0 * part / whole)
    return 0.0


def evaluate(
    predicted_NK: Any, relevance: csr_matrix, inverse_propensity_L: Any, group_L: Any
) -> dict[str, float]:
    """All metrics of N queries, `"P@1"`, ..., `"tail/R@10"` in percent, and numbers of queries.

    Args:
        predicted_NK: int [N, K], label ids, best first; -1 = none. Ranks beyond K count as misses.
        relevance: CSR [N, L], the truth after filters, relevant if > 0.
        inverse_propensity_L: float [L], at least 0, finite.
        group_L: int [L], 0 tail, 1 torso, 2 head (`unidec.data.propensity.frequency_group`).

    Raises:
        DataError: shapes do not match, or a label is out of range or predicted twice for one query.
    """
    weight_L = np.asarray(inverse_propensity_L, dtype=np.float64)
    group_L = np.asarray(group_L)
    predicted_NK = np.asarray(predicted_NK)
    if len(predicted_NK) != relevance.shape[0]:
        _check_predictions(predicted_NK, relevance, len(weight_L))
    names = [name for name in metric_names() if parse(name).kind != "coverage"]
    sums = {name: np.zeros(2) for name in names}
    # best 0-based rank at which a label was predicted correctly
    rank_L = np.full(len(weight_L), _NO_RANK)
    relevant_L = np.zeros(len(weight_L), dtype=bool)
    for block in blocks(len(predicted_NK), _BLOCK):
        ranked = Ranked(predicted_NK[block], relevance[block], weight_L, group_L)
        for name, (above_B, below_B) in _parts(ranked, names).items():
            sums[name] += (above_B.sum(), below_B.sum())
        relevant_L[ranked.label_E] = True
        hit_row, hit_rank = np.nonzero(ranked.hit_NK)
        hit_label = ranked.label_NK[hit_row, hit_rank]
        np.minimum.at(rank_L, hit_label, hit_rank)
    out = {name: percent(above, below) for name, (above, below) in sums.items()}
    for group in ("", *GROUPS):
        prefix = f"{group}/" if group else ""
        inside_L = relevant_L
        if group:
            inside_L = relevant_L & (group_L == GROUPS.index(group))
        rank = rank_L[inside_L]
        for k in DEFAULT_KS:
            num_found = float((rank < k).sum())
            out[f"{prefix}coverage@{k}"] = percent(num_found, rank.size)
        _, counted = sums[f"{prefix}MRR"]
        out[f"{prefix}num_queries"] = float(counted)
    return out


def remove_filtered(predicted_NK: Any, filter_pairs: csr_matrix, k: int) -> Ints:
    """Predictions without filtered pairs and -1, in order, cut or padded to k: int64 [N, k].

    Retrieve k + the largest number of filter pairs of any query first, so that k labels remain.

    Args:
        predicted_NK: int [N, K], label ids, best first; -1 = none.
        filter_pairs: CSR [N, L], every stored pair is filtered; rows aligned with the predictions.

    Raises:
        DataError: shapes do not match, or a label is out of range or predicted twice for one query.
    """
    num_labels = filter_pairs.shape[1]
    label_NK = _check_predictions(predicted_NK, filter_pairs, num_labels)
    is_filtered_NK = _lookup(label_NK, pair_keys(filter_pairs), num_labels)
    return moved_up(np.where(is_filtered_NK, -1, label_NK), k)


def moved_up(label_NK: Ints, k: int) -> Ints:
    """The labels in order without the -1 between them, cut or padded with -1 to [N, k]."""
    order = np.argsort(label_NK < 0, axis=1, kind="stable")
    found = np.take_along_axis(label_NK, order[:, :k], axis=1)
    return np.pad(found, ((0, 0), (0, k - found.shape[1])), constant_values=-1)


def truth_of(dataset: Any, rows: Any) -> csr_matrix:
    """`filtered_truth` of the queries at these rows of a data set."""
    return filtered_truth(dataset.relevance[rows], dataset.filter_pairs[rows])


def filtered_truth(relevance: csr_matrix, filter_pairs: csr_matrix) -> csr_matrix:
    """The relevant pairs that are not filtered: bool CSR [N, L], sorted.

    Args:
        relevance: CSR [N, L], relevant if > 0.
        filter_pairs: CSR [N, L], every stored pair is filtered.

    Raises:
        DataError: the shapes differ.
    """
    shape = relevance.shape
    if shape != filter_pairs.shape:
        raise DataError(
            "relevance and filter pairs differ in shape",
            got=f"{shape} and {filter_pairs.shape}",
            expected="[queries, labels] of both",
        )
    relevant_E = pair_keys(relevance, positive_only=True)
    key_E = np.setdiff1d(relevant_E, pair_keys(filter_pairs), assume_unique=True)
    pairs = np.divmod(key_E, max(shape[1], 1))
    return ones_at(pairs, shape, bool)
