"""The lists of an inverted index: their centroids, which list a label goes into, and which lists a query looks into.

With many small lists a query finds its labels in few of them, but then the centroids themselves take long to train, to
assign to and to search. So they are trained in two levels (a k-means of k-means), labels are assigned down that tree,
and a query searches 4-bit codes of the centroids.

Legend: N rows, T top clusters, C centroids (lists), D' width, B queries, P probed lists.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from unidec.retrieval.faiss_library import faiss_module

ROUNDS = 8
"""Of k-means: recall does not change with more."""
FLAT_CENTROIDS = 1024
"""Up to so many centroids are trained at once and searched one by one."""
_TOPS = 6  # top clusters whose lists are looked at when a label is assigned
_CODE_DIMS = 2
_CODE_ROUNDS = 4
_ASSIGNED_AT_ONCE = 1 << 14

Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]


def train_centroids(sample_ND: Floats, num: int) -> tuple[Floats, Rows, Floats]:
    """Centroids of unit length by spherical k-means, in two levels where they are many.

    Returns:
        top_TD; begin, int64 [T + 1]: lists of each top cluster; centroid_CD, C at most `num`.
    """
    if num <= FLAT_CENTROIDS:
        centroids = _kmeans(sample_ND, num)
        return _unit(centroids.mean(axis=0, keepdims=True)), np.array([0, len(centroids)]), centroids
    tops = round(num**0.5)
    top_TD = _kmeans(sample_ND[:: max(1, len(sample_ND) // (64 * tops))], tops)
    parts, begin = [], [0]
    nearest_N = np.concatenate([
        (sample_ND[start : start + _ASSIGNED_AT_ONCE] @ top_TD.T).argmax(axis=1)
        for start in range(0, len(sample_ND), _ASSIGNED_AT_ONCE)
    ])  # fmt: skip
    for top in range(tops):
        rows = sample_ND[nearest_N == top]
        wanted = max(1, round(num * len(rows) / len(sample_ND)))
        parts.append(_kmeans(rows, min(wanted, len(rows))) if len(rows) else top_TD[top : top + 1])
        begin.append(begin[-1] + len(parts[-1]))
    return top_TD, np.array(begin), np.concatenate(parts)


def assign(rows_ND: Floats, top_TD: Floats, begin: Rows, centroid_CD: Floats, first_N: Rows | None = None) -> Rows:
    """The list of each row, int64 [N]: the centroid of the largest product among those of its nearest top clusters.

    Args:
        first_N: the list that each row is in already: another one is chosen, near too, and so that what the row differs
            by from its centroid is at right angles to what it differs by from the first one's (SOAR; Sun et al. 2023,
            equation 5 with lambda 1). A query that is far from the one list is then likely near to the other.
    """
    out = np.zeros(len(rows_ND), dtype=np.int64)
    for start in range(0, len(rows_ND), _ASSIGNED_AT_ONCE):
        some = rows_ND[start : start + _ASSIGNED_AT_ONCE]
        num = min(_TOPS, len(top_TD))
        tops = np.argpartition(-(some @ top_TD.T), num - 1, axis=1)[:, :num]
        best, place = np.full(len(some), -np.inf, dtype=np.float32), np.zeros(len(some), dtype=np.int64)
        first = None if first_N is None else first_N[start : start + len(some)]
        apart = None if first is None else _unit(some - centroid_CD[first])
        for top in np.unique(tops):
            members = np.flatnonzero((tops == top).any(axis=1))
            near_CD = centroid_CD[begin[top] : begin[top + 1]]
            scores = some[members] @ near_CD.T
            if first is not None and apart is not None:
                along = np.einsum("nd,nd->n", apart[members], some[members])[:, None] - apart[members] @ near_CD.T
                scores -= 0.5 * along * along
                own = first[members] - begin[top]
                inside = np.flatnonzero((own >= 0) & (own < len(near_CD)))
                scores[inside, own[inside]] = -np.inf
            here = scores.argmax(axis=1)
            score = scores[np.arange(len(members)), here]
            better = score > best[members]
            best[members[better]], place[members[better]] = score[better], begin[top] + here[better]
        out[start : start + len(some)] = place
    return out


class CoarseSearch:
    """Which lists queries look into."""

    def __init__(self, centroid_CD: Floats) -> None:
        self.centroid_CD, self._codes = centroid_CD, None
        if len(centroid_CD) > FLAT_CENTROIDS:
            faiss, dim = faiss_module(), centroid_CD.shape[1]
            self._pad = -dim % _CODE_DIMS
            codes = faiss.IndexPQ(dim + self._pad, (dim + self._pad) // _CODE_DIMS, 4, faiss.METRIC_INNER_PRODUCT)
            codes.pq.cp.niter = _CODE_ROUNDS
            wide = np.pad(np.asarray(centroid_CD), ((0, 0), (0, self._pad)))
            codes.train(wide[:: max(1, len(wide) // 4096)])
            codes.add(wide)
            self._codes = faiss.IndexPQFastScan(codes)

    def search(self, queries_BD: Floats, num: int) -> tuple[Rows, Floats]:
        """int64 [B, P] lists, about the nearest ones, and float32 [B, P] exact products with their centroids."""
        if self._codes is None:
            scores = queries_BD @ self.centroid_CD.T
            lists = np.argpartition(-scores, num - 1, axis=1)[:, :num]
            return np.ascontiguousarray(lists), np.ascontiguousarray(np.take_along_axis(scores, lists, axis=1))
        wide = np.pad(queries_BD, ((0, 0), (0, self._pad))) if self._pad else queries_BD
        lists = self._codes.search(wide, num)[1]
        products = np.empty(lists.shape, dtype=np.float32)
        for row, query in enumerate(queries_BD):
            products[row] = self.centroid_CD[lists[row]] @ query
        return lists, products


def centroids_of(index: Any) -> Floats:
    """float32 [C, D'], a view into an inverted index of faiss."""
    faiss = faiss_module()
    flat = faiss.downcast_index(index.quantizer)
    return faiss.rev_swig_ptr(flat.get_xb(), index.nlist * index.d).reshape(index.nlist, index.d)


def _kmeans(rows_ND: Floats, num: int) -> Floats:
    faiss = faiss_module()
    kmeans = faiss.Kmeans(
        rows_ND.shape[1], num, niter=ROUNDS, spherical=True, min_points_per_centroid=1, max_points_per_centroid=1 << 12
    )
    kmeans.train(np.ascontiguousarray(rows_ND))
    return np.ascontiguousarray(kmeans.centroids)


def _unit(rows: Floats) -> Floats:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.float32(1e-12))
