"""Search for the labels with the largest inner product, with one of the kinds of index of
`config/index_spec.py`, and recall of that search.

All kinds but flat can miss labels. All scores are exact: codes select candidates, which are then
scored with the float32 vectors (`Heads`). Codes are searched with faiss's fast scan; files store
them in faiss's plain layout, and loading repacks them.

Legend: L labels, B and N queries, K results, C candidates, P rows, D width of the searched space
(`heads.py`); width: of the vectors in the faiss index (D with padding).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unidec.config.index_spec import COMPRESSED, FLAT, IndexSpec, Kind
from unidec.cores import in_order, num_threads, thread_pool
from unidec.data.shards import Job, Work, divided, is_dividing
from unidec.data.storage import load_array, write_file
from unidec.data.temporary import remove
from unidec.model.faiss_library import faiss_module
from unidec.progress import progress
from unidec.ranking.faiss_file import read_index_file
from unidec.ranking.heads import Heads, as_heads
from unidec.ranking.sparse import Floats, Rows, best_first

LEAST_CANDIDATES = 64
"""Minimum number of candidates that are scored exactly, even for one result: this is cheap, and a
wrong first label is costly. With 64 candidates of 12,941 labels, `pq` finds 0.9997 of the five best
labels and every best one.
"""

FLAT_CENTROIDS = 1024
"""Up to this number, list centroids are trained by a single k-means and searched exhaustively."""
ROWS_AT_ONCE = 1 << 16  # label rows added at a time: 128 MB at 512 dimensions
# smaller, because a graph grows slowly and progress is shown per block
_GRAPH_ROWS_AT_ONCE = 1 << 12
_TRAINING_ROWS = 1 << 16  # rows that train a quantiser; more rows hardly change its centroids
_ROWS_A_LIST = 40  # training rows per list; faiss asks for 39
_ROUNDS = 10  # k-means iterations; faiss's default of 25 takes longer and gives the same recall
_CODES = 16  # values of a 4-bit code
_FIRST_MORE = 32  # additional labels searched at first if labels are excluded
_TRAINED = "trained.faiss"
_CODES_FILE = "codes.npy"


@contextlib.contextmanager
def faiss_threads(threads: int, faiss: Any = None) -> Iterator[None]:
    """Sets the number of threads for faiss calls from this thread; 0 keeps faiss's default."""
    faiss = faiss or faiss_module()
    before = faiss.omp_get_max_threads()
    if threads:
        faiss.omp_set_num_threads(num_threads(threads))
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def empty_index(spec: IndexSpec, dim: int, num_labels: int) -> Any:
    """An empty faiss index for vectors of width `dim`, which compressed kinds pad to a multiple of
    `code_dims`.
    """
    faiss = faiss_module()
    pieces = -(-dim // spec.code_dims)
    factory = {
        "flat": "Flat",
        "pq": f"PQ{pieces}x4np",
        "hnsw": f"HNSW{spec.links},Flat",
        "ivf-pq": f"IVF{spec.num_lists(num_labels)},PQ{pieces}x4np",
    }
    width = pieces * spec.code_dims if spec.kind in COMPRESSED else dim
    index = faiss.index_factory(width, factory[spec.kind], faiss.METRIC_INNER_PRODUCT)
    if spec.kind == "hnsw":
        index.hnsw.efConstruction = spec.build
        index.hnsw.efSearch = spec.search
    return index


class LabelIndex:
    """An index over label vectors for inner-product search. Searching is thread-safe.

    Scores are exact, and `recall` measures the missed labels. An HNSW graph over vectors of unequal
    length (`clf_normalize=False`) favours long vectors: check its recall, or use another kind.

    Args:
        index: the faiss index; becomes `stored`.
        data: the buffer that `index` refers to; kept alive.

    Attributes:
        spec: kind and parameters of the index; the search parameters may be replaced.
        vectors: label vectors for scoring the candidates; None if the index itself holds them.
        stored: the faiss index as written to a file.
        threads: threads of one search, 0 for faiss's default. More than one is faster only for many
        queries at once.
    """

    def __init__(
        self,
        index: Any,
        spec: IndexSpec,
        vectors: Heads | None = None,
        data: Any = None,
    ) -> None:
        is_compressed = spec.kind in COMPRESSED
        if is_compressed and vectors is None:
            raise ValueError(
                f"an index of kind {spec.kind!r} needs the labels' vectors to score candidates"
            )
        self.spec = spec
        self.threads = 0
        self._faiss = faiss_module()
        self.vectors = vectors if is_compressed else None
        self.stored = index
        self._data = data
        self._index = _searchable(index, spec.kind)
        self.num_labels = int(index.ntotal)
        self.dim = int(index.d) if vectors is None else vectors.shape[1]

    @classmethod
    def build(
        cls,
        vectors_LD: Floats | Heads,
        spec: IndexSpec = FLAT,
        threads: int = 1,
        show: bool = False,
        parts: Path | None = None,
    ) -> LabelIndex:
        """Index label vectors.

        A compressed kind is trained by one thread, on a sample; all cores then assign and encode
        the labels, which are added in order, so that the index's bytes do not depend on the number
        of cores. Memory holds the index (per label, half a byte for every `code_dims` dimensions,
        and 8 bytes), the sample, and `ROWS_AT_ONCE` vectors per core.

        Args:
            vectors_LD: float32 [L, D], finite, or `Heads`, which compute rows on demand; a
                compressed kind keeps them to score candidates.
            spec: kind and parameters of the index.
            threads: threads that build an uncompressed index, 0 for faiss's default; with more than
                one, an HNSW graph is not reproducible.
            show: print progress.
            parts: folder that keeps the codes of a compressed kind during the build, so that an
                interrupted build can resume; removed at the end. Inside of `shards.dividing` other
                processes encode the labels. None: the codes are not kept, and encoded here.

        Raises:
            ValueError: there are no labels, or a number is not finite.
            ArtifactError: not enough space in `parts`.
            UnidecError: faiss is not installed.
        """
        vectors = as_heads(vectors_LD)
        num_labels, dim = vectors.shape
        if not num_labels:
            raise ValueError("vectors_LD must hold at least one label")
        index = empty_index(spec, dim, num_labels)
        is_compressed = spec.kind in COMPRESSED
        step = _GRAPH_ROWS_AT_ONCE if spec.kind == "hnsw" else ROWS_AT_ONCE
        blocks = np.split(np.arange(num_labels), range(step, num_labels, step))
        desc = f"index {spec.kind}" if show else None
        with (
            faiss_threads(1 if is_compressed else threads),
            progress(total=num_labels, desc=desc, unit="label") as bar,
        ):
            if is_compressed:
                _train(index, vectors)
                add = index.add_sa_codes
                added: Iterator[npt.NDArray[Any]] = _encoded(index, vectors, blocks, parts)
            else:
                add = index.add
                added = (_checked_rows(vectors, rows, index.d) for rows in blocks)
            for rows, rows_or_codes in zip(blocks, added, strict=True):
                add(rows_or_codes)
                bar.update(len(rows))
        if parts is not None:
            remove(parts)
        return cls(index, spec, vectors)

    def search(
        self, queries_BD: Floats, k: int, rescore: int = 0, excluded: Rows | None = None
    ) -> tuple[Floats, Rows]:
        """The k labels with the largest inner product, best first; ties are ordered by label row.

        With excluded labels, more than k labels are searched, and the search is repeated with more
        while queries have too few results.

        Args:
            queries_BD: float32 [B, D], finite.
            k: at least 1; may exceed L.
            rescore: candidates per result that are scored exactly; 0: `spec.rescore`.
            excluded: int64, unique keys query * L + label of pairs that are not returned.

        Returns:
            scores float32 [B, K] and label rows int64 [B, K]; -inf and -1 where there is no result.
        """
        if excluded is None or not excluded.size:
            return self._search(queries_BD, k, rescore)
        num_excluded_B = np.bincount(excluded // self.num_labels, minlength=len(queries_BD))
        scores_BK, rows_BK = _no_results(len(queries_BD), k)
        open_B = np.arange(len(queries_BD))
        more = _FIRST_MORE
        while len(open_B):
            # the same width for all queries: results of an approximate search depend on the width,
            # but not on other queries
            width = max(k, min(k + more, self.num_labels))
            scores, rows = self._search(queries_BD[open_B], width, rescore)
            keys = open_B[:, None] * self.num_labels + rows
            removed = np.isin(keys, excluded) & (rows >= 0)
            scores[removed] = -np.inf
            rows[removed] = -1
            scores_BK[open_B], rows_BK[open_B] = best_first(scores, rows, k)
            if width >= self.num_labels:
                break
            is_short_B = (rows_BK[open_B] < 0).any(axis=1)
            open_B = open_B[is_short_B & (num_excluded_B[open_B] > more)]
            more *= 8
        return scores_BK, rows_BK

    def _search(self, queries_BD: Floats, k: int, rescore: int) -> tuple[Floats, Rows]:
        """Like `search`, without exclusions."""
        num_results = min(k, self.num_labels)
        num = num_results
        if self.vectors is not None:
            num = max(LEAST_CANDIDATES, (rescore or self.spec.rescore) * num_results)
        score_BC, rows_BC = self._candidates(queries_BD, min(num, self.num_labels))
        if self.vectors is not None:
            score_BC = self._exact_scores(queries_BD, rows_BC)
        score_BC = np.where(rows_BC >= 0, score_BC, np.float32(-np.inf))
        found = best_first(score_BC, rows_BC, num_results)
        if num_results == k:
            return found
        scores_BK, rows_BK = _no_results(len(queries_BD), k)
        scores_BK[:, :num_results], rows_BK[:, :num_results] = found
        return scores_BK, rows_BK

    def _exact_scores(self, queries_BD: Floats, rows_BC: Rows) -> Floats:
        """Inner products of each query with its candidates, from the float32 vectors: [B, C],
        undefined where the row is -1. Computed in blocks of at most `ROWS_AT_ONCE` pairs.
        """
        assert self.vectors is not None
        out_BC = np.empty(rows_BC.shape, dtype=np.float32)
        num_queries, num_candidates = rows_BC.shape
        width = min(num_candidates, ROWS_AT_ONCE)
        height = max(1, ROWS_AT_ONCE // max(1, width))
        starts = itertools.product(
            range(0, num_queries, height), range(0, num_candidates, ROWS_AT_ONCE)
        )
        for query, candidate in starts:
            queries = slice(query, query + height)
            block = queries, slice(candidate, candidate + ROWS_AT_ONCE)
            rows = rows_BC[block].clip(0)
            out_BC[block] = self.vectors.scores(queries_BD[queries], rows)
        return out_BC

    def _candidates(self, queries_BD: Floats, num: int) -> tuple[Floats, Rows]:
        """First stage of a search: candidates, and their inner products with the stored vectors or
        codes.

        Args:
            queries_BD: float32 [B, D]. num: candidates, 1 to L.

        Returns:
            scores float32 [B, C] and label rows int64 [B, C], -1 for no candidate.
        """
        if not np.isfinite(queries_BD).all():
            raise ValueError("queries_BD must be finite")
        if num == self.num_labels and self.vectors is not None:  # every label is a candidate
            every = np.broadcast_to(np.arange(num), (len(queries_BD), num))
            return np.zeros(every.shape, dtype=np.float32), every
        with faiss_threads(self.threads, self._faiss):
            padded = _padded(queries_BD, self._index.d)
            return self._index.search(padded, num, params=self._search_params(num))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index in faiss's format, atomically (`write_file`)."""
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
        spec: IndexSpec = FLAT,
        vectors: Floats | Heads | None = None,
    ) -> LabelIndex:
        """Load an index, which must hold `num_labels` vectors of width `dim`.

        The file is memory-mapped, and processes that load it share its pages (packed 4-bit codes
        are private memory). `faiss_file.py` checks the file, so that a malicious one can neither
        exhaust memory nor cause out-of-bounds reads.

        Raises:
            ArtifactError: the file is missing or damaged, or holds another kind or size of index.
            ValueError: a compressed kind without `vectors`.
            UnidecError: faiss is not installed.
        """
        heads = None if vectors is None else as_heads(vectors)
        like = empty_index(spec, dim, num_labels)
        index, data = read_index_file(Path(path), like, num_labels)
        return cls(index, spec, heads, data)

    def _search_params(self, num: int) -> Any:
        """faiss search parameters; passed with each search, because threads share the settings of
        the index.
        """
        faiss = self._faiss
        if self.spec.kind == "hnsw":
            return faiss.SearchParametersHNSW(efSearch=max(self.spec.search, num))
        if self.spec.kind != "ivf-pq":
            return None
        lists = self._index.nlist
        # number of lists that hold twice the candidates if all lists are equally long
        enough = -(-2 * num * lists // self.num_labels)
        probes = max(self.spec.num_probes(lists), enough)
        return faiss.SearchParametersIVF(nprobe=min(lists, probes))


def _searchable(index: Any, kind: Kind) -> Any:
    """The faiss index to search: `index` itself, or for codes its fast-scan form. Many list
    centroids are also searched by codes, and the nearest of them compared exactly.
    """
    faiss = faiss_module()
    if kind == "pq":
        return faiss.IndexPQFastScan(index)
    if kind != "ivf-pq":
        return index
    packed = faiss.IndexIVFPQFastScan(index)
    if index.nlist > FLAT_CENTROIDS and index.d % 2 == 0:
        centroid_CD = faiss.downcast_index(index.quantizer).reconstruct_n(0, index.nlist)
        factory = f"PQ{index.d // 2}x4fs"
        codes = faiss.index_factory(index.d, factory, faiss.METRIC_INNER_PRODUCT)
        codes.pq.cp.niter = 4
        step = max(1, index.nlist // 4096)
        codes.train(centroid_CD[::step])
        codes.add(centroid_CD)
        packed.quantizer = faiss.IndexRefine(codes, index.quantizer)
        packed.referenced_objects = [codes, packed.quantizer]
    return packed


def _no_results(num_queries: int, k: int) -> tuple[Floats, Rows]:
    """Scores -inf and rows -1, [B, K]."""
    scores_BK = np.full((num_queries, k), -np.inf, dtype=np.float32)
    return scores_BK, np.full((num_queries, k), -1, dtype=np.int64)


def _padded(array_PD: Floats, width: int) -> Floats:
    """Zero-padded to `width` columns: float32 [P, width], contiguous."""
    out = np.zeros((len(array_PD), width), dtype=np.float32)  # np.pad takes ten times as long
    out[:, : array_PD.shape[1]] = array_PD
    return out


def _checked_rows(vectors: Heads, rows_P: Rows, width: int) -> Floats:
    """Zero-padded rows float32 [P, width], contiguous; raises ValueError for a number that is not
    finite.
    """
    array = vectors.take(rows_P)
    finite_P = np.isfinite(array).all(axis=1)
    if not finite_P.all():
        row = rows_P[np.argmin(finite_P)]
        raise ValueError(f"vectors_LD must be finite, row {row} is not")
    return _padded(array, width)


def _encoded(
    index: Any, vectors: Heads, blocks: list[Rows], parts: Path | None
) -> Iterator[npt.NDArray[np.uint8]]:
    """The codes of each block of labels, with their list numbers, in the format of `add_sa_codes`.

    Each block is encoded by one thread, since BLAS rounds differently with several. A file of codes
    is named after a hash of what determines them.
    """
    if parts is not None and len(blocks) > 1 and is_dividing():
        yield from _encoded_in_shards(index, vectors, parts)
        return
    trained = hashlib.sha256(faiss_module().serialize_index(index))

    def encode(rows: Rows) -> npt.NDArray[np.uint8]:
        vectors_PD = _checked_rows(vectors, rows, index.d)
        if parts is None:
            return index.sa_encode(vectors_PD)
        name = trained.copy()
        name.update(vectors_PD.data)
        path = parts / f"{name.hexdigest()}.npy"
        if not path.is_file():
            codes = index.sa_encode(vectors_PD)
            with write_file(path, num_bytes=codes.nbytes) as file:
                np.save(file, codes)
        return load_array(path, np.uint8, ndim=2)

    with thread_pool() as threads:
        yield from in_order((threads.submit(encode, rows) for rows in blocks), num_threads())


def _encoded_in_shards(index: Any, vectors: Heads, parts: Path) -> Iterator[npt.NDArray[np.uint8]]:
    """As `_encoded`, by other processes, which read the trained index and the heads' vectors from
    files. A shard is a block.
    """

    def write_inputs(folder: Path) -> None:
        faiss_module().write_index(index, str(folder / _TRAINED))
        for name, array in vectors.vectors.items():
            np.save(folder / f"{name}.npy", array)

    job = Job("codes", "index", "label")
    size = (vectors.num_labels, ROWS_AT_ONCE)
    with divided(parts, job, vectors.settings, size, write_inputs) as shards:
        for shard in shards:
            yield load_array(shard / _CODES_FILE, np.uint8, ndim=2)


def write_shard(work: Work, number: int, threads: int = 0) -> None:
    """Encode the labels of one shard. `threads` is not used: with several, rounding differs.

    Raises:
        ArtifactError: the inputs are missing or damaged, or the shard cannot be written.
    """
    inputs = work.checked_inputs()
    arrays = {
        path.stem: np.load(path, mmap_mode="r", allow_pickle=False) for path in inputs.glob("*.npy")
    }
    heads = Heads(arrays, **work.settings)
    index = faiss_module().read_index(str(inputs / _TRAINED))
    rows = np.arange(*work.rows(number))
    with thread_pool(1) as thread:
        codes = thread.submit(index.sa_encode, _checked_rows(heads, rows, index.d)).result()
    with work.write(number) as out:
        np.save(out.path / _CODES_FILE, codes)


def _train(index: Any, vectors: Heads) -> None:
    """Train the centroids on a sample of the rows; the sample is the same for each build."""
    num_labels = vectors.num_labels
    num_lists = getattr(index, "nlist", 0)
    num_rows = max(_TRAINING_ROWS, _ROWS_A_LIST * num_lists)
    rows = np.arange(num_labels)
    if num_rows < num_labels:
        generator = np.random.default_rng(0)
        rows = np.sort(generator.choice(num_labels, num_rows, replace=False))
    sample = _checked_rows(vectors, rows, index.d)
    if len(sample) < _CODES:
        sample = np.resize(sample, (_CODES, index.d))  # faiss requires a row for each centroid
    clusterings = [index.pq.cp, index.cp] if num_lists else [index.pq.cp]
    for clustering in clusterings:
        clustering.niter = _ROUNDS
        clustering.min_points_per_centroid = 1
    if num_lists > FLAT_CENTROIDS:  # two-level k-means
        from faiss.contrib.clustering import two_level_clustering

        centroids, _ = two_level_clustering(
            sample,
            round(num_lists**0.5),
            num_lists,
            clustering_niter=_ROUNDS,
            spherical=True,
            min_points_per_centroid=1,
        )
        index.quantizer.add(centroids)
    index.train(sample)
