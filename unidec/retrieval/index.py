"""Nearest labels by inner product: a search index of one of several kinds, and the recall of an approximate one.

    kind       held for each label                    exact?  which labels are compared
    flat       float32                                yes     all
    pq         4 bits for `code_dims` dimensions      two     all
    hnsw       float32 and a graph                    scores  those that a walk through the graph meets
    ivf-pq     4 bits for `code_dims`, in lists       two     those in the `probes` nearest lists

"two": two stages. The codes choose candidates, which are scored exactly on the float32 vectors (`LabelRows`). They are
searched with faiss's fast scan; a file holds them in faiss's plain layout, and they are packed when it is loaded.

Legend: L labels, B and N queries, K results, C candidates, P rows, D width of the searched space (`scoring_space.py`);
width: of the vectors as faiss has them.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from unidec.data.storage import write_file
from unidec.model.faiss_library import faiss_module
from unidec.progress import progress
from unidec.retrieval.faiss_file import read_index_file
from unidec.retrieval.scoring_space import LabelRows, as_rows

Kind = Literal["flat", "pq", "hnsw", "ivf-pq"]
OldKind = Literal["sq8", "hnsw-sq8", "ivf-sq8"]
KINDS: tuple[Kind, ...] = get_args(Kind)
REPLACED: dict[str, Kind] = {"sq8": "pq", "hnsw-sq8": "pq", "ivf-sq8": "ivf-pq"}
"""Kinds of older bundles, and what takes their place."""
COMPRESSED: frozenset[Kind] = frozenset({"pq", "ivf-pq"})

LEAST_CANDIDATES = 64
"""Candidates that are scored exactly, however few results are asked for: cheaper than a wrong first label. With 64 of
12,941 labels `pq` finds 0.9997 of the five best, and all first ones."""

FLAT_CENTROIDS = 1024
"""Up to so many centroids of lists are trained at once and compared one by one."""
ROWS_AT_ONCE = 1 << 16  # added at a time: 128 MB at 512 dimensions
_GRAPH_ROWS_AT_ONCE = 1 << 12  # a graph grows slowly, and its progress is shown
_TRAINING_ROWS = 1 << 16  # of a quantiser; more change its centroids little
_ROWS_A_LIST = 40  # faiss asks for 39
_ROUNDS = 10  # of k-means; recall does not change with faiss's 25, the time does
_CODES = 16  # of 4 bits

Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]
Count = Annotated[int, Field(ge=1, le=1 << 40)]
CountOrAuto = Annotated[int, Field(ge=0, le=1 << 40)]


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


class LabelIndex:
    """An index over label vectors, searched by inner product. Searching is safe from several threads at once.

    A compressed kind searches in two stages: its codes choose candidates, which are scored exactly on the float32
    vectors; so what is found has its exact score, and `recall` measures what was missed. A graph on vectors of
    unequal length (`clf_normalize=False`) favours long ones: look at its recall, or use another kind.

    Args:
        index: of faiss, becomes `stored`.
        data: what it has views into.

    Attributes:
        kind, options: what it is, and how it is built and searched.
        vectors: what candidates are scored on; None where the index holds the vectors itself.
        stored: of faiss, as it is written to a file.
        threads: of one search; 0: as many as faiss takes. More than one pays for many queries at once.
    """

    def __init__(
        self, index: Any, kind: Kind, options: IndexOptions, vectors: LabelRows | None = None, data: Any = None
    ) -> None:
        if kind in COMPRESSED and vectors is None:
            raise ValueError(f"an index of kind {kind!r} needs the labels' vectors to score candidates")
        self.kind, self.options, self.threads = kind, options, 0
        self.vectors = vectors if kind in COMPRESSED else None
        self.stored, self._data, self._index = index, data, _searcher(index, kind)
        self.num_labels = int(index.ntotal)
        self.dim = int(index.d) if vectors is None else vectors.shape[1]

    @classmethod
    def build(
        cls, vectors_LD: Floats | LabelRows, kind: Kind = "flat", threads: int = 1, show: bool = False, **options: int
    ) -> LabelIndex:
        """Index label vectors.

        Args:
            vectors_LD: float32 [L, D], finite, or rows that are made as they are needed (`LabelRows`); those of a
                compressed kind are kept, to score candidates.
            kind: one of `KINDS`.
            threads: threads that build; with more than one a graph differs from build to build. 0: all of faiss's.
            show: print progress.
            options: fields of `IndexOptions`.

        Raises:
            ValueError: no labels, a number that is not finite, or an unknown kind.
            UnidecError: faiss is not installed.
        """
        vectors, settings = as_rows(vectors_LD), IndexOptions(**options)
        if not all(vectors.shape):
            raise ValueError(f"vectors_LD must hold at least one label and one dimension, got shape {vectors.shape}")
        index = settings.empty(kind, vectors.shape[1], vectors.shape[0])
        if kind == "hnsw":
            index.hnsw.efConstruction, index.hnsw.efSearch = settings.build, settings.search
        with faiss_threads(threads):
            if not index.is_trained:
                _train(index, kind, vectors)
            every, size = np.arange(vectors.shape[0]), _GRAPH_ROWS_AT_ONCE if kind == "hnsw" else ROWS_AT_ONCE
            shown = progress(total=len(every), desc=f"index {kind}", unit="label") if show else contextlib.nullcontext()
            with shown as bar:
                for rows in blocks(every, size):
                    index.add(_checked_rows(vectors, rows, index.d))
                    if bar is not None:
                        bar.update(len(rows))
        return cls(index, kind, settings, vectors)

    def search(self, queries_BD: Floats, k: int, rescore: int = 0) -> tuple[Floats, Labels]:
        """The k labels of the largest inner product, best first, among equal scores the smaller label number first.

        Args:
            queries_BD: float32 [B, D], finite.
            k: at least 1; may exceed L.
            rescore: candidates for each result that are scored exactly; 0: as in `options`.

        Returns:
            scores float32 [B, K] (-inf where there is no result), labels int64 [B, K] (-1 there).
        """
        scores = np.full((len(queries_BD), k), -np.inf, dtype=np.float32)
        labels = np.full((len(queries_BD), k), -1, dtype=np.int64)
        num = found = min(k, self.num_labels)
        if self.vectors is not None:
            num = min(max(LEAST_CANDIDATES, (rescore or self.options.rescore) * found), self.num_labels)
        rough_BC, rows_BC = self._candidates(queries_BD, num)
        for query, rows_C in enumerate(rows_BC):
            rows, score_C = rows_C[rows_C >= 0], rough_BC[query, rows_C >= 0]
            if self.vectors is not None:
                score_C = np.concatenate([self.vectors.scores(queries_BD[query], some) for some in blocks(rows)])
            best = np.lexsort((rows, -score_C))[:found]
            scores[query, : len(best)], labels[query, : len(best)] = score_C[best], rows[best]
        return scores, labels

    def _candidates(self, queries_BD: Floats, num: int) -> tuple[Floats, Labels]:
        """The first stage alone: labels of the largest inner product as the index has them, and these products, which
        in a compressed kind are those of the codes.

        Args:
            queries_BD: float32 [B, D], finite. num: at least 1; all labels where it exceeds L.

        Returns:
            scores float32 [B, C], labels int64 [B, C], -1 where there is none.
        """
        queries = np.asarray(queries_BD)
        if queries.dtype != np.float32 or queries.ndim != 2 or queries.shape[1] != self.dim:
            what = f"float32 with two dimensions, {self.dim} wide like the index"
            raise ValueError(f"queries_BD must be {what}, got {queries.dtype} of shape {queries.shape}")
        if not np.isfinite(queries).all():
            raise ValueError("queries_BD must be finite")
        if num < 1:
            raise ValueError(f"k must be at least 1, got {num}")
        if num >= self.num_labels and self.vectors is not None:  # codes have nothing to choose
            every = np.broadcast_to(np.arange(self.num_labels), (len(queries), self.num_labels))
            return np.zeros(every.shape, dtype=np.float32), every
        with faiss_threads(self.threads):
            wide, num = _padded(queries, self._index.d), min(num, self.num_labels)
            return self._index.search(wide, num, params=self._search_params(num))

    def with_options(self, **changes: int) -> LabelIndex:
        """The same index, searched with another `search`, `probes` or `rescore`. Nothing is copied."""
        other = copy.copy(self)
        other.options = IndexOptions(**self.options.model_dump() | changes)
        return other

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index in faiss's format, in one piece (`write_file`)."""
        with write_file(path) as file:
            try:
                faiss_module().write_index(self.stored, file.name)
            except RuntimeError as error:
                raise OSError(errno.EIO, str(error)[-200:]) from error

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        num_labels: int,
        dim: int,
        kind: Kind = "flat",
        options: IndexOptions | None = None,
        vectors: Floats | LabelRows | None = None,
    ) -> LabelIndex:
        """Read an index that must hold `num_labels` vectors of width `dim`.

        The file is mapped into memory, and processes that load it share its pages (codes of 4 bits are packed into
        memory of their own). It is checked (`faiss_file.py`), so that a crafted file can neither fill the memory nor
        lead the search outside of it. One of an older bundle, with labels in two lists each, is built again.

        Raises:
            ArtifactError: missing, damaged, or another kind or size of index.
            ValueError: a compressed kind without `vectors`.
            UnidecError: faiss is not installed.
        """
        options, rows = options or IndexOptions(), None if vectors is None else as_rows(vectors)
        index, data = read_index_file(Path(path), options.empty(kind, dim, num_labels), num_labels)
        if rows is not None and index.ntotal > num_labels:
            return cls.build(rows, kind, **options.model_dump())
        return cls(index, kind, options, rows, data)

    def _search_params(self, num: int) -> Any:
        """How thorough a search for so many is, as its argument: a setting of the index would be shared by threads."""
        faiss = faiss_module()
        if self.kind == "hnsw":
            return faiss.SearchParametersHNSW(efSearch=max(self.options.search, num))
        if self.kind != "ivf-pq":
            return None
        lists = self._index.nlist
        enough = -(-2 * num * lists // self.num_labels)  # twice the candidates, were all lists of one size
        return faiss.SearchParametersIVF(nprobe=min(lists, max(self.options.num_probes(lists), enough)))


def _searcher(index: Any, kind: Kind) -> Any:
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


def blocks(rows: Labels, size: int = ROWS_AT_ONCE) -> Iterator[Labels]:
    """So many rows at a time; one empty block where there are none."""
    for start in range(0, max(1, len(rows)), size):
        yield rows[start : start + size]


def _padded(array_PD: Floats, width: int) -> Floats:
    """float32 [P, width], contiguous: zeros behind the columns that are there."""
    out = np.zeros((len(array_PD), width), dtype=np.float32)  # np.pad takes ten times as long
    out[:, : array_PD.shape[1]] = array_PD
    return out


def _checked_rows(vectors: LabelRows, rows_P: Labels, width: int) -> Floats:
    """float32 [P, width], contiguous, padded with zeros; a ValueError for a number that is not finite."""
    array = vectors.take(rows_P)
    if not (finite_P := np.isfinite(array).all(axis=1)).all():
        raise ValueError(f"vectors_LD must be finite, row {rows_P[np.argmin(finite_P)]} is not")
    return _padded(array, width)


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


def recall(approx_NK: Labels, exact_NK: Labels) -> float:
    """Share of the exact results that the approximate search found, over all queries, 0 to 1 (1 where there is
    nothing to find); label rows, -1 where there is none, of any two widths."""
    wanted = int((exact_NK >= 0).sum())
    if not wanted:
        return 1.0
    span = int(max(exact_NK.max(), approx_NK.max())) + 1
    rows = np.arange(len(exact_NK), dtype=np.int64)[:, None] * span
    hit_NK = np.isin(approx_NK + rows, (exact_NK + rows)[exact_NK >= 0]) & (approx_NK >= 0)
    return float(hit_NK.sum() / wanted)
