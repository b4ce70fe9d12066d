"""Reads faiss index files that may be damaged or malicious.

Since version 1.15, faiss itself checks that lengths, levels and links in a file are consistent, and
limits its allocations. This module checks the rest after reading: kind and size of the index, that
links at upper levels of a graph lead to nodes of the same level, that each label is in exactly one
list, and that all numbers are finite.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from unidec.data.chunks import blocks
from unidec.errors import ArtifactError
from unidec.model.faiss_library import faiss_module

_MAGIC = {"IndexFlat": b"IxFI", "IndexPQ": b"IxPq", "IndexHNSWFlat": b"IHNf", "IndexIVFPQ": b"IwPQ"}
_LEAST_LIST_BYTES = 48  # memory of an empty list; a list in a valid file takes more bytes
_CHECKED_AT_ONCE = 1 << 22  # numbers
_limits = threading.Lock()


def read_index_file(where: Path, like: Any, num_vectors: int) -> tuple[Any, Any]:
    """Read a faiss index; returns it with the memory-mapped bytes that it refers to. Replacing the
    file later does not affect them.

    Args:
        like: an empty index of the expected kind, width and code.
        num_vectors: expected number of vectors.

    Raises:
        ArtifactError: the file is missing or damaged, or holds another kind or size of index.
    """
    faiss = faiss_module()
    try:
        with where.open("rb") as file:
            data = np.frombuffer(
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8
            )
        kind = _kind(like)
        if bytes(data[:4]) != _MAGIC[kind]:
            raise RuntimeError(f"not an {kind}")
        reader = faiss.ZeroCopyIOReader(faiss.swig_ptr(data), data.size)
        with _allocation_limits(data.size):
            index = faiss.read_index(
                reader, faiss.IO_FLAG_SKIP_PRECOMPUTE_TABLE | faiss.IO_FLAG_READ_ONLY
            )
        if reader.rp_ != data.size:
            raise RuntimeError(f"{data.size - reader.rp_} bytes after the end of the index")
        _check(index, like, num_vectors)
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        raise ArtifactError(
            "the index file is damaged",
            where=where,
            got=getattr(error, "strerror", None) or str(error)[-200:],
            expected=f"{num_vectors} vectors of width {like.d}",
            fix="build the index again: unidec index build",
        ) from error
    return index, data


@contextlib.contextmanager
def _allocation_limits(num_bytes: int) -> Iterator[None]:
    """Limits faiss's allocations to vectors no larger than the file, and to as many lists as a file
    of this size can hold.
    """
    faiss = faiss_module()
    with _limits:  # faiss's limits are global
        most_bytes = faiss.get_deserialization_vector_byte_limit()
        most_lists = faiss.get_deserialization_loop_limit()
        faiss.set_deserialization_vector_byte_limit(num_bytes)
        faiss.set_deserialization_loop_limit(max(64, num_bytes // _LEAST_LIST_BYTES))
        try:
            yield
        finally:
            faiss.set_deserialization_vector_byte_limit(most_bytes)
            faiss.set_deserialization_loop_limit(most_lists)


def _check(index: Any, like: Any, num_vectors: int) -> None:
    """Raise RuntimeError unless the index has the layout of the empty index `like` and
    `num_vectors` valid vectors.
    """
    faiss = faiss_module()
    got = _layout(index)
    expected = _layout(like)
    if got != expected or not index.is_trained:
        raise RuntimeError(f"layout {got}, expected {expected}")
    if index.ntotal != num_vectors:
        raise RuntimeError(f"{index.ntotal} vectors")
    dense = index
    num_stored = num_vectors
    if hasattr(index, "hnsw"):
        dense = faiss.downcast_index(index.storage)
        _check_links(index.hnsw)
    if hasattr(index, "invlists"):
        dense = faiss.downcast_index(index.quantizer)
        num_stored = index.nlist
        _check_lists(index)
    if dense.ntotal != num_stored or dense.codes.size() != num_stored * dense.code_size:
        raise RuntimeError(f"{dense.ntotal} stored vectors, expected {num_stored}")
    if hasattr(index, "pq"):
        _check_finite(faiss.vector_to_array(index.pq.centroids))
    if not hasattr(dense, "pq"):
        _check_finite(faiss.rev_swig_ptr(dense.get_xb(), dense.ntotal * dense.d))


def _check_finite(array: np.ndarray) -> None:
    for some in blocks(array.size, _CHECKED_AT_ONCE):
        if not np.isfinite(array[some]).all():
            raise RuntimeError("numbers that are not finite")


def _kind(index: Any) -> str:
    return type(index).__name__.removesuffix("IP")


def _layout(index: Any) -> list[Any]:
    """Properties that all indexes of one kind, width and code share."""
    faiss = faiss_module()
    layout = [_kind(index), index.d, index.metric_type, getattr(index, "code_size", 0)]
    if hasattr(index, "hnsw"):
        layout.append(_layout(faiss.downcast_index(index.storage)))
    if hasattr(index, "invlists"):
        lists = faiss.downcast_InvertedLists(index.invlists)
        layout += [type(lists).__name__, lists.code_size, index.by_residual, index.direct_map.type]
        layout.append(_layout(faiss.downcast_index(index.quantizer)))
    if hasattr(index, "pq"):
        layout += [index.pq.d, index.pq.code_size, index.pq.M, index.pq.nbits]
    return layout


def _check_links(graph: Any) -> None:
    """Each link must lead to a node that exists at the link's level; otherwise a search reads out
    of bounds.
    """
    faiss = faiss_module()
    levels = faiss.vector_to_array(graph.levels)
    level_ends = faiss.vector_to_array(graph.cum_nneighbor_per_level)
    links = faiss.vector_to_array(graph.neighbors)
    starts = faiss.vector_to_array(graph.offsets).astype(np.int64)
    num_levels = graph.max_level + 1
    entry = graph.entry_point
    if entry < 0 or not num_levels == levels[entry] == levels.max():
        raise RuntimeError(f"entry point {graph.entry_point} at level {graph.max_level}")
    if levels.min() < 1 or (np.diff(starts) != level_ends[levels]).any():
        raise RuntimeError("number of links does not fit the levels")
    for level in range(1, num_levels):  # every node exists at level 0
        nodes = np.flatnonzero(levels > level)
        of_level = np.arange(level_ends[level], level_ends[level + 1])
        targets = links[starts[nodes, None] + of_level]
        if (levels[targets[targets >= 0]] <= level).any():
            raise RuntimeError(f"a link at level {level} to a node that does not exist there")


def _check_lists(index: Any) -> None:
    """Each vector must be in exactly one list."""
    faiss = faiss_module()
    lists = index.invlists
    if lists.nlist != index.nlist:
        raise RuntimeError(f"{lists.nlist} lists, expected {index.nlist}")
    ids = []
    for number in range(lists.nlist):
        size = lists.list_size(number)
        if size:
            ids.append(faiss.rev_swig_ptr(lists.get_ids(number), size))
    if not np.array_equal(np.sort(np.concatenate(ids)), np.arange(index.ntotal)):
        raise RuntimeError("the lists do not hold each label once")
