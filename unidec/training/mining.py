"""Hard negatives: the nearest labels of each training query that are neither its positives nor
filtered.

Legend: N queries of the data set, n mined queries, L labels, H negatives of a query, K results of a
search, D width of a head, E positives of some queries.

Source: UniDEC, H_i = top-k of a nearest-neighbour search without P_i, |H_i| = eta x T. Labels of
filter pairs (the query is the label itself) are excluded too: they score best and are not
negatives.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from unidec.config import Mining
from unidec.model.faiss_library import faiss_module
from unidec.model.pool import row_entries
from unidec.model.search import exact_search, labels_that_fit, query_block
from unidec.progress import progress
from unidec.training.distributed import ALONE, Ranks
from unidec.training.fit import Figures

BLOCK = 512  # queries compared with all labels at a time
_BLOCKS = 8  # blocks between two updates of the progress bar
_PAIRS = 1 << 16  # positives scored at once
# labels searched in addition to H, so that among equal scores the lowest label ids are taken
_SPARE = 32
# least labels for each inverted list on average: faiss requires 39 to train a centroid
_ROWS_A_LIST = 40
_LISTS_A_PROBE = 16  # one of so many inverted lists is searched ...
# ... and at most this many: from about 65,000 labels on, the time of a query grows with sqrt(L)
_MAX_PROBES = 64
# of faiss's k-means: labels for each centroid, and iterations
_TRAINING_LABELS = 64
_ITERATIONS = 10
_COMPARED = 1000  # queries on which an approximate search is compared with the exact one

# (query vectors [B, D], k, exclude=csr [B, L]) -> scores and labels [B, K], -inf and -1 for none
Search = Callable[..., tuple[np.ndarray, np.ndarray]]


def mine_hard_negatives(
    query_nD: np.ndarray,
    rows_n: np.ndarray,
    label_LD: np.ndarray,
    pairs: tuple[sp.csr_matrix, sp.csr_matrix],
    num_negatives: int,
    *,
    device: str | torch.device = "cpu",
    ranks: Ranks = ALONE,
    mining: Mining = "exact",
) -> tuple[np.ndarray, Figures]:
    """Mine for each query the `num_negatives` (eta x T) nearest labels that are not positives or
    filtered; among equal scores lower label ids come first.

    Args:
        query_nD: float32 [n, D] query vectors; rows_n: int64 [n], their data set rows, each once.
        label_LD: float32 [L, D] label vectors; with several ranks this rank's part of them.
        pairs: relevance and filter pairs, csr [N, L].
        num_negatives: H.
        device: of the exact search.
        ranks: processes that share the work by blocks of queries; all return the complete result.
        mining: "exact", or "faiss" for an approximate search on the CPU.

    Returns:
        Mined labels by data set row, best first, int32 [N, H], padded with -1; and figures:
        `queries`, `negative_score` (mean over all negatives), `positives_found` (share of the
        queries' positives that score at least as high as the query's last negative, so that the
        search would find them), `seconds`; for an approximate search `recall`, the share of the
        exact results that it finds.

    Raises:
        DataError: vectors are not finite. UnidecError: faiss is not installed.
    """
    begin_time = time.perf_counter()
    relevance, filter_pairs = pairs
    num_rows = relevance.shape[0]
    all_labels = ranks.gather_array(label_LD)
    label = torch.from_numpy(np.require(all_labels, requirements="W"))
    num_labels, width = label.shape
    if num_labels <= labels_that_fit(torch.device(device), width):
        label = label.to(device)
    # blocks are the same for any number of ranks: the bits of scores depend on a block's size
    block = query_block(num_labels, BLOCK)
    exact: Search = partial(exact_search, label_LD=label, block=block, device=device)
    search = exact if mining == "exact" else faiss_search(label)
    num_blocks = -(-len(query_nD) // block)
    first_block, end_block = ranks.part(num_blocks)
    own = slice(first_block * block, end_block * block)
    own_rows = rows_n[own]
    own_query = query_nD[own]

    def excluded(rows: np.ndarray) -> sp.csr_matrix:
        return _pattern(relevance[rows]) + _pattern(filter_pairs[rows])

    own_mined = np.full((len(own_rows), num_negatives), -1, dtype=np.int32)
    counts = np.zeros(4)  # sum of negatives' scores; negatives, positives, positives found
    at_once = _BLOCKS * block
    with progress(total=len(own_rows), desc="mine hard negatives", unit="query") as bar:
        for begin in range(0, len(own_rows), at_once):
            some = slice(begin, begin + at_once)
            query = own_query[some]
            rows = own_rows[some]
            score, negative = search(query, k=num_negatives + _SPARE, exclude=excluded(rows))
            order = np.lexsort((negative, -score), axis=1)
            best = order[:, :num_negatives]
            score = np.take_along_axis(score, best, axis=1)
            negative = np.take_along_axis(negative, best, axis=1)
            own_mined[some] = negative
            row_E, label_E, _ = row_entries(relevance, rows)
            score_E = _scores(query, label, row_E, label_E)
            found_E = score_E >= score[row_E, -1]
            mined = score[negative >= 0]
            score_sum = mined.sum(dtype=np.float64)
            counts += score_sum, len(mined), len(found_E), found_E.sum()
            bar.update(len(query))
    mined_NH = np.full((num_rows, num_negatives), -1, dtype=np.int32)
    mined_NH[rows_n] = ranks.gather_array(own_mined)
    counts = ranks.gather_array(counts[None]).sum(0)
    score_sum, num_mined, num_positives, num_found = counts.tolist()
    report = {
        "queries": len(query_nD),
        "negative_score": score_sum / max(num_mined, 1),
        "positives_found": num_found / max(num_positives, 1),
        "seconds": time.perf_counter() - begin_time,
    }
    if mining != "exact":
        compared = slice(None, None, max(1, len(query_nD) // _COMPARED))
        rows = rows_n[compared]
        _, expected = exact(query_nD[compared], k=num_negatives, exclude=excluded(rows))
        report["recall"] = _recall(mined_NH[rows], expected)
    return mined_NH, report


def faiss_search(label: Tensor) -> Search:
    """An approximate search by faiss on the CPU: of about 4 sqrt(L) inverted lists, the nearest to
    a query are searched. Its results may be more than k.
    """
    faiss = faiss_module()
    label_LD = np.ascontiguousarray(label.cpu().numpy())
    num_labels, width = label_LD.shape
    most_lists = num_labels // _ROWS_A_LIST
    num_lists = max(1, min(4 * math.isqrt(num_labels), most_lists))
    index: Any = faiss.index_factory(width, f"IVF{num_lists},Flat", faiss.METRIC_INNER_PRODUCT)
    index.cp.max_points_per_centroid = _TRAINING_LABELS
    index.cp.niter = _ITERATIONS
    with progress(total=num_labels, desc="faiss index of the labels", unit="label") as bar:
        index.train(label_LD)
        index.add(label_LD)
        bar.update(num_labels)
    index.nprobe = max(1, min(num_lists // _LISTS_A_PROBE, _MAX_PROBES))

    def search(query: np.ndarray, k: int, exclude: sp.csr_matrix) -> tuple[np.ndarray, np.ndarray]:
        rows_B = np.arange(len(query))
        row_E, label_E, _ = row_entries(exclude, rows_B)
        # enough labels that k are left without the excluded ones
        most_excluded = int(np.bincount(row_E).max(initial=0))
        score, nearest = index.search(np.ascontiguousarray(query), k + most_excluded)
        key = rows_B[:, None] * num_labels + nearest
        is_excluded = np.isin(key, row_E * num_labels + label_E)
        removed = is_excluded | (nearest < 0)
        score[removed] = -np.inf
        nearest[removed] = -1
        return score, nearest

    return search


def _recall(found_NH: np.ndarray, expected_NH: np.ndarray) -> float:
    """Share of the expected labels that were found; -1 is none."""
    is_label = expected_NH >= 0
    is_same = found_NH[:, :, None] == expected_NH[:, None]
    is_found = is_same.any(1) & is_label
    return float(is_found.sum() / max(is_label.sum(), 1))


def _scores(
    query_nD: np.ndarray, label_LD: Tensor, row_E: np.ndarray, label_E: np.ndarray
) -> np.ndarray:
    """Inner products of pairs of a query and a label, float32 [E]."""
    query = torch.from_numpy(np.require(query_nD, requirements=["C", "W"]))
    query = query.to(label_LD)
    scores = [torch.empty(0)]
    for begin in range(0, len(row_E), _PAIRS):
        some = slice(begin, begin + _PAIRS)
        of_query = query[row_E[some]]
        of_label = label_LD[label_E[some]]
        score = torch.linalg.vecdot(of_query, of_label)
        scores.append(score.float().cpu())
    return torch.cat(scores).numpy()


def _pattern(matrix: sp.csr_matrix) -> sp.csr_matrix:
    """The matrix with value 1 for each stored entry, also for stored zeros."""
    ones = np.ones(len(matrix.indices), np.int8)
    return sp.csr_matrix((ones, matrix.indices, matrix.indptr), matrix.shape)
