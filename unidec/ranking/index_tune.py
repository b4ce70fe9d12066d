"""Measures index kinds and their settings on given labels and queries, to find the fastest one with
enough recall.

Legend: L labels, N queries, K results, D' width of the searched space.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unidec.model.faiss_library import faiss_module
from unidec.progress import progress
from unidec.ranking.heads import Heads
from unidec.ranking.index import KINDS, Kind, LabelIndex, blocks, recall

GRAPH_LABELS = 200_000
"""Above this number of labels, HNSW is measured only on request: a graph takes hours to build."""
LIST_LABELS = 5_000
"""Below this number of labels, inverted lists are not measured."""
CODE_DIMS: dict[Kind, tuple[int, ...]] = {"pq": (8, 4, 2), "ivf-pq": (4, 2)}
_WARM_UP = 20

Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Measured:
    """Measurements of one setting.

    Attributes:
        options: fields of `IndexOptions` that were set.
        recall: of the first K labels against exact search, 0 to 1.
        p50_ms, p99_ms: percentiles of the time to search one query.
        index_bytes: size of the index file, without the vectors for exact scores.
        build_seconds: time to build the index.
    """

    kind: Kind
    options: dict[str, int]
    recall: float
    p50_ms: float
    p99_ms: float
    index_bytes: int
    build_seconds: float


def default_kinds(num_labels: int) -> tuple[Kind, ...]:
    """Kinds worth measuring for this number of labels."""
    skipped = (
        {"hnsw"} if num_labels > GRAPH_LABELS else {"ivf-pq"} if num_labels < LIST_LABELS else set()
    )
    return tuple(kind for kind in KINDS if kind not in skipped)


def tune(
    vectors: Heads, queries_ND: Floats, k: int, kinds: Iterable[Kind], threads: int = 1
) -> list[Measured]:
    """Measure each kind with each of its settings.

    Args:
        vectors: label vectors.
        queries_ND: float32 [N, D'], searched one at a time.
        k: results per search.
        threads: threads of builds and searches.
    """
    exact_NK = exact_labels(vectors, queries_ND, min(k, vectors.shape[0]))
    measured: list[Measured] = []
    builds = [
        (kind, {"code_dims": dims} if dims else {})
        for kind in kinds
        for dims in CODE_DIMS.get(kind, (0,))
    ]
    for kind, build in progress(builds, desc="index tune", unit="build"):
        start = time.perf_counter()
        index = LabelIndex.build(vectors, kind, threads, **build)
        seconds = time.perf_counter() - start
        num_bytes = int(faiss_module().serialize_index(index.stored).nbytes)
        index.threads = threads
        for settings in search_settings(index, k):
            candidate = index.with_options(**settings)
            times = []
            results = []
            for query_D in itertools.chain(queries_ND[:_WARM_UP], queries_ND):
                start = time.perf_counter()
                results.append(candidate.search(query_D[None], exact_NK.shape[1])[1])
                times.append(1000 * (time.perf_counter() - start))
            p50, p99 = (float(x) for x in np.percentile(times[-len(queries_ND) :], [50, 99]))
            share = recall(np.concatenate(results[-len(queries_ND) :]), exact_NK)
            measured.append(Measured(kind, build | settings, share, p50, p99, num_bytes, seconds))
    return measured


def search_settings(index: LabelIndex, k: int) -> list[dict[str, int]]:
    """Settings from fast to thorough: number of candidates scored exactly, and for probes and
    efSearch the ranges of faiss's `ParameterSpace`.
    """
    if index.kind == "flat":
        return [{}]
    if index.kind == "pq":
        return [{"rescore": factor} for factor in (1, 2, 4, 8, 16, 32)]
    if index.kind == "hnsw":
        return [{"search": 1 << i} for i in range(2, 10) if 1 << i >= k] or [{"search": k}]
    least = max(1, index.stored.nlist // 64)
    lists = index.stored.nlist
    probes = [1 << i for i in range(13) if least <= 1 << i < lists] or [least]
    return [{"probes": number, "rescore": factor} for factor in (1, 2, 4, 8) for number in probes]


def exact_labels(vectors: Heads, queries_ND: Floats, k: int) -> Labels:
    """The k best labels of each query by exhaustive search, int64 [N, k]."""
    metric = faiss_module().METRIC_INNER_PRODUCT
    from faiss.contrib.exhaustive_search import knn_ground_truth

    label_blocks = (vectors.take(rows) for rows in blocks(np.arange(vectors.shape[0])))
    labels_NK: Labels = knn_ground_truth(queries_ND, label_blocks, k, metric, ngpu=0)[1]
    return labels_NK
