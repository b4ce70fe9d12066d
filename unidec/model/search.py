"""Exact search: the best labels of each query by inner product, in tiles of queries and labels.

Legend: N queries, L labels, D dimensions, B queries in a block, T labels of a tile, K results a query, E excluded pairs
of a block.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from unidec.errors import DataError

MAX_BLOCK_SCORES = 1 << 26  # entries of a tile of scores: at most 256 MB of float32, whatever the number of labels
LABELS_AT_ONCE = 1 << 16  # of a tile: selecting the best of a row is five times as fast where the row fits the cache


def _as_matrix(vectors: np.ndarray | Tensor, name: str, device: str | torch.device | None) -> Tensor:
    if isinstance(vectors, np.ndarray):
        # torch shares memory with writable arrays only; a read-only memory map is copied.
        tensor = torch.from_numpy(np.require(vectors, requirements=["C", "W"]))
    else:
        tensor = vectors.detach()
    if tensor.ndim != 2:
        raise DataError(f"{name} vectors must be a matrix", got=tuple(tensor.shape), expected="[rows, D]")
    tensor = tensor.to(device=device, dtype=torch.float32)
    bad = torch.nonzero(~torch.isfinite(tensor.sum(1))).flatten()[:5].tolist()  # a NaN would sort above every score
    if bad:
        raise DataError(f"{name} vectors are not finite", got=f"rows {bad}", fix="look at the last training steps")
    return tensor


def query_block(num_labels: int, block: int = 512) -> int:
    """Queries of a block: fewer than asked for where a tile would hold more than `MAX_BLOCK_SCORES` scores."""
    return max(1, min(block, MAX_BLOCK_SCORES // max(min(num_labels, LABELS_AT_ONCE), 1)))


def exact_search(
    query_ND: np.ndarray | Tensor,
    label_LD: np.ndarray | Tensor,
    k: int,
    *,
    exclude: sp.csr_matrix | None = None,
    block: int = 512,
    device: str | torch.device | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The k labels with the largest inner product, best first: score_NK float32, label_NK int64; -inf and -1 where a
    query has fewer than k labels.

    Args:
        query_ND, label_LD: finite.
        k: results a query; may exceed L.
        exclude: csr [N, L], pairs that must not be returned, by position in `query_ND`; stored zeros count.
        block: queries at a time, at most.
        device: where to compute; None: where the vectors are.

    Raises:
        DataError: vectors of another shape or not finite, or `exclude` of another shape.
    """
    query, label = _as_matrix(query_ND, "query", device), _as_matrix(label_LD, "label", device)
    if query.shape[1] != label.shape[1]:
        raise DataError("queries and labels differ in width", got=query.shape[1], expected=label.shape[1])
    num_queries, num_labels = len(query), len(label)
    if exclude is not None and exclude.shape != (num_queries, num_labels):
        raise DataError("excluded pairs differ in shape", got=exclude.shape, expected=(num_queries, num_labels))
    score_NK = np.full((num_queries, k), -np.inf, dtype=np.float32)
    label_NK = np.full((num_queries, k), -1, dtype=np.int64)
    step = query_block(num_labels, block)
    for begin in range(0, num_queries, step):
        end = min(begin + step, num_queries)
        best_BK, best_label_BK = query.new_empty(end - begin, 0), torch.empty(end - begin, 0)
        for first in range(0, num_labels, LABELS_AT_ONCE):
            score_BT = query[begin:end] @ label[first : first + LABELS_AT_ONCE].T
            if exclude is not None:
                _leave_out(score_BT, exclude, begin, end, first)
            score_BK, label_BK = score_BT.topk(min(k, score_BT.shape[1]), dim=1)
            label_BK = (label_BK + first).masked_fill(score_BK == -torch.inf, -1)
            if first:  # with the best of the tiles before
                score_BK, label_BK = torch.cat([best_BK, score_BK], dim=1), torch.cat([best_label_BK, label_BK], dim=1)
                score_BK, order_BK = score_BK.topk(min(k, score_BK.shape[1]), dim=1)
                label_BK = label_BK.gather(1, order_BK)
            best_BK, best_label_BK = score_BK, label_BK
        score_NK[begin:end, : best_BK.shape[1]] = best_BK.cpu().numpy()
        label_NK[begin:end, : best_BK.shape[1]] = best_label_BK.cpu().numpy()
    return score_NK, label_NK


def _leave_out(score_BT: Tensor, exclude: sp.csr_matrix, begin: int, end: int, first: int) -> None:
    """Give the excluded pairs of a tile the score -inf."""
    row_E = np.repeat(np.arange(end - begin), np.diff(exclude.indptr[begin : end + 1]))
    label_E = np.asarray(exclude.indices[int(exclude.indptr[begin]) : int(exclude.indptr[end])], dtype=np.int64) - first
    here_E = (label_E >= 0) & (label_E < score_BT.shape[1])
    row, label = (torch.from_numpy(x[here_E]).to(score_BT.device) for x in (row_E, label_E))
    score_BT[row, label] = -torch.inf
