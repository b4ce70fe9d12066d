"""Nearest labels by inner product: a search index of one of several kinds, and the recall of an approximate one.

Legend: L labels, B and N queries, K results, C candidates, D width of the searched space (`scoring_space.py`), S rows
whose vectors are new; nodes: vectors in a graph, those of labels that left among them.
"""

from __future__ import annotations

import copy
import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unidec.data.storage import write_file
from unidec.errors import UnidecError
from unidec.retrieval.faiss_file import read_index_file
from unidec.retrieval.index_kinds import (
    COMPRESSED,
    GRAPHS,
    KINDS,
    LISTS,
    IndexOptions,
    Kind,
    blocks,
    build_index,
    changed_codes,
    check_finite,
    checked_rows,
    faiss_module,
    faiss_threads,
    owned_copy,
    padded,
    searcher,
)
from unidec.retrieval.label_rows import LabelRows, as_rows

__all__ = ["KINDS", "IndexOptions", "Kind", "LabelIndex", "recall"]

LEAST_CANDIDATES = 64
"""Candidates that are scored exactly, however few results are asked for: cheaper than a wrong first label. With 64 of
12,941 labels `pq` finds 0.9997 of the five best, and all first ones."""
MAX_DEAD = 0.3
"""Share of a graph's nodes that may be labels that left: a search has to walk past them."""
MAX_FRESH = 0.5
"""Share of the labels that may be new before the index, and what it learnt of their vectors, is rebuilt."""
_FLOATS_A_THREAD = 1 << 20  # a flat scan of fewer is not worth another thread
_GPU_CANDIDATES = 2048  # what faiss's GPU indexes return at most

Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]


class LabelIndex:
    """An index over label vectors, searched by inner product. Searching is safe from several threads at once.

    A compressed kind searches in two stages: its codes choose candidates, which are scored exactly on the float32
    vectors; so what is found has its exact score, and `recall` measures what was missed. A graph on vectors of
    unequal length (`clf_normalize=False`) favours long ones: look at its recall, or use another kind.

    Attributes:
        kind, options: what it is, and how it is built and searched.
        vectors: what candidates are scored on; None where the index holds the vectors itself.
        nodes: int64 [nodes], the label row of each node of a graph, -1 where the label left; None: node i is row i.
        stored: of faiss, as it is written to a file.
        threads: of one search; 0: as many as faiss takes. More than one pays for flat indexes, and for many queries.
    """

    def __init__(
        self,
        index: Any,
        kind: Kind,
        options: IndexOptions,
        vectors: LabelRows | None = None,
        nodes: Labels | None = None,
        data: Any = None,
    ) -> None:
        """
        Args:
            index: becomes `stored`; data: what it has views into.
        """
        if kind in COMPRESSED and vectors is None:
            raise ValueError(f"an index of kind {kind!r} needs the labels' vectors to score candidates")
        self.kind: Kind = kind
        self.options, self.nodes, self.threads = options, nodes, 0
        self.vectors = vectors if kind in COMPRESSED else None
        self.stored, self._data, self._rows = index, data, vectors
        self._gpu: Any = None
        self._index = searcher(index, kind)
        self.dim = int(index.d) if vectors is None else vectors.shape[1]
        self.num_labels = int(index.ntotal if nodes is None else (nodes >= 0).sum())
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._alive = None
        if nodes is not None:
            self._bits = np.packbits(nodes >= 0, bitorder="little")  # faiss has a pointer to them
            self._alive = faiss_module().IDSelectorBitmap(self._bits)

    @property
    def num_bytes(self) -> int:
        """About the size of the file; without the vectors that candidates are scored on."""
        return int(faiss_module().serialize_index(self.stored).nbytes) if self._data is None else len(self._data)

    @classmethod
    def build(
        cls,
        vectors_LD: Floats | LabelRows,
        kind: Kind = "flat",
        threads: int = 1,
        show: bool = False,
        **options: int,
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
            ValueError: another dtype or shape, no labels, a number that is not finite, or an unknown kind.
            UnidecError: faiss is not installed.
        """
        if isinstance(vectors_LD, np.ndarray):
            _check_matrix(vectors_LD, None, "vectors_LD")
        vectors = as_rows(vectors_LD)
        if not all(vectors.shape):
            raise ValueError(f"vectors_LD must hold at least one label and one dimension, got shape {vectors.shape}")
        settings = IndexOptions(**options)
        return cls(build_index(vectors, kind, settings, threads, show), kind, settings, vectors)

    def search(self, queries_BD: Floats, k: int) -> tuple[Floats, Labels]:
        """The k labels of the largest inner product, best first, among equal scores the smaller label number first.

        Args:
            queries_BD: float32 [B, D], finite.
            k: at least 1; may exceed L.

        Returns:
            scores float32 [B, K] (-inf where there is no result), labels int64 [B, K] (-1 there).
        """
        queries = np.asarray(queries_BD)
        _check_matrix(queries, self.dim, "queries_BD")
        check_finite(queries, "queries_BD")
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        scores = np.full((len(queries), k), -np.inf, dtype=np.float32)
        labels = np.full((len(queries), k), -1, dtype=np.int64)
        num = found = min(k, self.num_labels)
        if self.vectors is not None:
            num = min(max(LEAST_CANDIDATES, self.options.rescore * found), self.num_labels)
        if not len(queries):
            return scores, labels
        rough_BC, rows_BC = np.empty(0, np.float32), np.broadcast_to(np.arange(num), (len(queries), num))
        if self.vectors is None or num < self.num_labels:
            rough_BC, rows_BC = self._nearest(queries, num)
        for query, rows_C in enumerate(rows_BC):
            rows = rows_C[rows_C >= 0]
            if self.vectors is None:
                score_C = rough_BC[query, rows_C >= 0]
            else:
                score_C = np.concatenate([self.vectors.scores(queries[query], some) for some in blocks(rows)])
            best = np.lexsort((rows, -score_C))[:found]
            scores[query, : len(best)], labels[query, : len(best)] = score_C[best], rows[best]
        return scores, labels

    def changed(self, source_L: Labels, vectors: Floats | LabelRows, fresh_S: Labels, threads: int = 1) -> LabelIndex:
        """The index of another label set. This one is not touched, and may be searched meanwhile.

        Labels that stay are not indexed again: their codes move to their new rows. In a graph they keep their nodes,
        fresh ones are added, and those that leave remain as nodes that are never returned. A flat index is rebuilt,
        and any other where too many labels are new or left (`MAX_FRESH`, `MAX_DEAD`).

        Args:
            source_L: int64 [L], the row in this index of each label of the new set, -1 for one that is new; each row
                of this index at most once.
            vectors: those of the new set, [L, D].
            fresh_S: int64, ascending: rows of the new set whose vectors are new or differ; all new labels are among
                them.
            threads: as for `build`.

        Raises:
            ValueError: rows that contradict each other, no labels, or vectors of another width.
        """
        rows = as_rows(vectors)
        source_L, fresh_S = (np.asarray(array, dtype=np.int64) for array in (source_L, fresh_S))
        _check_change(source_L, fresh_S, rows.shape, (self.num_labels, self.dim))
        nodes = self._nodes_after(source_L, fresh_S) if self.kind in GRAPHS else source_L
        rebuild = self.kind == "flat" or len(fresh_S) > MAX_FRESH * len(source_L)
        if rebuild or len(nodes) - len(source_L) > MAX_DEAD * len(nodes):
            return LabelIndex.build(rows, self.kind, threads, **self.options.model_dump())
        with faiss_threads(threads):
            if self.kind not in GRAPHS:
                index = changed_codes(self.stored, self.kind, source_L, rows, fresh_S)
                return LabelIndex(index, self.kind, self.options, rows)
            index = owned_copy(self.stored)
            if len(fresh_S):
                index.add(checked_rows(rows, fresh_S, self.dim))
        plain = np.array_equal(nodes, np.arange(len(source_L)))
        return LabelIndex(index, self.kind, self.options, rows, None if plain else nodes)

    def with_options(self, **changes: int) -> LabelIndex:
        """The same index, searched with another `search`, `probes` or `rescore`. Nothing is copied."""
        other = copy.copy(self)
        other.options = IndexOptions(**self.options.model_dump() | changes)
        return other

    def to_gpu(self, device: int = 0) -> LabelIndex:
        """The same labels, searched by a scan on a GPU (float16, 2 x L x width bytes) and scored on the float32 vectors
        here; this index stays as it is.

        Raises:
            ValueError: an index without vectors. UnidecError: no faiss-gpu, or no GPU.
        """
        faiss, rows = faiss_module(), self._rows
        if rows is None:
            raise ValueError("an index that was loaded without its vectors cannot go to a GPU")
        if not hasattr(faiss, "StandardGpuResources") or faiss.get_num_gpus() <= device:
            raise UnidecError(
                "no search on a GPU: faiss-gpu or the GPU is missing", got=f"GPU {device} asked for",
                fix="pip install 'unidec-xmc[gpu]' in place of [cpu], or search on the processor",
            )  # fmt: skip
        settings = faiss.GpuIndexFlatConfig()
        settings.useFloat16, settings.device = True, device
        other = copy.copy(self)
        other.vectors, other._gpu = rows, faiss.GpuIndexFlatIP(faiss.StandardGpuResources(), self.dim, settings)
        for some in blocks(np.arange(self.num_labels)):
            other._gpu.add(checked_rows(rows, some, self.dim))
        return other

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index in faiss's format, in one piece (`write_file`); `nodes` are the caller's to write."""
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
        nodes: Labels | None = None,
    ) -> LabelIndex:
        """Read an index that must hold `num_labels` vectors of width `dim` (for a graph with `nodes`: one a node).

        The file is mapped into memory, and processes that load it share its pages (codes of 4 bits are packed into
        memory of their own). It is checked (`faiss_file.py`), so that a crafted file can neither fill the memory nor
        lead the search outside of it.

        Raises:
            ArtifactError: missing, damaged, or another kind or size of index.
            ValueError: a compressed kind without `vectors`.
            UnidecError: faiss is not installed.
        """
        options, rows = options or IndexOptions(), None if vectors is None else as_rows(vectors)
        size = num_labels if nodes is None else len(nodes)
        index, data = read_index_file(Path(path), kind, size, options.width(kind, dim), options)
        if rows is not None and index.ntotal > size:  # of an older bundle, with labels in two lists each
            return cls.build(rows, kind, **options.model_dump())
        return cls(index, kind, options, rows, nodes, data)

    def _nearest(self, queries: Floats, num: int) -> tuple[Floats, Labels]:
        """(scores, rows) [B, num] as faiss finds them by its codes; -1 where there are fewer."""
        if self._gpu is not None and num <= _GPU_CANDIDATES:
            with self._lock:  # searches on a GPU share temporary memory
                found: tuple[Floats, Labels] = self._gpu.search(queries, num)
            return found
        wide = padded(queries, self._index.d)
        with faiss_threads(self.threads):
            if (slices := self._slices(len(wide))) > 1:
                return self._in_slices(wide, num, slices)
            scores, nodes = self._index.search(wide, num, params=self._search_params(num))
        return scores, nodes if self.nodes is None else np.where(nodes >= 0, self.nodes[nodes], -1)

    def _search_params(self, num: int) -> Any:
        """How thorough a search for so many is, as its argument: a setting of the index would be shared by threads."""
        faiss = faiss_module()
        if self.kind in LISTS:
            lists = self._index.nlist
            enough = -(-2 * num * lists // self.num_labels)  # twice the candidates, were all lists of one size
            return faiss.SearchParametersIVF(nprobe=min(lists, max(self.options.num_probes(lists), enough)))
        if self.kind not in GRAPHS:
            return None
        width = max(self.options.search, num) * self._index.ntotal // self.num_labels
        return faiss.SearchParametersHNSW(efSearch=width, sel=self._alive)

    def _slices(self, num_queries: int) -> int:
        """Threads for a flat scan by few queries; faiss itself gives each query one thread."""
        threads = self.threads or faiss_module().omp_get_max_threads()
        worth = self.num_labels * self.dim // _FLOATS_A_THREAD
        return 1 if self.kind != "flat" or num_queries >= threads else min(threads, worth)

    def _in_slices(self, queries: Floats, num: int, slices: int) -> tuple[Floats, Labels]:
        """Candidates of each slice of the labels, each slice searched in a thread of its own."""
        faiss = faiss_module()
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(slices, thread_name_prefix="index")
        bounds = np.linspace(0, self.num_labels, slices + 1).astype(int).tolist()
        some = [faiss.SearchParameters(sel=faiss.IDSelectorRange(*pair)) for pair in pairwise(bounds)]
        parts = list(self._pool.map(lambda params: self._index.search(queries, num, params=params), some))
        scores, rows = (np.concatenate(each, axis=1) for each in zip(*parts, strict=True))
        return scores, rows

    def _nodes_after(self, source_L: Labels, fresh_S: Labels) -> Labels:
        """The new row of each node of the graph, and of those that are to be added."""
        row_of_old = np.full(self.num_labels, -1, dtype=np.int64)
        stays = source_L >= 0
        stays[fresh_S] = False
        row_of_old[source_L[stays]] = np.flatnonzero(stays)
        before = np.arange(self.num_labels) if self.nodes is None else self.nodes
        return np.concatenate([np.where(before >= 0, row_of_old[before], -1), fresh_S])


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


def _check_change(source_L: Labels, fresh_S: Labels, shape: tuple[int, int], before: tuple[int, int]) -> None:
    num_labels, dim = shape
    if source_L.shape != (num_labels,) or not num_labels or dim != before[1]:
        raise ValueError(f"source_L of shape {source_L.shape}, vectors {shape}, the index is {before[1]} wide")
    kept = source_L[source_L >= 0]
    if not np.isin(kept, np.arange(before[0])).all() or len(np.unique(kept)) != len(kept):
        raise ValueError(f"source_L must name each of {before[0]} rows at most once")
    if not np.isin(fresh_S, np.arange(num_labels)).all() or (np.diff(fresh_S) <= 0).any():
        raise ValueError(f"fresh_S must be ascending rows of {num_labels} labels")
    if not np.isin(np.flatnonzero(source_L < 0), fresh_S).all():
        raise ValueError("a label without a row before is not among fresh_S")


def _check_matrix(array: npt.NDArray, dim: int | None, name: str) -> None:
    if array.dtype != np.float32 or array.ndim != 2:
        raise ValueError(f"{name} must be float32 with two dimensions, got {array.dtype} of shape {array.shape}")
    if dim is not None and array.shape[1] != dim:
        raise ValueError(f"{name} must be {dim} wide like the index, got {array.shape[1]}")
