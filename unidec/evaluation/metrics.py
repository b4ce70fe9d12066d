"""Ranking metrics of extreme multi-label classification: streaming, vectorised over CSR, whole and by label frequency.

Shape legend: B queries of one update, N all queries, K predicted labels a query, L labels, E positive (query, label)
pairs.

Definitions. Relevance above 0 counts as relevant; predictions are label ids, best first, -1 = none (a miss at that
rank). Every figure is a percentage. With P_i = the relevant labels of query i, y_ij = 1 if the label predicted at
rank j is in P_i, w_l = inverse propensity, d_j = 1 / log2(j + 1), D(n) = d_1 + ... + d_n:

- P@k      mean over all queries of sum_{j<=k} y_ij / k
- R@k      mean of sum_{j<=k} y_ij / |P_i|
- nDCG@k   mean of sum_{j<=k} d_j y_ij / D(min(k, |P_i|))
- MRR      mean of 1 / rank of the first relevant label among the first max(ks), 0 where there is none
- PSP@k    sum_i sum_{j<=k} w y_ij, divided by the largest sum that any prediction could reach (ratio of data-set sums)
- PSnDCG@k sum_i sum_{j<=k} d_j w y_ij / D(min(k, |P_i|)), divided by the largest value that any prediction could reach
- coverage@k  share of the labels that are relevant to some query, which are predicted right within k at least once

Queries without a relevant label count as 0 in every mean. Sources: Bhatia et al., the extreme classification
repository (P, nDCG, PSP, PSnDCG), Jain et al. 2016 (propensities). Where the repository's page divides PSDCG@k by
D(k), its published programs divide by D(min(k, |P_i|)), as nDCG does; so does this module, since published figures
come from those.

By group (tail, torso, head): truth is restricted to the group's labels, predictions keep their ranks. P@k is then
that group's contribution, over all queries, so the three groups add up to the whole. R@k, nDCG@k and MRR are means
over the queries that have a relevant label in the group (their number is `<group>/num_queries`). PSP@k, PSnDCG@k and
coverage@k use the restricted truth above and below the line. A group without relevant labels gives 0.

Truth is given after filters: `remove_filtered` takes filtered pairs out of predictions, `filtered_truth` out of truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from unidec.errors import DataError
from unidec.metric_names import DEFAULT_KS, DEFAULT_PROPENSITY_KS, GROUPS

_NO_RANK = np.iinfo(np.int64).max
_BLOCK = 8192  # queries an update in `evaluate`: bounds the temporaries at some 100 bytes x block x K

Floats = NDArray[np.float64]


def _shape(matrix: csr_matrix) -> tuple[int, int]:
    return cast("tuple[int, int]", matrix.shape)  # scipy's annotation says that it may be None


def pair_keys(matrix: csr_matrix, positive_only: bool) -> NDArray[np.int64]:
    """Stored pairs of a CSR matrix as sorted, unique int64 keys `row * L + label`."""
    num_rows, num_labels = _shape(matrix)
    row_E = np.repeat(np.arange(num_rows, dtype=np.int64), np.diff(matrix.indptr))
    key_E = row_E * num_labels + matrix.indices
    if positive_only:
        key_E = key_E[np.asarray(matrix.data) > 0]
    return np.unique(key_E)


def lookup(label_BK: NDArray[np.int64], key_E: NDArray[np.int64], num_labels: int) -> NDArray[np.bool_]:
    """True where (row, label) is among the sorted keys; -1 never is."""
    if key_E.size == 0 or label_BK.size == 0:
        return np.zeros(label_BK.shape, dtype=bool)
    wanted_BK = np.arange(len(label_BK), dtype=np.int64)[:, None] * num_labels + label_BK
    place_BK = np.minimum(np.searchsorted(key_E, wanted_BK), key_E.size - 1)
    return (key_E[place_BK] == wanted_BK) & (label_BK >= 0)


def check_predictions(predicted: Any, truth: csr_matrix, num_labels: int) -> NDArray[np.int64]:
    """Predictions as int64 [B, K], or a DataError that names the first faulty row."""
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
            expected=f"relevance ({len(label_BK)}, {num_labels})",
            fix="pass the relevance rows of exactly the predicted queries, over all labels",
        )
    wrong_B = ((label_BK < -1) | (label_BK >= num_labels)).any(axis=1)
    if wrong_B.any():
        row = int(np.argmax(wrong_B))
        raise DataError(
            "a predicted label does not exist",
            where=f"predictions row {row}",
            got=label_BK[row].tolist()[:20],
            expected=f"-1 (none) or 0 to {num_labels - 1}",
        )
    sorted_BK = np.sort(label_BK, axis=1)
    double_B = ((sorted_BK[:, 1:] == sorted_BK[:, :-1]) & (sorted_BK[:, 1:] >= 0)).any(axis=1)
    if double_B.any():
        row = int(np.argmax(double_B))
        raise DataError(
            "a label is predicted twice for one query",
            where=f"predictions row {row}",
            got=label_BK[row].tolist()[:20],
            fix="give each label at most once a query; it would be counted twice",
        )
    return label_BK


class _Scope:
    """Sums of one scope: all labels, or one frequency group. A scope never sees labels outside of it."""

    def __init__(self, ks: Sequence[int], propensity_ks: Sequence[int]) -> None:
        self.ks, self.propensity_ks = tuple(ks), tuple(propensity_ks)
        width = max((*self.ks, *self.propensity_ks))
        self.discount_K = 1.0 / np.log2(np.arange(2, width + 2))
        self.ideal = np.concatenate([[1.0], np.cumsum(self.discount_K)])  # [0] is 1: no division by 0, its gain is 0
        self.queries = 0
        self.first = 0.0
        self.hits, self.recall, self.ndcg = (np.zeros(len(self.ks)) for _ in range(3))
        self.psp, self.best_psp, self.psndcg, self.best_psndcg = (np.zeros(len(self.propensity_ks)) for _ in range(4))

    def add(
        self,
        hit_BK: NDArray[np.bool_],
        weight_BK: Floats,
        row_E: NDArray[np.int64],
        weight_E: Floats,
    ) -> None:
        """Adds queries: hits and their inverse propensities by rank; rows and weights of the scope's relevant pairs."""
        num_rows = len(hit_BK)
        positives_B = np.bincount(row_E, minlength=num_rows)
        divisor_B = np.maximum(positives_B, 1)
        self.queries += int(np.count_nonzero(positives_B))
        gain_BK = hit_BK * self.discount_K[: hit_BK.shape[1]]
        for i, k in enumerate(self.ks):
            hits_B = hit_BK[:, :k].sum(axis=1)
            self.hits[i] += hits_B.sum()
            self.recall[i] += (hits_B / divisor_B).sum()
            self.ndcg[i] += (gain_BK[:, :k].sum(axis=1) / self.ideal[np.minimum(positives_B, k)]).sum()
        top_BK = hit_BK[:, : max(self.ks)]
        any_B = top_BK.any(axis=1)
        self.first += (1.0 / (1.0 + top_BK.argmax(axis=1)[any_B])).sum() if any_B.any() else 0.0

        # the best prediction lists a query's relevant labels by falling inverse propensity
        order_E = np.lexsort((-weight_E, row_E))
        best_row_E, best_weight_E = row_E[order_E], weight_E[order_E]
        start_B = np.concatenate([[0], np.cumsum(positives_B)])[:-1]
        rank_E = np.arange(len(row_E)) - start_B[best_row_E]
        weighted_gain_BK = weight_BK * self.discount_K[: hit_BK.shape[1]]
        for i, k in enumerate(self.propensity_ks):
            ideal_B = self.ideal[np.minimum(positives_B, k)]
            within_E = rank_E < k
            self.psp[i] += weight_BK[:, :k].sum()
            self.best_psp[i] += best_weight_E[within_E].sum()
            self.psndcg[i] += (weighted_gain_BK[:, :k].sum(axis=1) / ideal_B).sum()
            best_E = best_weight_E[within_E] * self.discount_K[rank_E[within_E]] / ideal_B[best_row_E[within_E]]
            self.best_psndcg[i] += best_E.sum()

    def result(self, num_queries: int, mean_over: int) -> dict[str, float]:
        """Percentages; P@k over `num_queries`, the means of recall type over `mean_over` queries."""
        out: dict[str, float] = {}
        for i, k in enumerate(self.ks):
            out[f"P@{k}"] = _percent(self.hits[i], num_queries * k)
            out[f"nDCG@{k}"] = _percent(self.ndcg[i], mean_over)
            out[f"R@{k}"] = _percent(self.recall[i], mean_over)
        for i, k in enumerate(self.propensity_ks):
            out[f"PSP@{k}"] = _percent(self.psp[i], self.best_psp[i])
            out[f"PSnDCG@{k}"] = _percent(self.psndcg[i], self.best_psndcg[i])
        out["MRR"] = _percent(self.first, mean_over)
        return out


def _percent(part: float, whole: float) -> float:
    return float(100.0 * part / whole) if whole > 0 else 0.0


class Evaluator:
    """Streaming metrics: `update` any number of times, then `compute`.

    Args:
        inverse_propensity_L: float [L], at least 0, finite.
        group_L: int [L], 0 tail, 1 torso, 2 head (`unidec.data.propensity.frequency_group`).
        ks: cut-offs of P, nDCG, R and coverage; MRR looks at the first max(ks).
        propensity_ks: cut-offs of PSP and PSnDCG.
    """

    def __init__(
        self,
        inverse_propensity_L: Any,
        group_L: Any,
        ks: Sequence[int] = DEFAULT_KS,
        propensity_ks: Sequence[int] = DEFAULT_PROPENSITY_KS,
    ) -> None:
        self._weight_L = np.asarray(inverse_propensity_L, dtype=np.float64)
        self._group_L = np.asarray(group_L)
        if self._weight_L.ndim != 1 or self._group_L.shape != self._weight_L.shape:
            raise DataError(
                "inverse propensities and groups must be two vectors over the labels",
                got=f"shapes {self._weight_L.shape} and {self._group_L.shape}",
            )
        if not (np.isfinite(self._weight_L).all() and (self._weight_L >= 0).all()):
            raise DataError("inverse propensities must be finite and at least 0")
        if not np.isin(self._group_L, range(len(GROUPS))).all():
            raise DataError("unknown frequency group", got=np.unique(self._group_L).tolist()[:20], expected="0, 1, 2")
        if not ks or min((*ks, *propensity_ks)) < 1:
            raise DataError("cut-offs must be at least 1, and ks not empty", got=f"{tuple(ks)}, {tuple(propensity_ks)}")
        self._ks = tuple(ks)
        self._width = max((*ks, *propensity_ks))
        self._num_queries = 0
        self._scopes = [_Scope(ks, propensity_ks) for _ in range(1 + len(GROUPS))]
        num_labels = len(self._weight_L)
        self._rank_L = np.full(num_labels, _NO_RANK)  # best 0-based rank at which a label was predicted right
        self._relevant_L = np.zeros(num_labels, dtype=bool)

    def update(self, predicted_BK: Any, relevance: csr_matrix) -> None:
        """Adds B queries.

        Args:
            predicted_BK: int [B, K], label ids, best first; -1 = none. K may be smaller than the cut-offs: misses.
            relevance: CSR [B, L], the truth after filters, relevant where > 0.

        Raises:
            DataError: shapes that do not fit, a label out of range or predicted twice for one query.
        """
        num_labels = len(self._weight_L)
        label_BK = check_predictions(predicted_BK, relevance, num_labels)[:, : self._width]
        self._num_queries += len(label_BK)
        key_E = pair_keys(relevance, positive_only=True)
        if num_labels == 0 or key_E.size == 0:
            return  # nothing is relevant: these queries count as 0 everywhere
        if label_BK.shape[1] == 0:
            label_BK = np.full((len(label_BK), 1), -1, dtype=np.int64)
        row_E, label_E = np.divmod(key_E, num_labels)
        weight_E, group_E = self._weight_L[label_E], self._group_L[label_E]
        hit_BK = lookup(label_BK, key_E, num_labels)
        weight_BK = np.where(hit_BK, self._weight_L[label_BK], 0.0)
        self._scopes[0].add(hit_BK, weight_BK, row_E, weight_E)
        group_BK = self._group_L[label_BK]
        for group, scope in enumerate(self._scopes[1:]):
            of_group_BK, of_group_E = group_BK == group, group_E == group
            scope.add(hit_BK & of_group_BK, weight_BK * of_group_BK, row_E[of_group_E], weight_E[of_group_E])
        self._relevant_L[label_E] = True
        hit_row, hit_rank = np.nonzero(hit_BK)
        np.minimum.at(self._rank_L, label_BK[hit_row, hit_rank], hit_rank)

    def compute(self) -> dict[str, float]:
        """Metrics of all updates so far: `"P@1"`, ..., `"tail/R@10"`, ... in percent, and numbers of queries."""
        out = self._scopes[0].result(self._num_queries, self._num_queries)
        out |= self._coverage(self._relevant_L)
        out["num_queries"] = float(self._num_queries)
        for group, (name, scope) in enumerate(zip(GROUPS, self._scopes[1:], strict=True)):
            part = scope.result(self._num_queries, scope.queries)
            part |= self._coverage(self._relevant_L & (self._group_L == group))
            part["num_queries"] = float(scope.queries)
            out |= {f"{name}/{key}": value for key, value in part.items()}
        return out

    def _coverage(self, relevant_L: NDArray[np.bool_]) -> dict[str, float]:
        rank = self._rank_L[relevant_L]
        return {f"coverage@{k}": _percent(float(np.count_nonzero(rank < k)), rank.size) for k in self._ks}


def evaluate(
    predicted_NK: Any,
    relevance: csr_matrix,
    inverse_propensity_L: Any,
    group_L: Any,
    ks: Sequence[int] = DEFAULT_KS,
    propensity_ks: Sequence[int] = DEFAULT_PROPENSITY_KS,
) -> dict[str, float]:
    """All metrics of N queries at once: `Evaluator` fed in blocks; same arguments, result and errors."""
    evaluator = Evaluator(inverse_propensity_L, group_L, ks, propensity_ks)
    predicted_NK = np.asarray(predicted_NK)
    if len(predicted_NK) != _shape(relevance)[0]:
        check_predictions(predicted_NK, relevance, _shape(relevance)[1])
    for start in range(0, len(predicted_NK), _BLOCK):
        evaluator.update(predicted_NK[start : start + _BLOCK], relevance[start : start + _BLOCK])
    return evaluator.compute()


def per_query(predicted_NK: Any, relevance: csr_matrix) -> dict[str, Floats]:
    """P@1, nDCG@5 and R@100 of each query, float64 [N] in percent: their means are `Evaluator`'s figures.

    Args and errors: as in `Evaluator.update`.
    """
    num_labels = _shape(relevance)[1]
    label_NK = check_predictions(predicted_NK, relevance, num_labels)
    key_E = pair_keys(relevance, positive_only=True)
    hit_NK = lookup(label_NK, key_E, num_labels)
    positives_N = np.bincount(key_E // max(num_labels, 1), minlength=len(label_NK))
    discount_K = 1.0 / np.log2(np.arange(2, 7))
    ideal = np.concatenate([[1.0], np.cumsum(discount_K)])
    gain_N = (hit_NK[:, :5] * discount_K[: min(5, hit_NK.shape[1])]).sum(axis=1)
    return {
        "P@1": 100.0 * hit_NK[:, :1].sum(axis=1),
        "nDCG@5": 100.0 * gain_N / ideal[np.minimum(positives_N, 5)],
        "R@100": 100.0 * hit_NK[:, :100].sum(axis=1) / np.maximum(positives_N, 1),
    }


def remove_filtered(
    predicted_NK: Any, scores_NK: Any, filter_pairs: csr_matrix, k: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Takes filtered pairs (and -1) out of predictions, keeps the order, cuts or pads to k.

    Search for k + the most filter pairs of any query, then call this, so that k labels are left.

    Args:
        predicted_NK: int [N, K], label ids, best first; -1 = none.
        scores_NK: float [N, K].
        filter_pairs: CSR [N, L], every stored pair is filtered; rows aligned with the predictions.
        k: labels a query to return, at least 0.

    Returns:
        (int64 [N, k] padded with -1, float32 [N, k] padded with -inf).

    Raises:
        DataError: shapes that do not fit, a label out of range or predicted twice.
    """
    num_labels = _shape(filter_pairs)[1]
    label_NK = check_predictions(predicted_NK, filter_pairs, num_labels)
    scores_NK = np.asarray(scores_NK)
    if scores_NK.shape != label_NK.shape:
        raise DataError("scores and predictions differ in shape", got=f"{scores_NK.shape} and {label_NK.shape}")
    keep_NK = (label_NK >= 0) & ~lookup(label_NK, pair_keys(filter_pairs, positive_only=False), num_labels)
    place_NK = np.cumsum(keep_NK, axis=1) - 1
    row, column = np.nonzero(keep_NK & (place_NK < k))
    place = place_NK[row, column]
    label_out = np.full((len(label_NK), k), -1, dtype=np.int64)
    score_out = np.full((len(label_NK), k), -np.inf, dtype=np.float32)
    label_out[row, place] = label_NK[row, column]
    score_out[row, place] = scores_NK[row, column]
    return label_out, score_out


def filtered_truth(relevance: csr_matrix, filter_pairs: csr_matrix) -> csr_matrix:
    """The relevant pairs that are not filtered: bool CSR [N, L], sorted.

    Args:
        relevance: CSR [N, L], relevant where > 0.
        filter_pairs: CSR [N, L], every stored pair is filtered.

    Raises:
        DataError: shapes that differ.
    """
    if _shape(relevance) != _shape(filter_pairs):
        raise DataError("relevance and filter differ in shape", got=f"{relevance.shape} and {filter_pairs.shape}")
    key_E = np.setdiff1d(pair_keys(relevance, True), pair_keys(filter_pairs, False), assume_unique=True)
    row_E, label_E = np.divmod(key_E, max(_shape(relevance)[1], 1))
    return csr_matrix((np.ones(len(key_E), dtype=bool), (row_E, label_E)), shape=_shape(relevance))
