"""Nearest labels by inner product: a search index of one of several kinds, and the recall of an approximate one.

Legend: L labels, B and N queries, K results, C candidates, D width of the searched space (`scoring_space.py`).
"""

from __future__ import annotations

import copy
import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unidec.data.storage import write_file
from unidec.retrieval.faiss_file import read_index_file
from unidec.retrieval.index_kinds import (
    COMPRESSED,
    KINDS,
    IndexOptions,
    Kind,
    blocks,
    build_index,
    faiss_module,
    faiss_threads,
    padded,
    searcher,
)
from unidec.retrieval.scoring_space import LabelRows, as_rows

__all__ = ["KINDS", "IndexOptions", "Kind", "LabelIndex", "recall"]

LEAST_CANDIDATES = 64
"""Candidates that are scored exactly, however few results are asked for: cheaper than a wrong first label. With 64 of
12,941 labels `pq` finds 0.9997 of the five best, and all first ones."""

Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]


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
        self.stored, self._data, self._index = index, data, searcher(index, kind)
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
        return cls(build_index(vectors, kind, settings, threads, show), kind, settings, vectors)

    def search(self, queries_BD: Floats, k: int) -> tuple[Floats, Labels]:
        """The k labels of the largest inner product, best first, among equal scores the smaller label number first.

        Args:
            queries_BD: float32 [B, D], finite.
            k: at least 1; may exceed L.

        Returns:
            scores float32 [B, K] (-inf where there is no result), labels int64 [B, K] (-1 there).
        """
        scores = np.full((len(queries_BD), k), -np.inf, dtype=np.float32)
        labels = np.full((len(queries_BD), k), -1, dtype=np.int64)
        num = found = min(k, self.num_labels)
        if self.vectors is not None:
            num = min(max(LEAST_CANDIDATES, self.options.rescore * found), self.num_labels)
        rough_BC, rows_BC = self.candidates(queries_BD, num)
        for query, rows_C in enumerate(rows_BC):
            rows, score_C = rows_C[rows_C >= 0], rough_BC[query, rows_C >= 0]
            if self.vectors is not None:
                score_C = np.concatenate([self.vectors.scores(queries_BD[query], some) for some in blocks(rows)])
            best = np.lexsort((rows, -score_C))[:found]
            scores[query, : len(best)], labels[query, : len(best)] = score_C[best], rows[best]
        return scores, labels

    def candidates(self, queries_BD: Floats, num: int) -> tuple[Floats, Labels]:
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
            wide, num = padded(queries, self._index.d), min(num, self.num_labels)
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
        index, data = read_index_file(Path(path), kind, num_labels, dim, options)
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
