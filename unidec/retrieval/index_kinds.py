"""The kinds of label index: the faiss index of each, and how it is trained and filled.

    kind       held for each label                    exact?  which labels are compared
    flat       float32                                yes     all
    pq         4 bits for `code_dims` dimensions      two     all
    hnsw       float32 and a graph                    scores  those that a walk through the graph meets
    ivf-pq     4 bits for `code_dims`, in lists       two     those in the `probes` nearest lists

"two": two stages. The codes choose candidates, which are scored exactly on the float32 vectors (`LabelRows`). They are
searched with faiss's fast scan; a file holds them in faiss's plain layout, and they are packed when it is loaded.

Legend: L labels, P rows; width: of the vectors as faiss has them.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from unidec.errors import UnidecError
from unidec.progress import progress
from unidec.retrieval.scoring_space import LabelRows

Kind = Literal["flat", "pq", "hnsw", "ivf-pq"]
OldKind = Literal["sq8", "hnsw-sq8", "ivf-sq8"]
KINDS: tuple[Kind, ...] = get_args(Kind)
REPLACED: dict[str, Kind] = {"sq8": "pq", "hnsw-sq8": "pq", "ivf-sq8": "ivf-pq"}
"""Kinds of older bundles, and what takes their place."""
COMPRESSED: frozenset[Kind] = frozenset({"pq", "ivf-pq"})

FLAT_CENTROIDS = 1024
"""Up to so many centroids of lists are trained at once and compared one by one."""
ROWS_AT_ONCE = 1 << 16  # added at a time: 128 MB at 512 dimensions
_GRAPH_ROWS_AT_ONCE = 1 << 12  # a graph grows slowly, and its progress is shown
_TRAINING_ROWS = 1 << 16  # of a quantiser; more change its centroids little
_ROWS_A_LIST = 40  # faiss asks for 39
_ROUNDS = 10  # of k-means; recall does not change with faiss's 25, the time does
_CODES = 16  # of 4 bits
_BLAS_FROM = 4  # queries: from so many on a flat search is one matrix product, a sixth of their scans' time

Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]
Count = Annotated[int, Field(ge=1, le=1 << 40)]
CountOrAuto = Annotated[int, Field(ge=0, le=1 << 40)]


def faiss_module() -> Any:
    """faiss, imported on first use: it comes with one of two extras, and data and training stages do not need it.

    Raises:
        UnidecError: it is not installed, or broken.
    """
    faiss: Any = sys.modules.get("faiss")
    if faiss is None:
        try:
            import faiss
        except ImportError as error:
            raise UnidecError(
                f"faiss cannot be imported: {error}",
                fix="install one of the extras, not both: pip install 'unidec-xmc[cpu]' or 'unidec-xmc[gpu]'",
            ) from error
    if not hasattr(faiss, "IndexHNSWFlat"):
        raise UnidecError(
            "the installed faiss is broken (faiss-cpu and faiss-gpu over each other, or a folder called faiss)",
            where=str(getattr(faiss, "__file__", None)),
            fix="pip uninstall faiss-cpu faiss-gpu, then install one of them",
        )
    faiss.cvar.distance_compute_blas_threshold = _BLAS_FROM  # of 1.15: 128,000, that is never
    return faiss


@contextlib.contextmanager
def faiss_threads(threads: int) -> Iterator[None]:
    """So many threads for faiss calls of this thread; 0: as many as it would take."""
    faiss = faiss_module()
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(threads or before)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


class IndexOptions(BaseModel):
    """How an index is built and searched; what a kind has no use for is ignored.

    Attributes:
        links, build, search: M, efConstruction and efSearch of HNSW.
        lists: into which ivf sorts the labels. 0: as many as `num_lists` returns.
        copies: not used; in the options of older bundles.
        probes: lists that a search looks into. 0: as many as `num_probes` returns.
        code_dims: dimensions that share a code of 4 bits.
        rescore: candidates for each result that are scored exactly.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    links: Count = 32
    build: Count = 200
    search: Count = 200
    lists: CountOrAuto = 0
    copies: Annotated[int, Field(ge=0, le=2)] = 0
    probes: CountOrAuto = 0
    code_dims: Count = 4
    rescore: Count = 8

    def num_lists(self, num_labels: int) -> int:
        """Lists: `lists`, or 16 x the square root of L, but with 64 labels a list; never with fewer than 8."""
        auto = min(round(16 * math.sqrt(num_labels)), num_labels // 64)
        return max(1, min(self.lists or auto, num_labels // 8))

    def num_probes(self, num_lists: int) -> int:
        """Lists that a search looks into: `probes`, or a 12th of them, at least 8."""
        return min(self.probes or max(8, num_lists // 12), num_lists)

    def empty(self, kind: Kind, dim: int, num_labels: int) -> Any:
        """An empty faiss index for vectors of width `dim`, padded to a multiple of `code_dims` where they are coded.

        Raises:
            ValueError: an unknown kind.
        """
        faiss, pieces = faiss_module(), -(-dim // self.code_dims)
        product, lists = f"PQ{pieces}x4np", f"IVF{self.num_lists(num_labels)}"
        strings = {"flat": "Flat", "pq": product, "hnsw": f"HNSW{self.links},Flat", "ivf-pq": f"{lists},{product}"}
        if kind not in strings:
            raise ValueError(f"unknown kind of index {kind!r}, expected one of {', '.join(KINDS)}")
        width = pieces * self.code_dims if kind in COMPRESSED else dim
        return faiss.index_factory(width, strings[kind], faiss.METRIC_INNER_PRODUCT)


def build_index(vectors: LabelRows, kind: Kind, options: IndexOptions, threads: int = 1, show: bool = False) -> Any:
    """A faiss index over all rows, in the form that is written to a file; arguments as of `LabelIndex.build`."""
    num_labels, dim = vectors.shape
    index = options.empty(kind, dim, num_labels)
    if kind == "hnsw":
        index.hnsw.efConstruction, index.hnsw.efSearch = options.build, options.search
    with faiss_threads(threads), contextlib.ExitStack() as stack:
        if not index.is_trained:
            _train(index, kind, vectors)
        bar = stack.enter_context(progress(total=num_labels, desc=f"index {kind}", unit="label")) if show else None
        for rows in blocks(np.arange(num_labels), _GRAPH_ROWS_AT_ONCE if kind == "hnsw" else ROWS_AT_ONCE):
            index.add(_checked_rows(vectors, rows, index.d))
            if bar is not None:
                bar.update(len(rows))
    return index


def searcher(index: Any, kind: Kind) -> Any:
    """What is searched: the same index, or its codes packed for fast scan; many centroids are then searched by codes
    of their own, the nearest of them compared exactly."""
    faiss = faiss_module()
    if kind == "pq":
        return faiss.IndexPQFastScan(index)
    if kind != "ivf-pq":
        return index
    packed = faiss.IndexIVFPQFastScan(index)
    if index.nlist > FLAT_CENTROIDS and index.d % 2 == 0:
        centroid_CD = faiss.downcast_index(index.quantizer).reconstruct_n(0, index.nlist)
        codes = faiss.index_factory(index.d, f"PQ{index.d // 2}x4fs", faiss.METRIC_INNER_PRODUCT)
        codes.pq.cp.niter = 4
        codes.train(centroid_CD[:: max(1, len(centroid_CD) // 4096)])
        codes.add(centroid_CD)
        packed.quantizer = faiss.IndexRefine(codes, index.quantizer)
        packed.referenced_objects = [codes, packed.quantizer]
    return packed


def blocks(rows: Rows, size: int = ROWS_AT_ONCE) -> Iterator[Rows]:
    """So many rows at a time; one empty block where there are none."""
    for start in range(0, max(1, len(rows)), size):
        yield rows[start : start + size]


def padded(array_PD: Floats, width: int) -> Floats:
    """float32 [P, width], contiguous: zeros behind the columns that are there."""
    return np.ascontiguousarray(np.pad(array_PD, ((0, 0), (0, width - array_PD.shape[1]))))


def _checked_rows(vectors: LabelRows, rows_P: Rows, width: int) -> Floats:
    """float32 [P, width], contiguous, padded with zeros; a ValueError for a number that is not finite."""
    array = vectors.take(rows_P)
    if not (finite_P := np.isfinite(array).all(axis=1)).all():
        raise ValueError(f"vectors_LD must be finite, row {rows_P[np.argmin(finite_P)]} is not")
    return padded(array, width)


def _train(index: Any, kind: Kind, vectors: LabelRows) -> None:
    """Learn centroids of a sample of the rows (always the same one)."""
    num_labels = vectors.shape[0]
    wanted = max(_TRAINING_ROWS, _ROWS_A_LIST * index.nlist if kind == "ivf-pq" else 0)
    rows = np.arange(num_labels)
    if wanted < num_labels:
        rows = np.sort(np.random.default_rng(0).choice(num_labels, wanted, replace=False))
    sample = _checked_rows(vectors, rows, index.d)
    if len(sample) < _CODES:
        sample = np.resize(sample, (_CODES, index.d))  # faiss wants a row for each centroid
    index.pq.cp.niter, index.pq.cp.min_points_per_centroid = _ROUNDS, 1
    if kind == "ivf-pq":
        index.cp.niter, index.cp.min_points_per_centroid = _ROUNDS, 1
        if index.nlist > FLAT_CENTROIDS:  # a k-means of k-means
            from faiss.contrib.clustering import two_level_clustering

            tops = round(index.nlist**0.5)
            settings = {"clustering_niter": _ROUNDS, "spherical": True, "min_points_per_centroid": 1}
            index.quantizer.add(two_level_clustering(sample, tops, index.nlist, **settings)[0])
    index.train(sample)
