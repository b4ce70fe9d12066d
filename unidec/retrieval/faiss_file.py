"""A check of faiss index files before faiss reads them.

faiss trusts the numbers inside a file: a crafted one can make it allocate without limit or follow neighbour ids that
point outside memory. Every kind of index written here has a simple layout (little endian, read off faiss 1.13 to
1.15), so it is walked first: every count against the bytes that are there, every id of a graph or a list against the
number of vectors, every number that is computed with for being finite.

    header   4 bytes name, int32 d, int64 ntotal, 2 x int64 (not used), bool trained, int32 metric
    vector   uint64 count, count items
    SQ       int32 type (0: 8 bits), int32, float32 (how ranges are found), uint64 d, uint64 code size, vector of
             float32: the least of each dimension, then the spans
    PQ       uint64 d, uint64 codes, uint64 bits, vector of float32: 2^bits centroids for each code
    lists    "ilar", uint64 lists, uint64 code size, "full" and a vector of uint64 sizes, or "sprs" and a vector of
             (list, size); then for each list that holds any: codes, int64 ids

    IxFI     flat: header, vector of float32
    IxSQ     sq8: header, SQ, vector of codes
    IxPq     pq: header, PQ, vector of codes, int32, bool, int32 (other ways to search)
    IHNf     hnsw: header, six vectors: float64 level probabilities, int32 links up to each level, int32 levels of each
             node, uint64 offsets of each node's links, int32 links; 5 x int32; then an IxFI
    IHNs     hnsw-sq8: the same with an IxSQ
    IwSq     ivf-sq8: IVF, SQ, uint64 code size, bool by residual, lists
    IwPQ     ivf-pq: IVF, bool by residual, uint64 code size, PQ, lists
    IVF      header, uint64 lists, uint64 probes, an IxFI of centroids, int8 and vector of int64 (a map: none); ntotal
             is twice the number of labels where each is in two lists, as in older bundles
"""

from __future__ import annotations

import struct

import numpy as np

from unidec.errors import ArtifactError
from unidec.retrieval.index_kinds import COMPRESSED, GRAPHS, LISTS, PACKED, IndexOptions, Kind

INNER_PRODUCT = 0
_HEADER = struct.Struct("<4siqqq?i")
_SCALAR = struct.Struct("<iifQQ")
_PRODUCT = struct.Struct("<QQQ")
_LISTS = struct.Struct("<4sQQ4s")
_EIGHT_BITS = 0
_NAMES: dict[Kind, bytes] = {
    "flat": b"IxFI", "sq8": b"IxSQ", "pq": b"IxPq", "hnsw": b"IHNf", "hnsw-sq8": b"IHNs", "ivf-sq8": b"IwSq",
    "ivf-pq": b"IwPQ",
}  # fmt: skip
_MOST_LISTS = 1 << 20
_FIX = "build the index again: unidec index build"


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

    def items(self, name: str, dtype: str, count: int) -> np.ndarray:
        size = count * np.dtype(dtype).itemsize
        if size > self.data.size - self.at:
            raise self.refuse(
                f"{name} longer than the file", f"{count} items", f"{self.data.size - self.at} bytes left"
            )
        array = self.data[self.at : self.at + size].view(dtype)
        self.at += size
        return array

    def vector(self, name: str, dtype: str, count: int | None = None) -> np.ndarray:
        (found,) = self.unpack(struct.Struct("<Q"))
        if count is not None and found != count:
            raise self.refuse(f"length of {name}", found, count)
        return self.items(name, dtype, found)

    def finite(self, name: str, count: int) -> np.ndarray:
        array = self.vector(name, "<f4", count)
        step = 1 << 22
        if not all(np.isfinite(array[start : start + step]).all() for start in range(0, array.size, step)):
            raise self.refuse(f"{name} are not finite")
        return array


def max_file_size(num_vectors: int, dim: int, kind: Kind, options: IndexOptions | None = None) -> int:
    """No sound index file of this size is larger (bytes): codes, and for a graph at most 1,024 links a label on
    average, for lists an id a label and the centroids of as many lists as there may be.

    Args:
        dim: width as faiss has it (`IndexOptions.width`).
    """
    options = options or IndexOptions()
    code = dim if kind in COMPRESSED else 4 * dim
    size = num_vectors * (2 if kind in LISTS else 1) * code + 4096 + 256 * dim
    if kind in GRAPHS:
        size += num_vectors * (16 + 4 * 1024)
    if kind in LISTS:
        size += 16 * num_vectors + max(options.lists, num_vectors) * (4 * dim + 16)
    return size


def check_index_file(
    data: np.ndarray, kind: Kind, num_vectors: int, dim: int, where: str, options: IndexOptions | None = None
) -> None:
    """Refuse a file (`data`, uint8, may be memory-mapped) that is not a sound index of this kind and size.

    Args:
        num_vectors, dim: what it must hold; dim as faiss has it (`IndexOptions.width`).
        where: the file's name, for errors.
        options: as it was built: dimensions that share a code of 4 bits.

    Raises:
        ArtifactError: another kind, other dimensions or metric, lengths that do not fit, a graph or list that points
            outside, numbers that are not finite, or bytes left over.
    """
    walk, options = _Walk(data, where), options or IndexOptions()
    if kind in LISTS:
        _inverted(walk, kind, num_vectors, dim, options)
    else:
        _header(walk, _NAMES[kind], num_vectors, dim)
    if kind in GRAPHS:
        _graph(walk, num_vectors)
        _header(walk, _NAMES["flat" if kind == "hnsw" else "sq8"], num_vectors, dim)
    if kind in ("flat", "hnsw"):
        walk.finite("vectors", num_vectors * dim)
    elif kind in ("sq8", "hnsw-sq8"):
        _scalar(walk, dim)
        walk.vector("codes", "u1", num_vectors * dim)
    elif kind == "pq":
        size = _product(walk, dim, options.code_dims)
        walk.vector("codes", "u1", num_vectors * size)
        walk.unpack(struct.Struct("<i?i"))
    if walk.at != walk.data.size:
        raise walk.refuse("bytes behind its end", f"{walk.data.size - walk.at} bytes")


def _header(walk: _Walk, name: bytes, num_vectors: int, dim: int, most_copies: int = 1) -> int:
    """Times that each vector is in the index."""
    found, d, total, _, _, trained, metric = walk.unpack(_HEADER)
    if found != name:
        raise walk.refuse("another kind of file", found, name)
    copies = total // num_vectors
    if (d, total) != (dim, copies * num_vectors) or not 1 <= copies <= most_copies:
        raise walk.refuse("another size", f"{total} vectors of width {d}", f"{num_vectors} vectors of width {dim}")
    if not trained or metric != INNER_PRODUCT:
        raise walk.refuse("another metric", f"metric {metric}", f"metric {INNER_PRODUCT} (inner product)")
    return copies


def _scalar(walk: _Walk, dim: int) -> None:
    bits, _, _, d, code_size = walk.unpack(_SCALAR)
    if (bits, d, code_size) != (_EIGHT_BITS, dim, dim):
        raise walk.refuse("another quantiser", (bits, d, code_size), (_EIGHT_BITS, dim, dim))
    walk.finite("ranges", 2 * dim)


def _product(walk: _Walk, dim: int, code_dims: int) -> int:
    """Bytes of a code."""
    found, codes = walk.unpack(_PRODUCT), dim // code_dims
    if found != (dim, codes, 4) or codes * code_dims != dim:
        raise walk.refuse("another quantiser", found, (dim, codes, 4))
    walk.finite("centroids", 16 * dim)
    return (4 * codes + 7) // 8


def _inverted(walk: _Walk, kind: Kind, num_vectors: int, dim: int, options: IndexOptions) -> None:
    copies = _header(walk, _NAMES[kind], num_vectors, dim, most_copies=2)
    lists, probes = walk.unpack(struct.Struct("<QQ"))
    if not (0 < lists <= _MOST_LISTS and 0 < probes <= _MOST_LISTS):
        raise walk.refuse("number of lists", (lists, probes), f"1 to {_MOST_LISTS}")
    _header(walk, _NAMES["flat"], lists, dim)
    walk.finite("centroids", lists * dim)
    (mapped,) = walk.unpack(struct.Struct("<b"))
    if mapped or walk.vector("map", "<i8").size:
        raise walk.refuse("a map of its entries", mapped, "none")
    if kind in PACKED:
        residual, code_size = walk.unpack(struct.Struct("<?Q"))
        expected = _product(walk, dim, options.code_dims)
    else:
        _scalar(walk, dim)
        code_size, residual = walk.unpack(struct.Struct("<Q?"))
        expected = dim
    if code_size != expected or not residual:
        raise walk.refuse("size of a code", code_size, expected)
    _lists(walk, lists, code_size, num_vectors, copies)


def _lists(walk: _Walk, num_lists: int, code_size: int, num_vectors: int, copies: int) -> None:
    """Each vector must be in `copies` lists."""
    layout = walk.unpack(_LISTS)
    name, found, size, form = layout
    if (name, found, size) != (b"ilar", num_lists, code_size) or form not in (b"full", b"sprs"):
        raise walk.refuse("lists", layout, (b"ilar", num_lists, code_size, b"full"))
    sizes = np.zeros(num_lists, dtype=np.uint64)
    if form == b"full":
        sizes[:] = walk.vector("sizes of lists", "<u8", num_lists)
    else:
        pairs = walk.vector("sizes of lists", "<u8")
        if pairs.size % 2 or (np.diff(pairs[::2].astype(np.int64)) <= 0).any() or (pairs[::2] >= num_lists).any():
            raise walk.refuse("sizes of lists")
        sizes[pairs[::2].astype(np.int64)] = pairs[1::2]
    if (sizes > num_vectors).any() or int(sizes.sum()) != copies * num_vectors:
        raise walk.refuse("entries of lists", int(sizes.max(initial=0)), f"{copies * num_vectors} in all")
    seen = np.zeros(num_vectors, dtype=np.uint8)
    for number in np.flatnonzero(sizes):
        count = int(sizes[number])
        walk.items("codes", "u1", count * code_size)
        ids = walk.items("ids", "<i8", count)
        if ids.min() < 0 or ids.max() >= num_vectors:
            raise walk.refuse("an id outside the labels", f"{ids.min()} to {ids.max()}", f"0 to {num_vectors - 1}")
        once = np.unique(ids)
        if len(once) != count or (seen[once] == copies).any():
            raise walk.refuse("a label in too many lists, or twice in one", int(number), f"{copies} lists")
        seen[once] += 1


def _graph(walk: _Walk, num_nodes: int) -> None:
    walk.vector("level probabilities", "<f8")
    upto = walk.vector("links a level", "<i4").astype(np.int64)
    levels = walk.vector("levels", "<i4", num_nodes)
    offsets = walk.vector("link offsets", "<u8", num_nodes + 1)
    links = walk.vector("links", "<i4")
    entry, max_level, _, _, _ = walk.unpack(struct.Struct("<5i"))
    if upto.size < 2 or upto[0] != 0 or (np.diff(upto) < 0).any():
        raise walk.refuse("links a level are not increasing")
    if levels.size and (levels.min() < 1 or levels.max() >= upto.size):
        raise walk.refuse("a level outside the graph", f"{levels.min()} to {levels.max()}", f"1 to {upto.size - 1}")
    expected = np.concatenate([[0], np.cumsum(upto[levels], dtype=np.int64)]).astype(np.uint64)
    if not np.array_equal(offsets, expected) or links.size != int(expected[-1]):
        raise walk.refuse("link offsets do not fit the levels")
    if links.size and (links.min() < -1 or links.max() >= num_nodes):
        raise walk.refuse("a link outside the graph", f"{links.min()} to {links.max()}", f"-1 to {num_nodes - 1}")
    _links_within_levels(walk, upto, levels, offsets, links)
    top = int(levels.max()) - 1 if levels.size else -1
    if max_level != top or not (0 <= entry < num_nodes and levels[entry] - 1 == top):
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
