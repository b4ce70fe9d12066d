"""Exact search: the labels with the largest inner product for each query, computed in tiles of
queries and labels.

Legend: N queries, L labels, D dimensions, B queries of a block, T labels of a tile, K results for
each query, E
excluded pairs of a block.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from unidec.errors import DataError
from unidec.progress import progress

# most entries of a tile of scores: 256 MB of float32, whatever the number of labels
MAX_BLOCK_SCORES = 1 << 26
# labels of a tile: top-k of a row is five times as fast if the row fits the cache
LABELS_AT_ONCE = 1 << 16


def _as_matrix(
    vectors: np.ndarray | Tensor, name: str, device: str | torch.device | None
) -> Tensor:
    if isinstance(vectors, np.ndarray):
        # torch shares memory with writable arrays only; a read-only memory map is copied
        tensor = torch.from_numpy(np.require(vectors, requirements=["C", "W"]))
    else:
        tensor = vectors.detach()
    if tensor.ndim != 2:
        raise DataError(
            f"{name} vectors must be a matrix", got=tuple(tensor.shape), expected="[rows, D]"
        )
    tensor = tensor.to(device=device, dtype=torch.float32)
    # a NaN would rank above every score
    bad = torch.nonzero(~torch.isfinite(tensor.sum(1))).flatten()[:5].tolist()
    if bad:
        raise DataError(
            f"{name} vectors are not finite",
            got=f"rows {bad}",
            fix="check the last training losses",
        )
    return tensor


def query_block(num_labels: int, block: int = 512) -> int:
    """Queries of a block: `block`, or fewer so that a tile holds at most
    `MAX_BLOCK_SCORES` scores.
    """
    return max(1, min(block, MAX_BLOCK_SCORES // max(min(num_labels, LABELS_AT_ONCE), 1)))


def exact_search(
    query_ND: np.ndarray | Tensor,
    label_LD: np.ndarray | Tensor,
    k: int,
    *,
    exclude: sp.csr_matrix | None = None,
    block: int = 512,
    device: str | torch.device | None = None,
    desc: str | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The k labels with the largest inner product for each query, best first: score_NK float32,
    label_NK int64; -inf and -1 where a query has fewer than k labels. Under autocast products have
    its type.

    Args:
        query_ND, label_LD: finite vectors.
        k: results for each query; may exceed L.
        exclude: csr [N, L], pairs that must not be returned; stored zeros count as pairs.
        block: most queries at a time.
        device: where to compute; None: where the queries are. Labels that do not fit there are
            copied in parts, each once.
        desc: title of the progress bar; None: no progress bar.

    Raises:
        DataError: vectors of a wrong shape or not finite, or `exclude` of a wrong shape.
    """
    query = _as_matrix(query_ND, "query", device)
    label = _as_matrix(label_LD, "label", None)
    if query.shape[1] != label.shape[1]:
        raise DataError(
            "query and label vectors differ in width", got=query.shape[1], expected=label.shape[1]
        )
    num_queries = len(query)
    num_labels = len(label)
    if exclude is not None and exclude.shape != (num_queries, num_labels):
        raise DataError(
            "excluded pairs have a wrong shape",
            got=exclude.shape,
            expected=(num_queries, num_labels),
        )
    score_NK = np.full((num_queries, k), -np.inf, dtype=np.float32)
    label_NK = np.full((num_queries, k), -1, dtype=np.int64)
    step = query_block(num_labels, block)
    first = 0
    for part_TD in label.split(max(labels_that_fit(query.device, query.shape[1]), 1)):
        part_TD = part_TD.to(query.device)
        num_found = min(k, first)
        begins: Iterable[int] = range(0, num_queries, step)
        for begin in begins if desc is None else progress(begins, desc=desc, unit="block"):
            some = slice(begin, min(begin + step, num_queries))
            best = tuple(
                torch.from_numpy(x[some, :num_found]).to(query.device) for x in (score_NK, label_NK)
            )
            score_BK, label_BK = _best(
                query[some], part_TD, first, best, k, None if exclude is None else exclude[some]
            )
            score_NK[some, : score_BK.shape[1]] = score_BK.cpu().numpy()
            label_NK[some, : score_BK.shape[1]] = label_BK.cpu().numpy()
        first += len(part_TD)
    return score_NK, label_NK


def labels_that_fit(device: torch.device, width: int) -> int:
    """How many labels' float32 vectors fit into half of a GPU's free memory; on a CPU they are in
    memory already.
    """
    if device.type != "cuda":
        return 1 << 62
    return max(LABELS_AT_ONCE, torch.cuda.mem_get_info(device)[0] // (2 * 4 * max(width, 1)))


def _best(
    query_BD: Tensor,
    label_TD: Tensor,
    first: int,
    best: tuple[Tensor, ...],
    k: int,
    exclude: sp.csr_matrix | None,
) -> tuple[Tensor, ...]:
    """Scores and labels [B, K], best first, among the labels from number `first` on and the earlier
    results `best`.
    """
    for begin in range(0, len(label_TD), LABELS_AT_ONCE):
        score_BT = (query_BD @ label_TD[begin : begin + LABELS_AT_ONCE].T).float()
        if exclude is not None:
            _mask_excluded(score_BT, exclude, first + begin)
        score_BK, label_BK = score_BT.topk(min(k, score_BT.shape[1]), dim=1)
        label_BK = (label_BK + (first + begin)).masked_fill(score_BK == -torch.inf, -1)
        if first + begin:  # merge with the best of the labels before
            score_BK = torch.cat([best[0], score_BK], dim=1)
            label_BK = torch.cat([best[1], label_BK], dim=1)
            score_BK, order_BK = score_BK.topk(min(k, score_BK.shape[1]), dim=1)
            label_BK = label_BK.gather(1, order_BK)
        best = score_BK, label_BK
    return best


def _mask_excluded(score_BT: Tensor, exclude: sp.csr_matrix, first: int) -> None:
    """Set the score of excluded pairs [B, L] to -inf in the tile of labels from number
    `first` on.
    """
    row_E = np.repeat(np.arange(len(score_BT)), np.diff(exclude.indptr))
    label_E = np.asarray(exclude.indices, dtype=np.int64) - first
    here_E = (label_E >= 0) & (label_E < score_BT.shape[1])
    row, label = (torch.from_numpy(x[here_E]).to(score_BT.device) for x in (row_E, label_E))
    score_BT[row, label] = -torch.inf
