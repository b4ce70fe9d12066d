"""Hard negatives: the nearest labels of each training query that are neither its positives nor
filtered.

Legend: N queries of the data set, n mined queries, L labels, H negatives of a query, K results of a
search, D width of a head, E excluded labels of some queries.

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
from unidec.data.chunks import blocks
from unidec.data.csr import keys_of, pattern
from unidec.model.faiss_library import faiss_module
from unidec.model.search import exact_search, labels_that_fit, query_block, recall
from unidec.progress import progress
from unidec.training.distributed import ALONE, Ranks
from unidec.training.fit import Figures

# maximum labels that "auto" searches exactly on a CPU: a minute for as many queries
MOST_EXACT = 50_000
BLOCK = 512  # queries compared with all labels at a time
_BLOCKS = 8  # blocks between two updates of the progress bar
# labels searched in addition to H, so that among equal scores the lowest label ids are taken
_SPARE = 32
# minimum labels per inverted list, on average: faiss requires 39 to train a centroid
_ROWS_A_LIST = 40
_LISTS_A_PROBE = 8  # one in this many inverted lists is searched ...
# ... and at most this many: from about 65,000 labels on, the time of a query grows with sqrt(L)
_MAX_PROBES = 64
_RESCORED = 2  # labels found by 4-bit codes that are scored exactly, per result
# of faiss's k-means: labels for each centroid, and iterations
_TRAINING_LABELS = 64
_ITERATIONS = 10
_ADDED = 1 << 16  # labels added to an index at a time
_COMPARED = 1000  # queries on which an approximate search is compared with the exact one

# (query vectors [B, D], k, exclude=csr [B, L]) -> scores and labels [B, K], -inf and -1 for none
Search = Callable[..., tuple[np.ndarray, np.ndarray]]


def uses_faiss(mining: Mining, num_labels: int, fits_gpu: bool) -> bool:
    """Whether hard negatives are searched by faiss; `fits_gpu`: whether the labels' vectors fit
    into a GPU.
    """
    if mining == "auto":
        return num_labels > MOST_EXACT and not fits_gpu
    return mining == "faiss"


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
        query_nD: float32 or float16 [n, D] query vectors; rows_n: int64 [n], their data set rows,
            each once.
        label_LD: float32 or float16 [L, D] label vectors, which may be memory-mapped; with several
            ranks this rank's part of them.
        pairs: relevance and filter pairs, csr [N, L].
        num_negatives: H.
        device: of the exact search.
        ranks: processes that share the work by blocks of queries; all return the complete result.
        mining: "exact"; "faiss", an approximate search on the CPU; or "auto" (`uses_faiss`).

    Returns:
        Mined labels by data set row, best first, int32 [N, H], padded with -1; and figures:
        `queries`, `negative_score` (mean over all negatives), `seconds`; for an approximate search
        `recall`, the share of the exact results that it finds; for "auto" `exact`, 1 or 0.

    Raises:
        DataError: vectors are not finite. UnidecError: faiss is not installed.
    """
    begin_time = time.perf_counter()
    relevance, filter_pairs = pairs
    all_labels = ranks.gather_array(label_LD)
    label = torch.from_numpy(np.require(all_labels, requirements="W"))
    num_labels, width = label.shape
    if num_labels <= labels_that_fit(torch.device(device), width):
        label = label.to(device)
    (is_large,) = ranks.any(not label.is_cuda)  # the ranks' GPUs may differ
    approximate = uses_faiss(mining, num_labels, fits_gpu=not is_large)
    # blocks are the same for any number of ranks: the bits of scores depend on a block's size
    block = query_block(num_labels, BLOCK)
    exact: Search = partial(exact_search, label_LD=label, block=block, device=device)
    search = faiss_search(label) if approximate else exact
    excluded = pattern(relevance, np.int8) + pattern(filter_pairs, np.int8)
    first, end = ranks.part(-(-len(query_nD) // block))  # each rank mines whole blocks
    own = slice(first * block, end * block)
    own_n = rows_n[own]
    own_nD = query_nD[own]
    mined_nH = np.empty((len(own_n), num_negatives), dtype=np.int32)
    own_sums = np.zeros((1, 2))
    desc = f"mine hard negatives ({'faiss' if approximate else 'exact'})"
    with progress(total=len(own_n), desc=desc, unit="query") as bar:
        for some in blocks(len(own_n), _BLOCKS * block):
            score_BK, label_BK = search(
                own_nD[some], k=num_negatives + _SPARE, exclude=excluded[own_n[some]]
            )
            best_BH = np.lexsort((label_BK, -score_BK), axis=1)[:, :num_negatives]
            score_BH = np.take_along_axis(score_BK, best_BH, axis=1)
            label_BH = np.take_along_axis(label_BK, best_BH, axis=1)
            mined_nH[some] = label_BH
            scores = score_BH[label_BH >= 0]
            own_sums += scores.sum(dtype=np.float64), len(scores)
            bar.update(len(label_BH))
    mined_NH = np.full((relevance.shape[0], num_negatives), -1, dtype=np.int32)
    mined_NH[rows_n] = ranks.gather_array(mined_nH)
    score_sum, num_mined = ranks.gather_array(own_sums).sum(0).tolist()
    figures = {
        "queries": len(query_nD),
        "negative_score": score_sum / max(num_mined, 1),
        "seconds": time.perf_counter() - begin_time,
    }
    if mining == "auto":
        figures["exact"] = float(not approximate)
    if approximate:
        step = max(1, len(query_nD) // _COMPARED)
        rows = rows_n[::step]
        _, expected = exact(query_nD[::step], k=num_negatives, exclude=excluded[rows])
        figures["recall"] = recall(mined_NH[rows], expected)
    return mined_NH, figures


def faiss_search(label: Tensor) -> Search:
    """An approximate search by faiss on the CPU: of about 2 sqrt(L) inverted lists, the nearest to
    a query are searched by codes of 4 bits a dimension, and the best labels are scored exactly. It
    may return more than k results.
    """
    faiss = faiss_module()
    label_LD = label.cpu().numpy()
    num_labels, width = label_LD.shape
    most_lists = max(1, num_labels // _ROWS_A_LIST)
    num_lists = min(2 * math.isqrt(num_labels), most_lists)
    codes = f"PQ{width}x4fs" if num_lists > 1 else "Flat"  # codes need some labels to train on
    is_half = label_LD.dtype == np.float16
    exact = "Refine(SQfp16)" if is_half else "RFlat"
    factory = f"IVF{num_lists},{codes},{exact}"
    index: Any = faiss.index_factory(width, factory, faiss.METRIC_INNER_PRODUCT)
    index.k_factor = _RESCORED
    lists = faiss.extract_index_ivf(index)
    lists.cp.max_points_per_centroid = _TRAINING_LABELS
    lists.cp.niter = _ITERATIONS
    lists.nprobe = max(1, min(num_lists // _LISTS_A_PROBE, _MAX_PROBES))
    # faiss itself draws a sample of the labels in memory
    step = max(1, num_labels // (_TRAINING_LABELS * num_lists)) if is_half else 1
    with progress(total=num_labels, desc="faiss index of the labels", unit="label") as bar:
        index.train(np.ascontiguousarray(label_LD[::step], np.float32))
        for some in blocks(num_labels, _ADDED):
            some_LD = np.ascontiguousarray(label_LD[some], np.float32)
            index.add(some_LD)
            bar.update(len(some_LD))

    def search(query: np.ndarray, k: int, exclude: sp.csr_matrix) -> tuple[np.ndarray, np.ndarray]:
        # enough labels that k remain without the excluded ones
        most_excluded = int(np.diff(exclude.indptr).max(initial=0))
        query = np.ascontiguousarray(query, np.float32)
        score, nearest = index.search(query, k + most_excluded)
        key = np.arange(len(query))[:, None] * num_labels + nearest
        removed = np.isin(key, keys_of(exclude)) | (nearest < 0)
        score[removed] = -np.inf
        nearest[removed] = -1
        return score, nearest

    return search
