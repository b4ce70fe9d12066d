"""Hard negatives: for each query the best-scored labels that are neither its positives nor its filter pairs.

Legend: N mined queries, L labels, D dimensions, H shortlist places, E positives of some queries.

Source: UniDEC, H_i = top-k of a search without P_i (exact here), refreshed every T epochs, |H_i| = eta x T. Filter
pairs (the query is the label itself) must leave it too: such a label scores best and is no negative (spec, detail 6).

Several ranks: each mines whole blocks of the queries among all labels.
"""

from __future__ import annotations

import time

import numpy as np
import scipy.sparse as sp
import torch

from unidec.model.search import exact_search, query_block
from unidec.progress import progress
from unidec.training.distributed import ALONE, Ranks

BLOCK = 512  # queries compared with all labels at a time
_BLOCKS = 8  # between two looks at the progress
_PAIRS = 1 << 16  # positives scored at once
_SPARE = 32  # labels beyond those wanted, to tell equal scores apart


def mine_hard_negatives(
    query_ND: np.ndarray,
    query_rows_N: np.ndarray,
    label_LD: np.ndarray,
    relevance: sp.csr_matrix,
    filter_pairs: sp.csr_matrix,
    num_negatives: int,
    device: str | torch.device | None = None,
    ranks: Ranks = ALONE,
) -> tuple[np.ndarray, dict[str, float]]:
    """Mines `num_negatives` (eta x T) labels for each query; of equal scores the lower label comes first.

    Args:
        query_ND: float32 [N, D] query vectors; query_rows_N: int64 [N], their data set rows, each once.
        label_LD: float32 [L, D] label vectors; with several ranks this rank's part of them.
        relevance, filter_pairs: csr [data set rows, L].
        num_negatives: H, places of a shortlist.
        device: of the exact search; None: the CPU.
        ranks: processes that share the work; each has all queries, and gets the whole shortlist.

    Returns:
        Mined labels by data set row, best first, int32 [data set rows, H], -1 where there is none; and a report:
        `queries`, `negative_score` (mean over all negatives), `positives_found` (share of the queries' positives that
        a search for H labels beside them finds: they score at least as high as the last negative), `seconds`.

    Raises:
        DataError: vectors that are not finite.
    """
    begin_time = time.perf_counter()
    shortlist = np.full((relevance.shape[0], num_negatives), -1, dtype=np.int32)
    label = torch.from_numpy(np.require(ranks.gather_array(label_LD), requirements="W")).to(device)
    # blocks are those of one rank: the bits of scores depend on their size
    block = query_block(len(label), BLOCK)
    own = slice(*(min(block * number, len(query_ND)) for number in ranks.part(-(-len(query_ND) // block))))
    rows, sums = query_rows_N[own], np.zeros(4)  # of the negatives' scores; negatives, positives, positives found
    with progress(total=len(rows), desc="mine hard negatives", unit="query") as bar:
        for begin in range(0, len(rows), _BLOCKS * block):
            some, query = rows[begin : begin + _BLOCKS * block], query_ND[own][begin : begin + _BLOCKS * block]
            positive = _pattern(relevance[some])
            excluded = positive + _pattern(filter_pairs[some])
            score, found = exact_search(
                query, label, num_negatives + _SPARE, exclude=excluded, block=block, device=device
            )  # fmt: skip
            order = np.lexsort((found, -score), axis=1)[:, :num_negatives]
            score, found = np.take_along_axis(score, order, axis=1), np.take_along_axis(found, order, axis=1)
            shortlist[some] = found
            reached_E = _scores(query, label, positive) >= np.repeat(score[:, -1], np.diff(positive.indptr))
            mined = score[found >= 0]
            sums += mined.sum(dtype=np.float64), len(mined), len(reached_E), reached_E.sum()
            bar.update(len(some))
    shortlist[query_rows_N] = ranks.gather_array(shortlist[rows])
    total, negatives, positives, reached = ranks.gather_array(sums[None]).sum(0).tolist()
    return shortlist, {
        "queries": len(query_ND), "negative_score": total / max(negatives, 1),
        "positives_found": reached / max(positives, 1), "seconds": time.perf_counter() - begin_time,
    }  # fmt: skip


def _scores(query_ND: np.ndarray, label_LD: torch.Tensor, pairs: sp.csr_matrix) -> np.ndarray:
    """Inner products of the pairs [N, L] of some queries, float32 [E]."""
    row_E = torch.from_numpy(np.repeat(np.arange(len(query_ND)), np.diff(pairs.indptr))).to(label_LD.device)
    label_E = torch.from_numpy(pairs.indices.astype(np.int64)).to(label_LD.device)
    query = torch.from_numpy(np.require(query_ND, requirements=["C", "W"])).to(label_LD)
    pieces = zip(row_E.split(_PAIRS), label_E.split(_PAIRS), strict=True)
    return torch.cat([torch.linalg.vecdot(query[row], label_LD[label]) for row, label in pieces]).cpu().numpy()


def _pattern(matrix: sp.csr_matrix) -> sp.csr_matrix:
    return sp.csr_matrix((np.ones(len(matrix.indices), np.int8), matrix.indices, matrix.indptr), matrix.shape)
