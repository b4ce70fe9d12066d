"""Hard negatives: for each query the best-scored labels that are neither its positives nor its filter pairs.

Legend: N mined queries, B queries in a block, L labels, D dimensions, K candidates of a query, H shortlist places, Q
pairs.

Source: UniDEC, H_i = top-k of a search without P_i (exact here), refreshed every T epochs, |H_i| = eta x T. Filter
pairs (the query is the label itself) must leave it too: such a label scores best and is no negative (spec, detail 6).

Several ranks: each scores all queries against its own part of the labels; the best of the parts are merged, block by
block, by the ranks in turn. Of equal scores the lower label comes first, so the parts do not decide what is found.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from unidec.errors import ConfigError, DataError
from unidec.model.search import query_block, score_tiles
from unidec.progress import Progress, progress
from unidec.training.distributed import ALONE, Ranks

BLOCK = 512  # queries compared with all labels at a time


class Shortlist(NamedTuple):
    """Mined labels by data set row, best first, int32 [rows of the data set, H], -1 where there is none; and a report.

    Report: `queries`, `short_rows` (queries with fewer than H negatives),
    `negative_score` (mean over all negatives), `positive_first` (share of the queries with a positive whose best label,
    filter pairs aside, is one), `positive_rank` (mean rank of their first positive, 1 is best; one that was not among
    the candidates counts as the place behind them), `positive_found` (share found among the candidates), `seconds`.
    """

    shortlist: np.ndarray
    report: dict[str, Any]


def mine_hard_negatives(
    query_ND: np.ndarray,
    query_rows_N: np.ndarray,
    label_LD: np.ndarray,
    relevance: sp.csr_matrix,
    filter_pairs: sp.csr_matrix,
    num_negatives: int,
    device: str | torch.device | None = None,
    ranks: Ranks = ALONE,
) -> Shortlist:
    """Mines `num_negatives` (eta x T) labels for each query.

    Each block is searched for `num_negatives` + the most excluded pairs of a query in it, then those are dropped.

    Args:
        query_ND: float32 [N, D] query vectors.
        query_rows_N: int64 [N], their data set rows, each once.
        label_LD: float32 [L, D] label vectors; with several ranks this rank's part of them.
        relevance: csr [data set rows, L].
        filter_pairs: csr [data set rows, L].
        num_negatives: H, places of a shortlist.
        device: of the exact search; None: where the vectors are.
        ranks: processes that share the work; each has all queries, and gets the whole shortlist.

    Returns:
        The shortlist and its report.

    Raises:
        DataError: shapes that do not fit, a row out of range, vectors that are not finite.
        ConfigError: num_negatives below 1.
    """
    begin_time = time.perf_counter()
    query_rows_N = np.asarray(query_rows_N, dtype=np.int64)
    first, last = ranks.part(relevance.shape[1])
    _check(query_ND, query_rows_N, label_LD, last - first, relevance, filter_pairs, num_negatives)
    shortlist = np.full((relevance.shape[0], num_negatives), -1, dtype=np.int32)
    totals, mined = _Totals(), [np.empty(0, dtype=np.int64)]
    width_N = np.diff(relevance.indptr)[query_rows_N] + np.diff(filter_pairs.indptr)[query_rows_N] + num_negatives
    # the same blocks on every rank: those of the largest part
    block = query_block(max(ranks.sizes(relevance.shape[1])), BLOCK)
    found = _merged(_exact_blocks(query_ND, label_LD, width_N, block, device), width_N, first, ranks)
    bar: Progress[int] = progress(total=len(query_rows_N), desc="mine hard negatives", unit="query")
    with bar:
        for begin, end, score_BK, label_BK in found:
            bar.update(end - begin)
            if score_BK is None or label_BK is None:  # another rank's turn
                continue
            rows_B = query_rows_N[begin:end]
            has_positive_B = relevance.indptr[rows_B + 1] > relevance.indptr[rows_B]
            positive_BK = _is_pair(relevance, rows_B, label_BK)
            filtered_BK = _is_pair(filter_pairs, rows_B, label_BK) & ~positive_BK
            aside_BK = filtered_BK | (label_BK < 0)
            front_BH, kept_BH = _first_kept(~positive_BK & ~aside_BK, num_negatives)
            found_BH = np.where(kept_BH, np.take_along_axis(label_BK, front_BH, axis=1), -1)
            shortlist[rows_B, : found_BH.shape[1]] = found_BH
            score_BH = np.take_along_axis(score_BK, front_BH, axis=1)
            totals.add(positive_BK, aside_BK, has_positive_B, kept_BH, score_BH, num_negatives)
            mined.append(rows_B)
    if not ranks.alone:
        own = np.concatenate(mined)
        rows_N = ranks.gather_array(own)
        shortlist[rows_N] = ranks.gather_array(shortlist[own])
        totals.sums = ranks.gather_array(totals.sums[None]).sum(0)
    report = totals.report() | {"seconds": time.perf_counter() - begin_time}
    return Shortlist(shortlist, report)


Block = tuple[int, int, np.ndarray, np.ndarray]
_SPARE = 32  # candidates beyond those wanted, to tell equal scores apart


def _merged(
    blocks: Iterator[Block], width_N: np.ndarray, first_label: int, ranks: Ranks
) -> Iterator[tuple[int, int, np.ndarray | None, np.ndarray | None]]:
    """The best candidates of all ranks' labels, each block on the rank whose turn it is and None on the others."""
    for number, (begin, end, score_BK, label_BK) in enumerate(blocks):
        if ranks.alone:
            yield begin, end, score_BK, label_BK
            continue
        width = int(width_N[begin:end].max())
        # scores and labels in one message: both are 4 bytes wide
        own = np.full((2, end - begin, width), -1, dtype=np.int32)
        own[0].view(np.float32)[:] = -np.inf
        own[0, :, : score_BK.shape[1]] = score_BK.astype(np.float32).view(np.int32)
        own[1, :, : score_BK.shape[1]] = np.where(label_BK >= 0, label_BK + first_label, -1)
        parts = ranks.collect(own, number % ranks.world)
        if parts is None:
            yield begin, end, None, None
            continue
        joined = np.concatenate(parts, axis=2)
        score_BJ, label_BJ = joined[0].view(np.float32), joined[1].astype(np.int64)
        best_BK = np.lexsort((label_BJ, -score_BJ), axis=1)[:, :width]
        score_BK, label_BK = (np.take_along_axis(x, best_BK, axis=1) for x in (score_BJ, label_BJ))
        # as one rank finds them: no more columns than there are labels
        filled = int((label_BK >= 0).any(0).sum())
        yield begin, end, score_BK[:, :filled], label_BK[:, :filled]


def _first_kept(kept_BK: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Places of the first `count` kept candidates of each row, in order, and whether each place holds one: [B, H]."""
    # A stable sort of the flags brings what is kept to the front, in the order of the scores.
    front_BH = np.argsort(~kept_BK, axis=1, kind="stable")[:, :count]
    return front_BH, np.take_along_axis(kept_BK, front_BH, axis=1)


def _check(
    query_ND: np.ndarray,
    query_rows_N: np.ndarray,
    label_LD: np.ndarray,
    num_own_labels: int,
    relevance: sp.csr_matrix,
    filter_pairs: sp.csr_matrix,
    num_negatives: int,
) -> None:
    if num_negatives < 1:
        raise ConfigError("mining needs at least one negative", where="pool.eta", got=num_negatives, expected=">= 1")
    if label_LD.shape[0] != num_own_labels:
        raise DataError("relevance and the vectors differ in size", got=label_LD.shape, expected=num_own_labels)
    if filter_pairs.shape != relevance.shape:
        raise DataError("relevance and filter pairs differ in size", got=filter_pairs.shape, expected=relevance.shape)
    if len(query_rows_N) != query_ND.shape[0]:
        raise DataError("query rows and query vectors differ in number", got=len(query_rows_N), expected=len(query_ND))
    if len(query_rows_N) and not (query_rows_N.min() >= 0 and query_rows_N.max() < relevance.shape[0]):
        expected = f"0 to {relevance.shape[0] - 1}"
        raise DataError("a query row is outside the data set", got=int(query_rows_N.max()), expected=expected)


def _exact_blocks(
    query_ND: np.ndarray, label_LD: np.ndarray, width_N: np.ndarray, block: int, device: str | torch.device | None
) -> Iterator[Block]:
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
            yield begin, end, _numpy(before[0]), _numpy(before[1])


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
            # what stands behind `width` sorts last and is cut off below
            found_TW = taken_TL.nonzero()[:, 1].view(-1, width)
            score_BK[rows_T, :width], score_BK[rows_T, width:] = score_TL.gather(1, found_TW), -torch.inf
            label_BK[rows_T, :width] = found_TW
    label_BK, place_BK = label_BK.sort(dim=1)
    score_BK, order_BK = score_BK.gather(1, place_BK).sort(dim=1, descending=True, stable=True)
    return score_BK[:, :width], label_BK.gather(1, order_BK)[:, :width]


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.cpu().numpy()


def _is_pair(matrix: sp.csr_matrix, rows_B: np.ndarray, label_BK: np.ndarray) -> np.ndarray:
    """Whether (row, label) is stored in the matrix, bool [B, K]."""
    start_B = matrix.indptr[rows_B].astype(np.int64)
    count_B = matrix.indptr[rows_B + 1] - start_B
    row_Q = np.repeat(np.arange(len(rows_B)), count_B)
    place_Q = (start_B - np.cumsum(count_B) + count_B)[row_Q] + np.arange(len(row_Q))
    if not len(place_Q):
        return np.zeros(label_BK.shape, dtype=bool)
    width = matrix.shape[1]
    key_Q = np.sort(row_Q * width + matrix.indices[place_Q])
    key_BK = np.arange(len(rows_B))[:, None] * width + label_BK
    place_BK = np.minimum(np.searchsorted(key_Q, key_BK), len(key_Q) - 1)
    return (key_Q[place_BK] == key_BK) & (label_BK >= 0)


class _Totals:
    """Sums over blocks behind the report."""

    def __init__(self) -> None:
        # queries, short rows, negatives, their scores, queries with a positive, found, first, ranks
        self.sums = np.zeros(8)

    def add(
        self,
        positive_BK: np.ndarray,
        aside_BK: np.ndarray,
        has_positive_B: np.ndarray,
        kept_BH: np.ndarray,
        score_BH: np.ndarray,
        num_negatives: int,
    ) -> None:
        rank_BK = np.cumsum(~aside_BK, axis=1)  # filter pairs take no rank, as in evaluation
        found_B = positive_BK.any(axis=1)
        rank_B = np.where(found_B, rank_BK[np.arange(len(rank_BK)), positive_BK.argmax(axis=1)], rank_BK[:, -1] + 1)
        self.sums += [
            len(kept_BH),
            (kept_BH.sum(1) < num_negatives).sum(),
            kept_BH.sum(),
            score_BH[kept_BH].sum(dtype=np.float64),
            has_positive_B.sum(),
            found_B.sum(),
            (found_B & (rank_B == 1)).sum(),
            rank_B[has_positive_B].sum(),
        ]

    def report(self) -> dict[str, Any]:
        queries, short_rows, negatives, score, with_positive, found, first, rank = self.sums.tolist()
        return {
            "queries": int(queries),
            "short_rows": int(short_rows),
            "negative_score": score / max(negatives, 1),
            "positive_first": first / max(with_positive, 1),
            "positive_rank": rank / max(with_positive, 1),
            "positive_found": found / max(with_positive, 1),
        }
