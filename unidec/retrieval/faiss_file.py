"""A check of faiss index files before faiss reads them.

faiss trusts the numbers inside a file: a crafted one can make it allocate without limit or follow neighbour ids that
point outside memory. Both kinds of index written here have a simple layout (little endian, read off faiss 1.13 to
1.15), so it is walked first: every count against the bytes that are there, and every id of the graph against the
number of labels.

    header   4 bytes name, int32 d, int64 ntotal, 2 x int64 (not used), bool trained, int32 metric
    IxFI     header, uint64 count, count floats
    IHNf     header, six vectors (uint64 count, items): float64 level probabilities, int32 links up to each level,
             int32 levels of each node, uint64 offsets of each node's links, int32 links; 5 x int32; then an IxFI
"""

from __future__ import annotations

import struct

import numpy as np

from unidec.errors import ArtifactError

FLAT, HNSW = b"IxFI", b"IHNf"
INNER_PRODUCT = 0
_HEADER = struct.Struct("<4siqqq?i")
_FIX = "build the index again: unidec index"


class _Walk:
    """Reads forward through the bytes of a file and never beyond them."""

    def __init__(self, data: np.ndarray, where: str) -> None:
        self.data, self.where, self.at = data, where, 0

    def refuse(self, what: str, got: object = None, expected: object = None) -> ArtifactError:
        return ArtifactError(f"a damaged index: {what}", where=self.where, got=got, expected=expected, fix=_FIX)

    def unpack(self, layout: struct.Struct) -> tuple:
        end = self.at + layout.size
        if end > self.data.size:
            raise self.refuse("cut short", f"{self.data.size} bytes", f"at least {end}")
        values = layout.unpack(self.data[self.at : end].tobytes())
        self.at = end
        return values

    def vector(self, name: str, dtype: str, count: int | None = None) -> np.ndarray:
        (found,) = self.unpack(struct.Struct("<Q"))
        if count is not None and found != count:
            raise self.refuse(f"length of {name}", found, count)
        size = found * np.dtype(dtype).itemsize
        if size > self.data.size - self.at:
            raise self.refuse(
                f"{name} longer than the file", f"{found} items", f"{self.data.size - self.at} bytes left"
            )
        array = self.data[self.at : self.at + size].view(dtype)
        self.at += size
        return array


def check_index_file(data: np.ndarray, kind: str, num_labels: int, dim: int, where: str) -> None:
    """Refuse a file that is not a sound index of this kind and size.

    Args:
        data: the whole file, uint8 (may be memory-mapped).
        kind: "flat" or "hnsw".
        num_labels, dim: what it must hold.
        where: the file's name, for errors.

    Raises:
        ArtifactError: another kind, other dimensions or metric, lengths that do not fit, a graph that points outside,
            numbers that are not finite, or bytes left over.
    """
    walk = _Walk(data, where)
    if kind == "hnsw":
        _header(walk, HNSW, num_labels, dim)
        _graph(walk, num_labels)
    _header(walk, FLAT, num_labels, dim)
    vectors = walk.vector("vectors", "<f4", num_labels * dim)
    if walk.at != data.size:
        raise walk.refuse("bytes behind its end", f"{data.size - walk.at} bytes")
    step = max(1, (1 << 22) // max(1, dim)) * max(1, dim)
    if not all(np.isfinite(vectors[start : start + step]).all() for start in range(0, vectors.size, step)):
        raise walk.refuse("a vector is not finite")


def _header(walk: _Walk, name: bytes, num_labels: int, dim: int) -> None:
    found, d, total, _, _, trained, metric = walk.unpack(_HEADER)
    if found != name:
        raise walk.refuse("another kind of file", found, name)
    if (d, total) != (dim, num_labels):
        raise walk.refuse("another size", f"{total} vectors of width {d}", f"{num_labels} vectors of width {dim}")
    if not trained or metric != INNER_PRODUCT:
        raise walk.refuse("another metric", f"metric {metric}", f"metric {INNER_PRODUCT} (inner product)")


def _graph(walk: _Walk, num_labels: int) -> None:
    walk.vector("level probabilities", "<f8")
    upto = walk.vector("links a level", "<i4").astype(np.int64)
    levels = walk.vector("levels", "<i4", num_labels)
    offsets = walk.vector("link offsets", "<u8", num_labels + 1)
    links = walk.vector("links", "<i4")
    entry, max_level, _, _, _ = walk.unpack(struct.Struct("<5i"))
    if upto.size < 2 or upto[0] != 0 or (np.diff(upto) < 0).any():
        raise walk.refuse("links a level are not increasing")
    if levels.size and (levels.min() < 1 or levels.max() >= upto.size):
        raise walk.refuse("a level outside the graph", f"{levels.min()} to {levels.max()}", f"1 to {upto.size - 1}")
    expected = np.concatenate([[0], np.cumsum(upto[levels], dtype=np.int64)]).astype(np.uint64)
    if not np.array_equal(offsets, expected) or links.size != int(expected[-1]):
        raise walk.refuse("link offsets do not fit the levels")
    if links.size and (links.min() < -1 or links.max() >= num_labels):
        raise walk.refuse("a link outside the graph", f"{links.min()} to {links.max()}", f"-1 to {num_labels - 1}")
    _links_within_levels(walk, upto, levels, offsets, links)
    top = int(levels.max()) - 1 if levels.size else -1
    if max_level != top or not (0 <= entry < num_labels and levels[entry] - 1 == top):
        raise walk.refuse("entry point", f"node {entry} at level {max_level}", f"a node of level {top}")


def _links_within_levels(
    walk: _Walk, upto: np.ndarray, levels: np.ndarray, offsets: np.ndarray, links: np.ndarray
) -> None:
    """A link at some level must lead to a node that exists at that level, or the search reads past its links."""
    starts = offsets[:-1].astype(np.int64)
    for level in range(1, int(levels.max(initial=1))):  # level 0 holds every node
        nodes = np.flatnonzero(levels > level)
        places = starts[nodes, None] + np.arange(upto[level], upto[level + 1])
        targets = links[places].ravel()
        targets = targets[targets >= 0]
        if (levels[targets] <= level).any():
            raise walk.refuse(f"a link at level {level} to a node that is not there")
