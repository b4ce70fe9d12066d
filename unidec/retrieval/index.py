"""Nearest labels by inner product: faiss indexes (flat, HNSW), and the recall of an approximate one.

Legend: L labels, B and N queries, K results, D width of the searched space (`space.py`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from unidec.data.storage import write_bytes_atomic
from unidec.errors import ArtifactError, UnidecError
from unidec.model.search import exact_search
from unidec.retrieval.faiss_file import check_index_file

__all__ = ["LabelIndex", "exact_search", "max_file_size", "recall"]

Kind = Literal["flat", "hnsw"]
Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]


class LabelIndex:
    """A faiss index over label vectors, searched by inner product. Searching is safe from several threads at once.

    HNSW and vectors of unequal length: with `clf_normalize=False` the classifier's rows keep their lengths, and a
    graph built on inner products then favours long vectors, so that short ones (often tail labels) may not be
    reached. Look at `recall` against the exact search (the index stage reports it), raise `hnsw_search`, or use the
    flat index: at 10,000 to 1,000,000 labels it is exact and quick enough for batches.
    """

    def __init__(self, index: Any, kind: Kind, search: int = 200) -> None:
        self._index = index
        self.kind: Kind = kind
        self.search_width = search

    @property
    def num_labels(self) -> int:
        """L."""
        return int(self._index.ntotal)

    @property
    def dim(self) -> int:
        """D."""
        return int(self._index.d)

    @classmethod
    def build(
        cls,
        vectors_LD: Floats,
        kind: Kind = "flat",
        links: int = 32,
        build: int = 200,
        search: int = 200,
        threads: int = 1,
    ) -> LabelIndex:
        """Index label vectors.

        Args:
            vectors_LD: float32 [L, D], finite.
            kind: "flat" (exact) or "hnsw".
            links: M of HNSW.
            build: efConstruction of HNSW.
            search: efSearch of HNSW.
            threads: threads that build the graph; with more than one it differs from build to build. 0: all of faiss's.

        Raises:
            ValueError: another dtype or shape, no labels, a number that is not finite, or an unknown kind.
            UnidecError: faiss is not installed.
        """
        vectors = _checked(vectors_LD, None, "vectors_LD")
        if not len(vectors) or not vectors.shape[1]:
            raise ValueError(f"vectors_LD must hold at least one label and one dimension, got shape {vectors.shape}")
        faiss = _faiss()
        dim = vectors.shape[1]
        if kind == "flat":
            index = faiss.IndexFlatIP(dim)
        elif kind == "hnsw":
            index = faiss.IndexHNSWFlat(dim, links, faiss.METRIC_INNER_PRODUCT)
            index.hnsw.efConstruction = build
            index.hnsw.efSearch = search
        else:
            raise ValueError(f"unknown kind of index {kind!r}, expected 'flat' or 'hnsw'")
        with _threads(faiss, threads):
            index.add(vectors)
        return cls(index, kind, search)

    def search(self, queries_BD: Floats, k: int) -> tuple[Floats, Labels]:
        """The k labels of the largest inner product, best first; among equal scores the smaller label number comes
        first.

        Args:
            queries_BD: float32 [B, D], finite.
            k: at least 1; may exceed L.

        Returns:
            scores float32 [B, K] (-inf where there is no result), labels int64 [B, K] (-1 there).

        Raises:
            ValueError: another dtype or width, a number that is not finite, or k below 1.
        """
        queries = _checked(queries_BD, self.dim, "queries_BD")
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        scores = np.full((len(queries), k), -np.inf, dtype=np.float32)
        labels = np.full((len(queries), k), -1, dtype=np.int64)
        found = min(k, self.num_labels)
        if len(queries):
            scores[:, :found], labels[:, :found] = self._index.search(queries, found, params=self._search_params(found))
        missing = labels < 0
        scores[missing] = -np.inf
        order = np.lexsort((np.where(missing, np.iinfo(np.int64).max, labels), -scores), axis=1)
        return np.take_along_axis(scores, order, axis=1), np.take_along_axis(labels, order, axis=1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index in faiss's format, in one piece (beside, flushed, renamed)."""
        write_bytes_atomic(path, memoryview(_faiss().serialize_index(self._index)))  # type: ignore[arg-type]

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], num_labels: int, dim: int, kind: Kind = "flat", search: int = 200
    ) -> LabelIndex:
        """Read an index that must hold `num_labels` vectors of width `dim`.

        The size of the file is bounded and its inside is checked before faiss sees it, so that a crafted file can
        neither fill the memory nor lead the search outside of it.

        Raises:
            ArtifactError: missing, damaged, or another kind or size of index.
            UnidecError: faiss is not installed.
        """
        where = Path(path)
        faiss = _faiss()
        try:
            size = where.stat().st_size
            if not 0 < size <= max_file_size(num_labels, dim, kind):
                raise ArtifactError(
                    "an index file of impossible size",
                    where=str(where),
                    got=f"{size} bytes",
                    expected=f"1 to {max_file_size(num_labels, dim, kind)} for {num_labels} vectors of width {dim}",
                )
            data = np.fromfile(where, dtype=np.uint8)
        except OSError as error:
            raise ArtifactError("the index cannot be read", where=str(where), got=error.strerror) from error
        check_index_file(data, kind, num_labels, dim, str(where))
        try:
            index = faiss.deserialize_index(data)
        except (RuntimeError, MemoryError) as error:
            raise ArtifactError("a damaged index", where=str(where), got=str(error)[-200:]) from error
        wanted = faiss.IndexFlat if kind == "flat" else faiss.IndexHNSWFlat
        shape = (index.d, index.ntotal, index.metric_type)
        if not isinstance(index, wanted) or shape != (dim, num_labels, faiss.METRIC_INNER_PRODUCT):
            raise ArtifactError(
                "another index than expected", where=str(where), got=f"{type(index).__name__}, d {index.d}"
            )
        return cls(index, kind, search)

    def _search_params(self, found: int) -> Any:
        """Search width as an argument of each search: a setting on the index would be shared between threads."""
        if self.kind != "hnsw":
            return None
        return _faiss().SearchParametersHNSW(efSearch=max(self.search_width, found))


def recall(
    approx_NK: Labels,
    exact_NK: Labels,
    approx_scores_NK: Floats | None = None,
    exact_scores_NK: Floats | None = None,
    tolerance: float = 1e-5,
) -> float:
    """Share of the exact results that the approximate search found, over all queries, 0 to 1 (1 where there is
    nothing to find).

    Args:
        approx_NK, exact_NK: label rows, -1 where there is none; the widths may differ.
        approx_scores_NK, exact_scores_NK: if both are given, a result that scores at least as much as the last exact
            one (minus `tolerance` x its size) counts as found: which of several equal labels is returned is chance.
    """
    wanted = int((exact_NK >= 0).sum())
    if not wanted:
        return 1.0
    span = int(max(exact_NK.max(), approx_NK.max())) + 1
    rows = np.arange(len(exact_NK), dtype=np.int64)[:, None] * span
    valid = approx_NK >= 0
    hit_NK = np.isin(approx_NK + rows, (exact_NK + rows)[exact_NK >= 0]) & valid
    if approx_scores_NK is not None and exact_scores_NK is not None:
        last = np.where(exact_NK >= 0, exact_scores_NK, np.inf).min(axis=1, keepdims=True, initial=np.inf)
        margin = np.where(np.isfinite(last), tolerance * np.maximum(1.0, np.abs(last)), 0.0)
        hit_NK |= valid & (approx_scores_NK >= last - margin)
    return float(np.minimum(hit_NK.sum(axis=1), (exact_NK >= 0).sum(axis=1)).sum() / wanted)


def max_file_size(num_labels: int, dim: int, kind: Kind) -> int:
    """No sound index file of this size is larger (bytes): vectors, and for HNSW at most 1,024 links a label on
    average.
    """
    vectors = 4 * num_labels * dim
    return vectors + 4096 + (num_labels * (16 + 4 * 1024) if kind == "hnsw" else 0)


def _checked(vectors: Floats, dim: int | None, name: str) -> Floats:
    array = np.asarray(vectors)
    if array.dtype != np.float32 or array.ndim != 2:
        raise ValueError(f"{name} must be float32 with two dimensions, got {array.dtype} of shape {array.shape}")
    if dim is not None and array.shape[1] != dim:
        raise ValueError(f"{name} must be {dim} wide like the index, got {array.shape[1]}")
    if not np.isfinite(array).all():
        row = int(np.flatnonzero(~np.isfinite(array).all(axis=1))[0])
        raise ValueError(f"{name} must be finite, row {row} is not")
    return np.ascontiguousarray(array)


def _faiss() -> Any:
    """faiss, imported on first use: it comes with one of two extras, and data and training stages do not need it."""
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
    return faiss


@contextlib.contextmanager
def _threads(faiss: Any, threads: int) -> Iterator[None]:
    before = faiss.omp_get_max_threads()
    if threads:
        faiss.omp_set_num_threads(threads)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
