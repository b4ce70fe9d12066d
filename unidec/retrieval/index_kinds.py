"""The kinds of label index: the faiss index of each, how it is trained and filled, and changed for other labels.

    kind       held for each label                    exact?  which labels are compared
    flat       float32                                yes     all
    sq8        a byte a dimension                     two     all
    pq         4 bits for `code_dims` dimensions      two     all
    hnsw       float32 and a graph                    scores  those that a walk through the graph meets
    hnsw-sq8   a byte a dimension and a graph         two     the same
    ivf-sq8    a byte a dimension, in lists           two     those in the `probes` nearest lists
    ivf-pq     4 bits for `code_dims`, in lists       two     the same

"two": two stages. The compressed vectors choose candidates, which are scored exactly on the float32 vectors
(`label_rows.py`). Codes of 4 bits are searched with faiss's fast scan; a file holds them in faiss's plain layout, and
they are packed when it is loaded.

Legend: L labels, P rows, S rows whose vectors are new, X bytes of a code; width: of the vectors as faiss has them.
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
from unidec.retrieval.label_rows import LabelRows

Kind = Literal["flat", "sq8", "pq", "hnsw", "hnsw-sq8", "ivf-sq8", "ivf-pq"]
KINDS: tuple[Kind, ...] = get_args(Kind)
COMPRESSED: frozenset[Kind] = frozenset({"sq8", "pq", "hnsw-sq8", "ivf-sq8", "ivf-pq"})
GRAPHS: frozenset[Kind] = frozenset({"hnsw", "hnsw-sq8"})
LISTS: frozenset[Kind] = frozenset({"ivf-sq8", "ivf-pq"})
PACKED: frozenset[Kind] = frozenset({"pq", "ivf-pq"})

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

    def width(self, kind: Kind, dim: int) -> int:
        """Of the vectors as faiss has them: padded with zeros to a multiple of `code_dims` where codes are packed."""
        return -(-dim // self.code_dims) * self.code_dims if kind in PACKED else dim

    def factory(self, kind: Kind, dim: int, num_labels: int) -> str:
        """What `faiss.index_factory` makes the index from."""
        product = f"PQ{self.width(kind, dim) // self.code_dims}x4np"
        lists = f"IVF{self.num_lists(num_labels)}"
        strings: dict[Kind, str] = {
            "flat": "Flat", "sq8": "SQ8", "pq": product, "hnsw": f"HNSW{self.links},Flat",
            "hnsw-sq8": f"HNSW{self.links},SQ8", "ivf-sq8": f"{lists},SQ8", "ivf-pq": f"{lists},{product}",
        }  # fmt: skip
        if kind not in strings:
            raise ValueError(f"unknown kind of index {kind!r}, expected one of {', '.join(KINDS)}")
        return strings[kind]


def build_index(vectors: LabelRows, kind: Kind, options: IndexOptions, threads: int = 1, show: bool = False) -> Any:
    """A faiss index over all rows, in the form that is written to a file; arguments as of `LabelIndex.build`."""
    faiss, (num_labels, dim) = faiss_module(), vectors.shape
    string = options.factory(kind, dim, num_labels)
    index = faiss.index_factory(options.width(kind, dim), string, faiss.METRIC_INNER_PRODUCT)
    if kind in GRAPHS:
        index.hnsw.efConstruction, index.hnsw.efSearch = options.build, options.search
    with faiss_threads(threads), contextlib.ExitStack() as stack:
        if not index.is_trained:
            _train(index, kind, vectors)
        bar = stack.enter_context(progress(total=num_labels, desc=f"index {kind}", unit="label")) if show else None
        for rows in blocks(np.arange(num_labels), _GRAPH_ROWS_AT_ONCE if kind in GRAPHS else ROWS_AT_ONCE):
            index.add(checked_rows(vectors, rows, index.d))
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


def changed_codes(index: Any, kind: Kind, source_L: Rows, vectors: LabelRows, fresh_S: Rows) -> Any:
    """sq8, pq and ivf: the codes of labels that stay, moved to their new rows, and those of fresh rows.

    Args: as of `LabelIndex.changed`; index: the old one, only read.
    """
    faiss, new = faiss_module(), owned_copy(index)
    old_rows = source_L.copy()
    old_rows[fresh_S] = -1
    kept = np.flatnonzero(old_rows >= 0)
    if kind in LISTS:
        row_of_old = np.full(index.ntotal, -1, dtype=np.int64)
        row_of_old[old_rows[kept]] = kept
        new.remove_ids(np.flatnonzero(row_of_old < 0))
        for number in range(new.nlist):
            if size := new.invlists.list_size(number):
                ids = faiss.rev_swig_ptr(new.invlists.get_ids(number), size)
                ids[:] = row_of_old[ids]
        for some in blocks(fresh_S):
            new.add_with_ids(checked_rows(vectors, some, new.d), some)
        return new
    new.reset()
    old_LX = faiss.rev_swig_ptr(index.codes.data(), index.ntotal * index.code_size).reshape(index.ntotal, -1)
    codes_LX = np.empty((len(source_L), index.code_size), dtype=np.uint8)
    codes_LX[kept] = old_LX[old_rows[kept]]
    for some in blocks(fresh_S):
        codes_LX[some] = index.sa_encode(checked_rows(vectors, some, index.d))
    new.add_sa_codes(codes_LX)
    return new


def owned_copy(index: Any) -> Any:
    """A copy that can be changed: an index that was mapped into memory has views into the file."""
    return faiss_module().deserialize_index(faiss_module().serialize_index(index))


def blocks(rows: Rows, size: int = ROWS_AT_ONCE) -> Iterator[Rows]:
    """So many rows at a time; one empty block where there are none."""
    for start in range(0, max(1, len(rows)), size):
        yield rows[start : start + size]


def checked_rows(vectors: LabelRows, rows_P: Rows, width: int) -> Floats:
    """float32 [P, width], contiguous, padded with zeros.

    Raises:
        ValueError: a number that is not finite.
    """
    array = vectors.take(rows_P)
    check_finite(array, "vectors_LD", rows_P)
    return padded(array, width)


def check_finite(array: Floats, name: str, rows: Rows | None = None) -> None:
    """ValueError: a row is not finite; `rows`: their numbers."""
    if not (is_finite := np.isfinite(array).all(axis=1)).all():
        row = int(np.flatnonzero(~is_finite)[0])
        raise ValueError(f"{name} must be finite, row {row if rows is None else rows[row]} is not")


def padded(array_PD: Floats, width: int) -> Floats:
    """float32 [P, width], contiguous: zeros behind the columns that are there."""
    missing = width - array_PD.shape[1]
    return np.pad(array_PD, ((0, 0), (0, missing))) if missing else np.ascontiguousarray(array_PD)


def _train(index: Any, kind: Kind, vectors: LabelRows) -> None:
    """Learn centroids and ranges of a sample of the rows (always the same one)."""
    num_labels = vectors.shape[0]
    wanted = max(_TRAINING_ROWS, _ROWS_A_LIST * index.nlist if kind in LISTS else 0)
    rows = np.arange(num_labels)
    if wanted < num_labels:
        rows = np.sort(np.random.default_rng(0).choice(num_labels, wanted, replace=False))
    sample = checked_rows(vectors, rows, index.d)
    if kind in PACKED:
        index.pq.cp.niter, index.pq.cp.min_points_per_centroid = _ROUNDS, 1
        if len(sample) < _CODES:
            sample = np.resize(sample, (_CODES, index.d))  # faiss wants a row for each centroid
    if kind in LISTS:
        index.cp.niter, index.cp.min_points_per_centroid = _ROUNDS, 1
        if index.nlist > FLAT_CENTROIDS:  # a k-means of k-means
            from faiss.contrib.clustering import two_level_clustering

            tops = round(index.nlist**0.5)
            settings = {"clustering_niter": _ROUNDS, "spherical": True, "min_points_per_centroid": 1}
            index.quantizer.add(two_level_clustering(sample, tops, index.nlist, **settings)[0])
    index.train(sample)
