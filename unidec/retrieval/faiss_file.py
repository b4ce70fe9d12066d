"""Read index files that may be damaged, or made to do harm.

faiss trusts little of a file (from 1.15 on): it checks lengths, levels and links against each other, and allocates no
more than it is allowed to. What it leaves out is checked here once the file is read: that the index is of the kind and
size that is expected, that upper links of a graph stay on their level, that each label is in one list (in older files:
in two), and that the numbers that are computed with are finite.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from unidec.errors import ArtifactError
from unidec.model.faiss_library import faiss_module

_MAGIC = {"IndexFlat": b"IxFI", "IndexPQ": b"IxPq", "IndexHNSWFlat": b"IHNf", "IndexIVFPQ": b"IwPQ"}
_LEAST_LIST_BYTES = 48  # that a list needs in memory; in a sound file it needs more
_CHECKED_AT_ONCE = 1 << 22
_limits = threading.Lock()


def read_index_file(where: Path, like: Any, num_vectors: int) -> tuple[Any, Any]:
    """A faiss index, and the bytes that it has views into; a file that takes its place later does not show.

    Args:
        like: an empty index of the kind, width and codes that it must have.
        num_vectors: that it must hold; in lists of older bundles each is twice.

    Raises:
        ArtifactError: missing, damaged, or another kind or size of index.
    """
    faiss = faiss_module()
    try:
        with where.open("rb") as file:
            data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
        if bytes(data[:4]) != _MAGIC[type(like).__name__.removesuffix("IP")]:
            raise RuntimeError(f"not an {type(like).__name__}")
        reader = faiss.ZeroCopyIOReader(faiss.swig_ptr(data), data.size)
        with _bounded(data.size):
            index = faiss.read_index(reader, faiss.IO_FLAG_SKIP_PRECOMPUTE_TABLE | faiss.IO_FLAG_READ_ONLY)
        if reader.rp_ != data.size:
            raise RuntimeError(f"{data.size - reader.rp_} bytes behind its end")
        _check(index, like, num_vectors)
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or str(error)[-200:]
        raise ArtifactError(
            "a damaged index", where=str(where), got=reason, expected=f"{num_vectors} vectors of width {like.d}",
            fix="build the index again: unidec index build",
        ) from error  # fmt: skip
    return index, data


@contextlib.contextmanager
def _bounded(num_bytes: int) -> Iterator[None]:
    """faiss allocates no vector larger than the file, and no more lists than could be in it."""
    faiss = faiss_module()
    with _limits:  # they are the process's
        before = faiss.get_deserialization_vector_byte_limit(), faiss.get_deserialization_loop_limit()
        faiss.set_deserialization_vector_byte_limit(num_bytes)
        faiss.set_deserialization_loop_limit(max(64, num_bytes // _LEAST_LIST_BYTES))
        try:
            yield
        finally:
            faiss.set_deserialization_vector_byte_limit(before[0])
            faiss.set_deserialization_loop_limit(before[1])


def _check(index: Any, like: Any, num_vectors: int) -> None:
    """RuntimeError: not an index such as `like`, an empty one of the same kind, with so many vectors."""
    faiss = faiss_module()
    got, wanted = _layout(index), _layout(like)
    if got != wanted or not index.is_trained:
        raise RuntimeError(f"layout {got} instead of {wanted}")
    inner = faiss.downcast_index(index.storage) if hasattr(index, "hnsw") else index
    if hasattr(index, "invlists"):
        _check_lists(index, num_vectors)
    elif (index.ntotal, inner.ntotal, inner.codes.size()) != (num_vectors, num_vectors, num_vectors * inner.code_size):
        raise RuntimeError(f"{index.ntotal} vectors")
    if hasattr(index, "hnsw"):
        _check_links(index.hnsw)
    flat = faiss.downcast_index(index.quantizer) if hasattr(index, "invlists") else inner
    numbers = [] if hasattr(flat, "pq") else [faiss.rev_swig_ptr(flat.get_xb(), flat.ntotal * flat.d)]
    numbers += [faiss.vector_to_array(index.pq.centroids)] if hasattr(index, "pq") else []
    for array in numbers:
        starts = range(0, array.size, _CHECKED_AT_ONCE)
        if not all(np.isfinite(array[start : start + _CHECKED_AT_ONCE]).all() for start in starts):
            raise RuntimeError("numbers that are not finite")


def _layout(index: Any) -> list[Any]:
    """What is the same in all indexes of one kind, width and code."""
    faiss = faiss_module()
    name, size = type(index).__name__.removesuffix("IP"), getattr(index, "code_size", 0)
    found: list[Any] = [name, index.d, index.metric_type, size]
    if hasattr(index, "hnsw"):
        found.append(_layout(faiss.downcast_index(index.storage)))
    if hasattr(index, "invlists"):
        lists = faiss.downcast_InvertedLists(index.invlists)
        found += [type(lists).__name__, lists.code_size, index.by_residual, index.direct_map.type]
        found.append(_layout(faiss.downcast_index(index.quantizer)))
    if hasattr(index, "pq"):
        found += [index.pq.d, index.pq.code_size, index.pq.M, index.pq.nbits]
    return found


def _check_links(graph: Any) -> None:
    """A link at some level must lead to a node that exists at that level, or the search reads past its links."""
    faiss = faiss_module()
    levels, upto, links, starts = (
        faiss.vector_to_array(array)
        for array in (graph.levels, graph.cum_nneighbor_per_level, graph.neighbors, graph.offsets)
    )
    starts = starts.astype(np.int64)
    if graph.entry_point < 0 or graph.max_level != levels[graph.entry_point] - 1 or levels.max() - 1 != graph.max_level:
        raise RuntimeError(f"entry point {graph.entry_point} at level {graph.max_level}")
    if levels.min() < 1 or (starts[1:] - starts[:-1] != upto[levels]).any():
        raise RuntimeError("links that do not fit the levels")
    for level in range(1, int(levels.max())):  # level 0 holds every node
        nodes = np.flatnonzero(levels > level)
        targets = links[starts[nodes, None] + np.arange(upto[level], upto[level + 1])]
        if (levels[targets[targets >= 0]] <= level).any():
            raise RuntimeError(f"a link at level {level} to a node that is not there")


def _check_lists(index: Any, num_vectors: int) -> None:
    faiss, lists = faiss_module(), index.invlists
    centroids = faiss.downcast_index(index.quantizer)
    if not lists.nlist == index.nlist == centroids.ntotal == centroids.codes.size() // centroids.code_size:
        raise RuntimeError(f"{lists.nlist} lists of {centroids.ntotal} centroids")
    sizes = [lists.list_size(number) for number in range(lists.nlist)]
    ids = [faiss.rev_swig_ptr(lists.get_ids(number), size) for number, size in enumerate(sizes) if size]
    copies = index.ntotal // num_vectors
    if copies not in (1, 2) or not sum(sizes) == index.ntotal == copies * num_vectors:
        raise RuntimeError(f"{sum(sizes)} entries of {index.ntotal} vectors")
    if not np.array_equal(np.sort(np.concatenate(ids)), np.repeat(np.arange(num_vectors), copies)):
        raise RuntimeError("lists that do not hold each label once")
