"""Exact search: the best labels of each query by inner product, in blocks of queries.

Legend: N queries, L labels, D dimensions, B queries in a block, K results a query, E excluded pairs in a block.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from unidec.errors import DataError

MAX_BLOCK_SCORES = 1 << 26  # entries of a block of scores: 256 MB of float32, whatever the number of labels


def _as_matrix(vectors: np.ndarray | Tensor, name: str, device: str | torch.device | None) -> Tensor:
    if isinstance(vectors, np.ndarray):
        # torch shares memory with writable arrays only; a read-only memory map is copied.
        tensor = torch.from_numpy(np.require(vectors, requirements=["C", "W"]))
    else:
        tensor = vectors.detach()
    if tensor.ndim != 2:
        raise DataError(f"{name} vectors must be a matrix", got=tuple(tensor.shape), expected="[rows, D]")
    tensor = tensor.to(device=device, dtype=torch.float32)
    if not bool(torch.isfinite(tensor).all()):
        bad = torch.nonzero(~torch.isfinite(tensor).all(1)).flatten()[:5].tolist()
        # A NaN would sort above every score.
        raise DataError(f"{name} vectors are not finite", got=f"rows {bad}", fix="look at the last training steps")
    return tensor


def score_blocks(
    query_ND: np.ndarray | Tensor,
    label_LD: np.ndarray | Tensor,
    block: int = 512,
    device: str | torch.device | None = None,
) -> Iterator[tuple[int, int, Tensor]]:
    """Inner products of all queries with all labels, block by block.

    Args:
        query_ND: float [N, D], finite.
        label_LD: float [L, D], finite.
        block: queries at a time; fewer where a block would hold more than `MAX_BLOCK_SCORES` scores.
        device: where to compute; None: where the vectors are.

    Yields:
        (first row, one past the last row, score_BL float32 on the device).

    Raises:
        DataError: vectors of another shape, or not finite.
    """
    query, label = _as_matrix(query_ND, "query", device), _as_matrix(label_LD, "label", device)
    if query.shape[1] != label.shape[1]:
        raise DataError("queries and labels differ in width", got=query.shape[1], expected=label.shape[1])
    step = max(1, min(block, MAX_BLOCK_SCORES // max(label.shape[0], 1)))
    for begin in range(0, query.shape[0], step):
        end = min(begin + step, query.shape[0])
        yield begin, end, query[begin:end] @ label.T


def exact_search(
    query_ND: np.ndarray | Tensor,
    label_LD: np.ndarray | Tensor,
    k: int,
    *,
    exclude: sp.csr_matrix | None = None,
    block: int = 512,
    device: str | torch.device | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The k labels with the largest inner product, best first.

    Args:
        query_ND: float [N, D], finite.
        label_LD: float [L, D], finite.
        k: results a query; may exceed L.
        exclude: csr [N, L], pairs that must not be returned, by position in `query_ND`; stored zeros count.
        block: queries at a time (memory: block x L scores).
        device: where to compute; None: where the vectors are.

    Returns:
        score_NK float32, label_NK int64; where a query has fewer than k labels, -inf and -1.

    Raises:
        DataError: vectors of another shape or not finite, or `exclude` of another shape.
    """
    num_queries, num_labels = query_ND.shape[0], label_LD.shape[0]
    if exclude is not None and exclude.shape != (num_queries, num_labels):
        raise DataError("excluded pairs differ in shape", got=exclude.shape, expected=(num_queries, num_labels))
    score_NK = np.full((num_queries, k), -np.inf, dtype=np.float32)
    label_NK = np.full((num_queries, k), -1, dtype=np.int64)
    width = min(k, num_labels)
    for begin, end, score_BL in score_blocks(query_ND, label_LD, block, device):
        if exclude is not None:
            first, last = int(exclude.indptr[begin]), int(exclude.indptr[end])
            row_E = np.repeat(np.arange(end - begin), np.diff(exclude.indptr[begin : end + 1]))
            label_E = np.asarray(exclude.indices[first:last], dtype=np.int64)
            score_BL[
                torch.from_numpy(row_E).to(score_BL.device), torch.from_numpy(label_E).to(score_BL.device)
            ] = -torch.inf
        score_BK, label_BK = score_BL.topk(width, dim=1)
        label_BK = label_BK.masked_fill(score_BK == -torch.inf, -1)
        score_NK[begin:end, :width] = score_BK.cpu().numpy()
        label_NK[begin:end, :width] = label_BK.cpu().numpy()
    return score_NK, label_NK
