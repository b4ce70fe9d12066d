"""Hard negatives: the labels that score best for a query and are none of its own.

Legend: N queries of the data set, n training queries, L labels, H mined negatives a query, D width of a head, E
positives of some queries.

Source: UniDEC, H_i = top-k of a nearest-neighbour search without P_i, |H_i| = eta x T. Filter pairs (the query is the
label itself) must leave it too: such a label scores best and is no negative (spec, detail 6).
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

from unidec.errors import ConfigError
from unidec.model.search import exact_search, query_block
from unidec.progress import progress
from unidec.sections import Mining
from unidec.training.distributed import ALONE, Ranks
from unidec.training.fit import Figures

BLOCK = 512  # queries compared with all labels at a time
_BLOCKS = 8  # between two looks at the progress
_PAIRS = 1 << 16  # positives scored at once
_SPARE = 32  # labels beyond those wanted, to tell equal scores apart
_ROWS_A_LIST = 40  # labels a list at least: faiss asks for 39 to find its centre
_PROBED = 16  # of so many lists one is searched
_COMPARED = 1000  # queries on which an approximate search is compared with the exact one

Search = Callable[..., tuple[np.ndarray, np.ndarray]]  # takes what `exact_search` does but for the labels


def mine_hard_negatives(
    query_nD: np.ndarray,
    rows_n: np.ndarray,
    label_LD: np.ndarray,
    pairs: tuple[sp.csr_matrix, sp.csr_matrix],
    num_negatives: int,
    device: str | torch.device | None = None,
    ranks: Ranks = ALONE,
    mining: Mining = "exact",
) -> tuple[np.ndarray, Figures]:
    """Mines `num_negatives` (eta x T) labels for each query; of equal scores the lower label comes first.

    Args:
        query_nD: float32 [n, D] query vectors; rows_n: int64 [n], their data set rows, each once.
        label_LD: float32 [L, D] label vectors; with several ranks this rank's part of them.
        pairs: relevance and filter pairs, csr [N, L].
        num_negatives: H, places of a shortlist.
        device: of the exact search; None: the CPU.
        ranks: processes that share the work, whole blocks of the queries each; all get the whole shortlist.
        mining: "exact", or "faiss": an approximate search on the CPU.

    Returns:
        Mined labels by data set row, best first, int32 [N, H], -1 where there is none; and a report: `queries`,
        `negative_score` (mean over all negatives), `positives_found` (share of the queries' positives that score at
        least as high as the query's last negative: the search would have found them), `seconds`; of an approximate
        search `recall`: the share of what an exact one finds.

    Raises:
        DataError: vectors that are not finite. ConfigError: faiss is not installed.
    """
    begin_time, (relevance, filter_pairs) = time.perf_counter(), pairs
    shortlist = np.full((relevance.shape[0], num_negatives), -1, dtype=np.int32)
    label = torch.from_numpy(np.require(ranks.gather_array(label_LD), requirements="W")).to(device)
    # blocks are those of one rank: the bits of scores depend on their size
    block = query_block(len(label), BLOCK)
    own = slice(*(min(block * number, len(query_nD)) for number in ranks.part(-(-len(query_nD) // block))))
    exact: Search = partial(exact_search, label_LD=label, block=block, device=device)
    search = exact if mining == "exact" else faiss_search(label)
    rows, sums = rows_n[own], np.zeros(4)  # of the negatives' scores; negatives, positives, positives found
    with progress(total=len(rows), desc="mine hard negatives", unit="query") as bar:
        for begin in range(0, len(rows), _BLOCKS * block):
            some, query = rows[begin : begin + _BLOCKS * block], query_nD[own][begin : begin + _BLOCKS * block]
            positive = _pattern(relevance[some])
            excluded = positive + _pattern(filter_pairs[some])
            score, found = search(query, k=num_negatives + _SPARE, exclude=excluded)
            order = np.lexsort((found, -score), axis=1)[:, :num_negatives]
            score, found = np.take_along_axis(score, order, axis=1), np.take_along_axis(found, order, axis=1)
            shortlist[some] = found
            reached_E = _scores(query, label, positive) >= np.repeat(score[:, -1], np.diff(positive.indptr))
            mined = score[found >= 0]
            sums += mined.sum(dtype=np.float64), len(mined), len(reached_E), reached_E.sum()
            bar.update(len(some))
    shortlist[rows_n] = ranks.gather_array(shortlist[rows])
    total, negatives, positives, reached = ranks.gather_array(sums[None]).sum(0).tolist()
    report = {
        "queries": len(query_nD), "negative_score": total / max(negatives, 1),
        "positives_found": reached / max(positives, 1), "seconds": time.perf_counter() - begin_time,
    }  # fmt: skip
    if mining != "exact":
        step = max(1, len(query_nD) // _COMPARED)
        rows = rows_n[::step]
        excluded = _pattern(relevance[rows]) + _pattern(filter_pairs[rows])
        _, expected = exact(query_nD[::step], k=num_negatives, exclude=excluded)
        same = (shortlist[rows][:, :, None] == expected[:, None]) & (expected >= 0)[:, None]
        report["recall"] = float(same.sum() / max((expected >= 0).sum(), 1))
    return shortlist, report


def faiss_search(label: torch.Tensor) -> Search:
    """Some of the inverted lists that are nearest to a query, of about 4 sqrt(L) lists, by faiss on the CPU."""
    try:
        import faiss
    except ImportError as error:
        fix = "pip install 'unidec-xmc[cpu]', or pool.mining: exact"
        raise ConfigError("faiss is not installed", where="pool.mining", got="faiss", fix=fix) from error
    label_LD = np.ascontiguousarray(label.cpu().numpy())
    num_labels, width = label_LD.shape
    num_lists = max(1, min(4 * math.isqrt(num_labels), num_labels // _ROWS_A_LIST))
    index: Any = faiss.index_factory(width, f"IVF{num_lists},Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(label_LD)
    index.add(label_LD)
    index.nprobe = max(1, num_lists // _PROBED)

    def search(query: np.ndarray, k: int, exclude: sp.csr_matrix) -> tuple[np.ndarray, np.ndarray]:
        first, excluded_B = np.arange(len(query))[:, None] * num_labels, np.diff(exclude.indptr)
        keys = np.repeat(first[:, 0], excluded_B) + exclude.indices
        # so many more are searched that enough are left
        score, found = index.search(np.ascontiguousarray(query), k + int(excluded_B.max(initial=0)))
        gone = (found < 0) | np.isin(first + found, keys)
        score[gone], found[gone] = -np.inf, -1
        order = np.argsort(-score, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(score, order, axis=1), np.take_along_axis(found, order, axis=1)

    return search


def _scores(query_nD: np.ndarray, label_LD: torch.Tensor, pairs: sp.csr_matrix) -> np.ndarray:
    """Inner products of the pairs [N, L] of some queries, float32 [E]."""
    row_E = torch.from_numpy(np.repeat(np.arange(len(query_nD)), np.diff(pairs.indptr))).to(label_LD.device)
    label_E = torch.from_numpy(pairs.indices.astype(np.int64)).to(label_LD.device)
    query = torch.from_numpy(np.require(query_nD, requirements=["C", "W"])).to(label_LD)
    pieces = zip(row_E.split(_PAIRS), label_E.split(_PAIRS), strict=True)
    return torch.cat([torch.linalg.vecdot(query[row], label_LD[label]) for row, label in pieces]).cpu().numpy()


def _pattern(matrix: sp.csr_matrix) -> sp.csr_matrix:
    return sp.csr_matrix((np.ones(len(matrix.indices), np.int8), matrix.indices, matrix.indptr), matrix.shape)
