"""Measures indexes and search settings on given labels and queries, to find the fastest with enough
recall.

Legend: L labels, N queries, K results, D' width of the searched space.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from unidec.config.index_spec import KINDS, IndexSpec, Kind
from unidec.model.faiss_library import faiss_module
from unidec.model.search import recall
from unidec.progress import progress
from unidec.ranking.exact_index import ExactIndex
from unidec.ranking.heads import Heads
from unidec.ranking.index import LabelIndex
from unidec.ranking.sparse import Floats, Rows

GRAPH_LABELS = 200_000
"""Above this number of labels, HNSW is measured only on request: building a graph takes hours."""
LIST_LABELS = 5_000
"""Below this number of labels, inverted lists are not measured."""
FACTORIES: dict[Kind, tuple[str, ...]] = {
    "flat": ("Flat",),
    "pq": ("PQx4,dsub=8", "PQx4", "PQx4,dsub=2"),
    "hnsw": ("HNSW32",),
    "ivf-pq": ("IVF,PQx4", "IVF,PQx4,dsub=2"),
}
"""The indexes that are measured."""
_WARM_UP = 20


@dataclass(frozen=True)
class Measured:
    """Measurements of one setting.

    Attributes:
        factory, search: values of `index.factory` and `index.search`.
        recall: of the first K labels against exact search, 0 to 1.
        p50_ms, p99_ms: percentiles of the time to search one query.
        index_bytes: size of the index file, without the vectors for exact scores.
        build_seconds: time to build the index.
    """

    factory: str
    search: str
    recall: float
    p50_ms: float
    p99_ms: float
    index_bytes: int
    build_seconds: float


def default_kinds(num_labels: int) -> tuple[Kind, ...]:
    """Kinds worth measuring for this number of labels."""
    skipped = {"hnsw": num_labels > GRAPH_LABELS, "ivf-pq": num_labels < LIST_LABELS}
    return tuple(kind for kind in KINDS if not skipped.get(kind))


def tune(
    vectors: Heads, queries_ND: Floats, k: int, kinds: Iterable[Kind], threads: int = 1
) -> list[Measured]:
    """Measure the indexes of these kinds with each of their search settings.

    Args:
        vectors: label vectors.
        queries_ND: float32 [N, D'], searched one at a time.
        k: results per search.
        threads: threads of builds and searches.
    """
    _, exact_NK = ExactIndex(vectors).search(queries_ND, k)
    factories = [factory for kind in kinds for factory in FACTORIES[kind]]
    measured: list[Measured] = []
    for factory in progress(factories, desc="index tune", unit="build"):
        start = time.perf_counter()
        index = LabelIndex.build(vectors, IndexSpec.parse(factory), threads)
        seconds = time.perf_counter() - start
        num_bytes = int(faiss_module().serialize_index(index.stored).nbytes)
        index.threads = threads
        for search in search_settings(index, k):
            index.spec = IndexSpec.parse(factory, search)
            found_NK, times_N = _timed(index, queries_ND, k)
            p50, p99 = np.percentile(times_N, [50, 99]).tolist()
            measured.append(
                Measured(
                    factory=factory,
                    search=search,
                    recall=recall(found_NK, exact_NK),
                    p50_ms=p50,
                    p99_ms=p99,
                    index_bytes=num_bytes,
                    build_seconds=seconds,
                )
            )
    return measured


def _timed(index: LabelIndex, queries_ND: Floats, k: int) -> tuple[Rows, list[float]]:
    """The k labels found for each query, [N, K], and the milliseconds of each search."""
    times = []
    rows = []
    for query_D in itertools.chain(queries_ND[:_WARM_UP], queries_ND):
        start = time.perf_counter()
        rows.append(index.search(query_D[None], k)[1])
        times.append(1000 * (time.perf_counter() - start))
    num_queries = len(queries_ND)
    return np.concatenate(rows[-num_queries:]), times[-num_queries:]


def search_settings(index: LabelIndex, k: int) -> list[str]:
    """Search strings from fast to thorough: number of candidates scored exactly, and for nprobe and
    efSearch the ranges of faiss's `ParameterSpace`.
    """
    kind = index.spec.kind
    if kind == "flat":
        return [""]
    if kind == "pq":
        return [f"k_factor_rf={factor}" for factor in (1, 2, 4, 8, 16, 32)]
    if kind == "hnsw":
        return [f"efSearch={width}" for width in _powers_of_two(max(k, 4), 512) or [k]]
    lists = index.stored.nlist
    least = max(1, lists // 64)
    probes = _powers_of_two(least, min(lists - 1, 4096)) or [least]
    settings = itertools.product((1, 2, 4, 8), probes)
    return [f"nprobe={number},k_factor_rf={factor}" for factor, number in settings]


def _powers_of_two(least: int, most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length()) if least <= 1 << i]
