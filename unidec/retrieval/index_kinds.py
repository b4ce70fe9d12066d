"""The kinds of label index: what faiss holds for each, how it is built, and how it goes over to another label set.

    kind       held for each label                    exact?  which labels are looked at
    flat       float32                                yes     all
    sq8        a byte a dimension                     two     all
    pq         4 bits for `code_dims` dimensions      two     all
    hnsw       float32 and a graph                    scores  those that a walk through the graph meets
    hnsw-sq8   a byte a dimension and a graph         two     the same
    ivf-sq8    a byte a dimension, in lists           two     those in the `probes` lists that are nearest
    ivf-pq     4 bits for `code_dims`, in lists       two     the same

"two": two stages. The compressed vectors choose candidates, which are scored exactly on the float32 vectors
(`label_rows.py`). Codes of 4 bits are searched with faiss's fast scan (look-up tables in registers; André, Kermarrec,
Le Scouarnec 2017); a file holds them unpacked, in faiss's plain layout, and they are packed when it is loaded.

Legend: L labels, P rows, D' width of the searched space (padded with zeros to a multiple of `code_dims` for pq).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from unidec.progress import progress
from unidec.retrieval.coarse import FLAT_CENTROIDS, assign, centroids_of, train_centroids
from unidec.retrieval.faiss_library import faiss_module, faiss_threads
from unidec.retrieval.label_rows import Vectors

Kind = Literal["flat", "sq8", "pq", "hnsw", "hnsw-sq8", "ivf-sq8", "ivf-pq"]
KINDS: tuple[Kind, ...] = get_args(Kind)
COMPRESSED: frozenset[Kind] = frozenset({"sq8", "pq", "hnsw-sq8", "ivf-sq8", "ivf-pq"})
GRAPHS: frozenset[Kind] = frozenset({"hnsw", "hnsw-sq8"})
LISTS: frozenset[Kind] = frozenset({"ivf-sq8", "ivf-pq"})
PACKED: frozenset[Kind] = frozenset({"pq", "ivf-pq"})

ROWS_AT_ONCE = 1 << 16  # added at a time: 128 MB at 512 dimensions
GRAPH_ROWS_AT_ONCE = 1 << 12  # a graph grows slowly, and its progress is to be seen
CENTROIDS = 16  # of 4 bits
_FRESH_AT_ONCE = 1 << 10  # compared with all centroids
_TRAINING_ROWS = 1 << 16  # of a quantiser; more change its centroids little
_ROWS_A_LIST = 40  # faiss asks for 39
_CODE_ROUNDS = 10  # of k-means; recall does not change with faiss's 25, the time does

Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]
Count = Annotated[int, Field(ge=1, le=1 << 40)]
CountOrAuto = Annotated[int, Field(ge=0, le=1 << 40)]


class IndexOptions(BaseModel):
    """How an index is built and searched; what a kind has no use for is ignored.

    Attributes:
        links, build, search: M, efConstruction and efSearch of HNSW.
        lists: into which ivf sorts the labels. 0: as many as `num_lists` says.
        copies: lists that a label stands in, 1 or 2. 0: 2 where there are more than 1,024 lists.
        probes: lists that a search looks into. 0: as many as `num_probes` says.
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

    def num_copies(self, kind: Kind, num_lists: int) -> int:
        """Lists that a label stands in."""
        if kind not in LISTS or num_lists < 2:
            return 1
        return self.copies or (2 if num_lists > FLAT_CENTROIDS else 1)

    def num_probes(self, num_lists: int) -> int:
        """Lists that a search looks into: `probes`, or a 32nd of them, at least 8."""
        return min(self.probes or max(8, num_lists // 32), num_lists)

    def padded(self, kind: Kind, dim: int) -> int:
        """Width of the vectors as faiss has them."""
        return -(-dim // self.code_dims) * self.code_dims if kind in PACKED else dim


def build_index(vectors: Vectors, kind: Kind, options: IndexOptions, threads: int = 1, show: bool = False) -> Any:
    """A faiss index over all rows, in the form that is written to a file.

    Args:
        vectors: of L labels.
        threads: of faiss; with more than one a graph differs from build to build. 0: all of faiss's.
        show: print progress.

    Raises:
        ValueError: a vector that is not finite.
    """
    num_labels, dim = vectors.shape
    index = _empty(kind, options.padded(kind, dim), num_labels, options)
    with faiss_threads(threads):
        put = _trained(index, kind, options, vectors)
        step = GRAPH_ROWS_AT_ONCE if kind in GRAPHS else ROWS_AT_ONCE
        starts: Any = range(0, num_labels, step)
        with (
            progress(total=num_labels, desc=f"index {kind}", unit="label") if show else contextlib.nullcontext() as bar
        ):
            for start in starts:
                rows = np.arange(start, min(start + step, num_labels))
                put(_checked_rows(vectors, rows, index.d), rows)
                if bar is not None:
                    bar.update(len(rows))
    return index


def searcher(index: Any, kind: Kind) -> Any:
    """What searches are made on: the same index, or its codes packed for fast scan."""
    if kind == "pq":
        return faiss_module().IndexPQFastScan(index)
    return faiss_module().IndexIVFPQFastScan(index) if kind == "ivf-pq" else index


def changed_codes(
    index: Any, kind: Kind, options: IndexOptions, source_L: Rows, vectors: Vectors, fresh_S: Rows
) -> Any:
    """sq8, pq and ivf: the codes of labels that stay, moved to their new rows, and those of fresh rows.

    Args: as of `LabelIndex.changed`; index: the old one, only read.
    """
    faiss = faiss_module()
    old_rows = source_L.copy()
    old_rows[fresh_S] = -1
    new = _untouched(index, kind, options)
    if kind in LISTS:
        _move_lists(index, new, old_rows)
        centroids = centroids_of(new)
        tree = centroids[:1], np.array([0, len(centroids)]), centroids  # few rows: all centroids are compared
        copies = options.num_copies(kind, new.nlist)
        for start in range(0, len(fresh_S), _FRESH_AT_ONCE):
            some = fresh_S[start : start + _FRESH_AT_ONCE]
            add_to_lists(new, _checked_rows(vectors, some, new.d), some, tree, copies)
        new.ntotal = copies * len(source_L)
        return new
    old_LX = faiss.rev_swig_ptr(index.codes.data(), index.ntotal * index.code_size).reshape(index.ntotal, -1)
    kept = old_rows >= 0
    codes_LX = np.empty((len(source_L), index.code_size), dtype=np.uint8)
    codes_LX[kept] = old_LX[old_rows[kept]]
    for some in _blocks(fresh_S):
        codes_LX[some] = index.sa_encode(_checked_rows(vectors, some, index.d))
    new.add_sa_codes(codes_LX)
    return new


def _empty(kind: Kind, dim: int, num_labels: int, options: IndexOptions) -> Any:
    faiss = faiss_module()
    product, eight = faiss.METRIC_INNER_PRODUCT, faiss.ScalarQuantizer.QT_8bit
    if kind == "flat":
        return faiss.IndexFlatIP(dim)
    if kind == "sq8":
        return faiss.IndexScalarQuantizer(dim, eight, product)
    if kind == "pq":
        return faiss.IndexPQ(dim, dim // options.code_dims, 4, product)
    if kind in GRAPHS:
        flat = kind == "hnsw"
        index = (faiss.IndexHNSWFlat if flat else faiss.IndexHNSWSQ)(*((dim,) if flat else (dim, eight)), options.links,
                                                                       product)  # fmt: skip
        index.hnsw.efConstruction, index.hnsw.efSearch = options.build, options.search
        return index
    if kind not in LISTS:
        raise ValueError(f"unknown kind of index {kind!r}, expected one of {', '.join(KINDS)}")
    lists = options.num_lists(num_labels)
    centroids = faiss.IndexFlatIP(dim)
    if kind == "ivf-sq8":
        index = faiss.IndexIVFScalarQuantizer(centroids, dim, lists, eight, product, True)
    else:
        index = faiss.IndexIVFPQ(centroids, dim, lists, dim // options.code_dims, 4, product)
    index.by_residual = True
    return index


def _trained(index: Any, kind: Kind, options: IndexOptions, vectors: Vectors) -> Callable[[Floats, Rows], None]:
    """Learn centroids and ranges of a sample of the rows (always the same one); returns what adds rows."""
    num_labels = vectors.shape[0]
    if index.is_trained:
        return lambda some_PD, rows_P: index.add(some_PD)
    wanted = max(_TRAINING_ROWS, _ROWS_A_LIST * index.nlist if kind in LISTS else 0)
    rows = np.arange(num_labels)
    if wanted < num_labels:
        rows = np.sort(np.random.default_rng(0).choice(num_labels, wanted, replace=False))
    sample = _checked_rows(vectors, rows, index.d)
    if kind in PACKED:
        index.pq.cp.niter, index.pq.cp.min_points_per_centroid = _CODE_ROUNDS, 1
        if len(sample) < CENTROIDS:
            sample = np.resize(sample, (CENTROIDS, index.d))  # faiss wants a row for each centroid
    if kind not in LISTS:
        index.train(sample)
        return lambda some_PD, rows_P: index.add(some_PD)
    tree = train_centroids(sample, index.nlist)
    set_centroids(index, tree[2])
    index.train(sample[:: max(1, len(sample) // _TRAINING_ROWS)])
    copies = options.num_copies(kind, index.nlist)
    return lambda some_PD, rows_P: add_to_lists(index, some_PD, rows_P, tree, copies)


def set_centroids(index: Any, centroid_CD: Floats) -> None:
    """Give an inverted index its centroids; its lists are as many."""
    faiss = faiss_module()
    index.quantizer.add(np.ascontiguousarray(centroid_CD))
    if index.nlist != len(centroid_CD):
        index.nlist = len(centroid_CD)
        lists = faiss.ArrayInvertedLists(index.nlist, index.code_size)
        index.replace_invlists(lists, True)
        lists.this.disown()  # the index owns them


def add_to_lists(index: Any, some_PD: Floats, rows_P: Rows, tree: tuple[Floats, Rows, Floats], copies: int) -> None:
    """Rows into one or two lists each, by the centroids as `train_centroids` gives them."""
    pointer = faiss_module().swig_ptr
    rows_P = np.ascontiguousarray(rows_P, dtype=np.int64)
    lists_P = assign(some_PD, *tree)
    index.add_core(len(some_PD), pointer(some_PD), pointer(rows_P), pointer(lists_P))
    if copies == 2:
        lists_P = assign(some_PD, *tree, lists_P)
        index.add_core(len(some_PD), pointer(some_PD), pointer(rows_P), pointer(lists_P))


def _untouched(index: Any, kind: Kind, options: IndexOptions) -> Any:
    """An index of the same training that holds nothing."""
    if kind not in LISTS:
        new = _empty(kind, index.d, 0, options)
        if kind == "sq8":
            new.sq = index.sq
        else:
            new.pq = index.pq
        new.is_trained = True
        return new
    new = _empty(kind, index.d, 8 * index.nlist, options.model_copy(update={"lists": index.nlist}))
    set_centroids(new, np.array(centroids_of(index)))
    if kind == "ivf-sq8":
        new.sq = index.sq
    else:
        new.pq = index.pq
    new.is_trained = True
    return new


def _move_lists(index: Any, new: Any, old_rows_L: Rows) -> None:
    """Entries of the labels that stay, under their new rows."""
    faiss = faiss_module()
    row_of_old = np.full(index.ntotal, -1, dtype=np.int64)
    kept = np.flatnonzero(old_rows_L >= 0)
    row_of_old[old_rows_L[kept]] = kept
    source = index.invlists
    for number in range(index.nlist):
        if not (size := source.list_size(number)):
            continue
        ids = row_of_old[faiss.rev_swig_ptr(source.get_ids(number), size)]
        codes = faiss.rev_swig_ptr(source.get_codes(number), size * index.code_size).reshape(size, -1)
        if (stays := ids >= 0).any():
            ids, codes = ids[stays], np.ascontiguousarray(codes[stays])
            new.invlists.add_entries(number, len(ids), faiss.swig_ptr(ids), faiss.swig_ptr(codes))


def _blocks(rows_S: Rows) -> Iterator[Rows]:
    for start in range(0, len(rows_S), ROWS_AT_ONCE):
        yield rows_S[start : start + ROWS_AT_ONCE]


def _checked_rows(vectors: Vectors, rows_P: Rows, dim: int) -> Floats:
    """float32 [P, dim], contiguous, padded with zeros.

    Raises:
        ValueError: a number that is not finite.
    """
    array = vectors.take(rows_P)
    if not np.isfinite(array).all():
        row = int(rows_P[np.flatnonzero(~np.isfinite(array).all(axis=1))[0]])
        raise ValueError(f"vectors_LD must be finite, row {row} is not")
    return padded(array, dim)


def padded(array_PD: Floats, dim: int) -> Floats:
    """float32 [P, dim], contiguous: zeros behind the columns that are there."""
    if array_PD.shape[1] == dim:
        return np.ascontiguousarray(array_PD)
    out = np.zeros((len(array_PD), dim), dtype=np.float32)
    out[:, : array_PD.shape[1]] = array_PD
    return out
