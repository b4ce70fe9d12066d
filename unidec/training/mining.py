"""Hard negatives: for each query the best-scored labels that are neither its positives nor its filter pairs.

Legend: N mined queries, B queries in a block, L labels, D dimensions, K candidates of a query, H shortlist places, Q
pairs.

Source: UniDEC, H_i = top-k of a search without P_i (exact here), refreshed every T epochs, |H_i| = eta x T. Filter
pairs (the query is the label itself) must leave it too: such a label scores best and is no negative (spec, detail 6).

Several ranks: each mines whole blocks of the queries among all labels. Of equal scores the lower label comes first, so
the tiles of labels do not decide what is found.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from unidec.model.search import query_block, score_tiles
from unidec.progress import progress
from unidec.training.distributed import ALONE, Ranks
from unidec.training.sampler import contains, row_entries

BLOCK = 512  # queries compared with all labels at a time
_SPARE = 32  # candidates beyond those wanted, to tell equal scores apart


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
    """Mines `num_negatives` (eta x T) labels for each query.

    Each block is searched for `num_negatives` + the most excluded pairs of a query in it, then those are dropped.

    Args:
        query_ND: float32 [N, D] query vectors; query_rows_N: int64 [N], their data set rows, each once.
        label_LD: float32 [L, D] label vectors; with several ranks this rank's part of them.
        relevance, filter_pairs: csr [data set rows, L].
        num_negatives: H, places of a shortlist.
        device: of the exact search; None: where the vectors are.
        ranks: processes that share the work; each has all queries, and gets the whole shortlist.

    Returns:
        Mined labels by data set row, best first, int32 [data set rows, H], -1 where there is none; and a report:
        `queries`, `short_rows` (queries with fewer than H negatives), `negative_score` (mean over all negatives),
        `positive_first` (share of the queries with a positive whose best label, filter pairs aside, is one),
        `positive_rank` (mean rank of their first positive, 1 is best; one that was not among the candidates counts as
        the place behind them), `positive_found` (share found among the candidates), `seconds`.

    Raises:
        DataError: vectors that are not finite.
    """
    begin_time = time.perf_counter()
    shortlist = np.full((relevance.shape[0], num_negatives), -1, dtype=np.int32)
    sums, label_LD = np.zeros(8), ranks.gather_array(label_LD)
    width_N = np.diff(relevance.indptr)[query_rows_N] + np.diff(filter_pairs.indptr)[query_rows_N] + num_negatives
    # blocks are those of one rank: their bits, and how far they look, depend on their size
    block = query_block(len(label_LD), BLOCK)
    own = slice(*(min(block * number, len(query_ND)) for number in ranks.part(-(-len(query_ND) // block))))
    own_rows = query_rows_N[own]
    with progress(total=len(own_rows), desc="mine hard negatives", unit="query") as bar:
        for begin, end, score_BK, label_BK in _exact_blocks(query_ND[own], label_LD, width_N[own], block, device):
            bar.update(end - begin)
            rows_B = own_rows[begin:end]
            positive_BK = _is_pair(relevance, rows_B, label_BK)
            aside_BK = (_is_pair(filter_pairs, rows_B, label_BK) & ~positive_BK) | (label_BK < 0)
            # a stable sort of the flags brings what is kept to the front, in the order of the scores
            front_BH = np.argsort(positive_BK | aside_BK, axis=1, kind="stable")[:, :num_negatives]
            kept_BH = ~np.take_along_axis(positive_BK | aside_BK, front_BH, axis=1)
            found_BH = np.where(kept_BH, np.take_along_axis(label_BK, front_BH, axis=1), -1)
            shortlist[rows_B, : found_BH.shape[1]] = found_BH
            score_BH = np.take_along_axis(score_BK, front_BH, axis=1)
            has_positive_B = relevance.indptr[rows_B + 1] > relevance.indptr[rows_B]
            short, score = (kept_BH.sum(1) < num_negatives).sum(), score_BH[kept_BH].sum(dtype=np.float64)
            sums += [len(rows_B), short, kept_BH.sum(), score, *_positive_sums(positive_BK, aside_BK, has_positive_B)]
    if not ranks.alone:
        shortlist[query_rows_N] = ranks.gather_array(shortlist[own_rows])
        sums = ranks.gather_array(sums[None]).sum(0)
    queries, short_rows, negatives, score, positives, found, first, rank = sums.tolist()
    report = {
        "queries": int(queries), "short_rows": int(short_rows), "negative_score": score / max(negatives, 1),
        "positive_first": first / max(positives, 1), "positive_rank": rank / max(positives, 1),
        "positive_found": found / max(positives, 1), "seconds": time.perf_counter() - begin_time,
    }  # fmt: skip
    return shortlist, report


def _positive_sums(positive_BK: np.ndarray, aside_BK: np.ndarray, has_positive_B: np.ndarray) -> list[int]:
    """Queries with a positive, those where it was found, those where it is first, and the sum of its ranks."""
    rank_BK = np.cumsum(~aside_BK, axis=1)  # filter pairs take no rank, as in evaluation
    found_B = positive_BK.any(axis=1)
    rank_B = np.where(found_B, rank_BK[np.arange(len(rank_BK)), positive_BK.argmax(axis=1)], rank_BK[:, -1] + 1)
    return [has_positive_B.sum(), found_B.sum(), (found_B & (rank_B == 1)).sum(), rank_B[has_positive_B].sum()]


def _exact_blocks(
    query_ND: np.ndarray, label_LD: np.ndarray, width_N: np.ndarray, block: int, device: str | torch.device | None
) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
    num_labels, before = label_LD.shape[0], (torch.empty(0, 0), torch.empty(0, 0))
    for begin, end, first, score_BT in score_tiles(query_ND, label_LD, block, device):
        width = int(width_N[begin:end].max())
        score_BK, label_BK = best_labels(score_BT, min(width, score_BT.shape[1]))
        label_BK += first
        if first:  # with the best of the tiles before, whose labels are lower
            score_BK, place_BK = torch.cat([before[0], score_BK], dim=1).sort(dim=1, descending=True, stable=True)
            label_BK = torch.cat([before[1], label_BK], dim=1).gather(1, place_BK)
        before = score_BK[:, :width], label_BK[:, :width]
        if first + score_BT.shape[1] == num_labels:
            yield begin, end, before[0].cpu().numpy(), before[1].cpu().numpy()


def best_labels(score_BL: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` largest scores of each row and their labels, best first, of equal scores the lower label first.

    `topk` alone takes any of those that are equal: some more than `width` are asked for, so that only a longer run of
    equal scores needs a second look at the whole row.
    """
    num_labels = score_BL.shape[1]
    score_BK, label_BK = score_BL.topk(min(width + _SPARE, num_labels), dim=1)
    if label_BK.shape[1] < num_labels:
        cut_B = score_BK[:, width - 1] == score_BK[:, -1]  # more of the last score may have been left out
        rows_T = cut_B.nonzero().squeeze(1)
        if len(rows_T):
            score_TL, last_T1 = score_BL[rows_T], score_BK[rows_T, width - 1 : width]
            above_TL, equal_TL = score_TL > last_T1, score_TL == last_T1
            room_T1 = width - above_TL.sum(1, keepdim=True)
            taken_TL = above_TL | (equal_TL & (equal_TL.cumsum(1, dtype=torch.int32) <= room_T1))
            # what is behind `width` sorts last and is cut off below
            found_TW = taken_TL.nonzero()[:, 1].view(-1, width)
            score_BK[rows_T, :width], score_BK[rows_T, width:] = score_TL.gather(1, found_TW), -torch.inf
            label_BK[rows_T, :width] = found_TW
    label_BK, place_BK = label_BK.sort(dim=1)
    score_BK, order_BK = score_BK.gather(1, place_BK).sort(dim=1, descending=True, stable=True)
    return score_BK[:, :width], label_BK.gather(1, order_BK)[:, :width]


def _is_pair(matrix: sp.csr_matrix, rows_B: np.ndarray, label_BK: np.ndarray) -> np.ndarray:
    """Whether (row, label) is stored in the matrix, bool [B, K]."""
    row_Q, label_Q, _ = row_entries(matrix, rows_B)
    width = matrix.shape[1]
    key_BK = np.arange(len(rows_B))[:, None] * width + label_BK
    return contains(np.sort(row_Q * width + label_Q), key_BK) & (label_BK >= 0)
