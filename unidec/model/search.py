"""Exact search: the labels with the largest inner product for each query, computed in tiles of
queries and labels.

Legend: N queries, L labels, D dimensions, B queries of a block, T labels of a tile, K results for
each query.
"""

from __future__ import annotations

import itertools
from typing import Protocol

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from unidec.errors import DataError
from unidec.progress import progress

# maximum scores of a tile: 256 MB of float32, whatever the number of labels
MAX_BLOCK_SCORES = 1 << 26
# labels of a tile: top-k of a row is five times as fast if the row fits the cache
LABELS_AT_ONCE = 1 << 16


class RowSlices(Protocol):
    """Vectors that are computed or read for some rows at a time."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> np.ndarray | Tensor: ...


def finite_matrix(
    vectors: np.ndarray | Tensor,
    what: str,
    device: str | torch.device | None,
    rows: np.ndarray | range | None = None,
) -> Tensor:
    """Vectors in float32 on a device (None: where they are); raises DataError if they are not
    finite: a NaN would rank above every score.

    Args:
        what, rows: what they are, and their numbers if not 0 to N - 1, for the error.
    """
    if isinstance(vectors, np.ndarray):
        # torch shares memory with writable arrays only; a read-only memory map is copied
        vectors = torch.from_numpy(np.require(vectors, requirements=["C", "W"]))
    matrix = vectors.detach().to(device, torch.float32)
    is_bad = ~torch.isfinite(matrix.sum(1))
    if is_bad.any():
        bad = is_bad.nonzero().flatten()[:5].tolist()
        raise DataError(
            f"{what} are not finite",
            got=f"rows {bad if rows is None else [int(rows[row]) for row in bad]}",
            fix="check the last training losses",
        )
    return matrix


def query_block(num_labels: int, block: int) -> int:
    """Queries of a block: `block`, or fewer, so that a tile has at most `MAX_BLOCK_SCORES`."""
    tile = max(min(num_labels, LABELS_AT_ONCE), 1)
    return max(1, min(block, MAX_BLOCK_SCORES // tile))


def labels_that_fit(device: torch.device, width: int) -> int:
    """Number of labels whose vectors fit into half of a GPU's free memory; unlimited on a CPU."""
    if device.type != "cuda":
        return 1 << 62
    free, _ = torch.cuda.mem_get_info(device)
    bytes_a_label = 4 * max(width, 1)
    return max(LABELS_AT_ONCE, free // (2 * bytes_a_label))


def exact_search(
    query_ND: np.ndarray | Tensor,
    label_LD: RowSlices,
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
        block: maximum queries at a time.
        device: where to compute; None: where the queries are. Labels that are elsewhere are copied
            tile by tile.
        desc: title of the progress bar; None: no progress bar.

    Raises:
        DataError: vectors are not finite.
    """
    query = finite_matrix(query_ND, "query vectors", device)
    num_labels = len(label_LD)
    shape = (len(query), k)
    score_NK = query.new_full(shape, -torch.inf)
    label_NK = torch.full(shape, -1, device=query.device)
    step = query_block(num_labels, block)
    tiles = range(0, num_labels, LABELS_AT_ONCE)
    blocks = range(0, len(query), step)
    places = list(itertools.product(tiles, blocks))
    for first, begin in progress(places, desc=desc, unit="block"):
        if begin == 0:
            last = first + LABELS_AT_ONCE
            tile_TD = finite_matrix(
                label_LD[first:last], "label vectors", query.device, range(first, num_labels)
            )
            excluded = None if exclude is None else exclude[:, first:last]
        some = slice(begin, begin + step)
        score_BT = (query[some] @ tile_TD.T).float()
        if excluded is not None:
            pairs = excluded[some].tocoo()  # with stored zeros
            places_E = torch.from_numpy(np.stack(pairs.coords))
            score_BT[tuple(places_E)] = -torch.inf
        score_BK, place_BK = _top(score_BT, k)
        label_BK = (place_BK + first).masked_fill(score_BK == -torch.inf, -1)
        if first:  # merge with the best of the labels before
            known = (some, slice(min(k, first)))
            score_BK, order_BK = _top(torch.cat([score_NK[known], score_BK], dim=1), k)
            label_BK = torch.cat([label_NK[known], label_BK], dim=1).gather(1, order_BK)
        found = (some, slice(score_BK.shape[1]))
        score_NK[found] = score_BK
        label_NK[found] = label_BK
    return score_NK.cpu().numpy(), label_NK.cpu().numpy()


def _top(score_BT: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest entries of each row (or all), best first, and their positions."""
    score_BK, place_BK = score_BT.topk(min(k, score_BT.shape[1]), dim=1)
    return score_BK, place_BK


def recall(found_BK: NDArray[np.int64], exact_BK: NDArray[np.int64]) -> float:
    """Share of the exact results that another search found, over all queries, 0 to 1; 1 without any
    results.

    Both arguments are label rows, -1 for no result; K may differ between them.
    """
    is_result_BK = exact_BK >= 0
    num_results = is_result_BK.sum()
    if not num_results:
        return 1.0
    num_labels = max(exact_BK.max(), found_BK.max()) + 1
    first_key_B1 = num_labels * np.arange(len(exact_BK))[:, None]
    wanted = (exact_BK + first_key_B1)[is_result_BK]
    is_hit_BK = np.isin(found_BK + first_key_B1, wanted) & (found_BK >= 0)
    return float(is_hit_BK.sum() / num_results)
