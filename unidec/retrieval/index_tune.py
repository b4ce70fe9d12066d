"""Which kind of index, with which settings, is the fastest that finds enough: measured on these labels and queries.

Legend: L labels, N queries, K results, D' width of the searched space.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unidec.progress import progress
from unidec.retrieval.index import LabelIndex, recall
from unidec.retrieval.index_kinds import KINDS, Kind, blocks, faiss_module
from unidec.retrieval.scoring_space import LabelRows

GRAPH_LABELS = 200_000
"""With more labels than this graphs are measured only where they are asked for: they take hours to build."""
LIST_LABELS = 5_000
"""With fewer labels than this lists are not measured."""
RESCORED = (1, 2, 4, 8, 16, 32)
CODE_DIMS: dict[Kind, tuple[int, ...]] = {"pq": (8, 4, 2), "ivf-pq": (4, 2)}
_ROWS_AT_ONCE = 1 << 16
_WARM_UP = 20

Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Measured:
    """What one setting is worth.

    Attributes:
        options: fields of `IndexOptions` that were set.
        recall: of the first K labels against exact search, 0 to 1.
        p50_ms, p99_ms: of a search for one query.
        index_bytes: of the index's file; vectors for exact scores are beside it.
        build_seconds: of the whole index.
    """

    kind: Kind
    options: dict[str, int]
    recall: float
    p50_ms: float
    p99_ms: float
    index_bytes: int
    build_seconds: float


def default_kinds(num_labels: int) -> tuple[Kind, ...]:
    """Kinds worth measuring on so many labels."""
    left_out = {"hnsw"} if num_labels > GRAPH_LABELS else {"ivf-pq"} if num_labels < LIST_LABELS else set()
    return tuple(kind for kind in KINDS if kind not in left_out)


def tune(
    vectors: LabelRows, queries_ND: Floats, k: int, wanted: float, kinds: Iterable[Kind], threads: int = 1
) -> tuple[list[Measured], LabelIndex | None]:
    """Measure each kind; a line of settings ends at the first that finds enough, or is slower than one that does.

    Args:
        vectors: of the labels.
        queries_ND: float32 [N, D'], asked one by one.
        k: results of a search.
        wanted: recall of the first k against exact search, 0 to 1.
        threads: of builds and searches.

    Returns:
        What was measured, and the index with the least median time of those that find enough; None where none does.
    """
    exact_NK = exact_labels(vectors, queries_ND, min(k, vectors.shape[0]))
    measured: list[Measured] = []
    best: tuple[float, LabelIndex] | None = None
    builds = [(kind, {"code_dims": dims} if dims else {}) for kind in kinds for dims in CODE_DIMS.get(kind, (0,))]
    with progress(total=len(builds), desc="index tune", unit="build") as bar:
        for kind, build in builds:
            start = time.perf_counter()
            index = LabelIndex.build(vectors, kind, threads, False, **build)
            seconds = time.perf_counter() - start
            num_bytes = int(faiss_module().serialize_index(index.stored).nbytes)
            index.threads = threads
            for line in search_settings(index, k):
                for settings in line:
                    candidate = index.with_options(**settings)
                    share, times = _measure(candidate, queries_ND, exact_NK)
                    p50, p99 = (float(x) for x in np.percentile(times, [50, 99]))
                    measured.append(Measured(kind, build | settings, share, p50, p99, num_bytes, seconds))
                    if best is not None and p50 >= best[0]:
                        break
                    if share >= wanted:
                        best = (p50, candidate)
                        break
            bar.update()
            bar.note(f"{kind} {build or ''}")
    return measured, None if best is None else best[1]


def search_settings(index: LabelIndex, k: int) -> list[list[dict[str, int]]]:
    """Lines of search settings, each from quick to thorough: faiss's ranges (`ParameterSpace`) for probes and efSearch,
    and how many candidates are scored exactly."""
    if index.kind == "flat":
        return [[{}]]
    if index.kind == "pq":
        return [[{"rescore": factor} for factor in RESCORED]]
    if index.kind == "hnsw":
        return [[{"search": 1 << i} for i in range(2, 10) if 1 << i >= k] or [{"search": k}]]
    least, lists = max(1, index.stored.nlist // 64), index.stored.nlist
    probes = [1 << i for i in range(13) if least <= 1 << i < lists] or [least]
    return [[{"probes": number, "rescore": factor} for number in probes] for factor in RESCORED[:4]]


def exact_labels(vectors: LabelRows, queries_ND: Floats, k: int) -> Labels:
    """The first k labels of each query, int64 [N, k], by all inner products, a block of labels at a time."""
    metric = faiss_module().METRIC_INNER_PRODUCT
    from faiss.contrib.exhaustive_search import knn_ground_truth

    some = (vectors.take(rows) for rows in blocks(np.arange(vectors.shape[0]), _ROWS_AT_ONCE))
    found: Labels = knn_ground_truth(queries_ND, some, k, metric, ngpu=0)[1]
    return found


def like_queries(vectors: LabelRows, num: int, seed: int = 0) -> Floats:
    """Stand-ins where there are no queries: a label's vector and half of another's, float32 [num, D'].

    Real queries are further from their labels: how an index does on these is a hint, no measurement.
    """
    rng = np.random.default_rng(seed)
    one, other = (vectors.take(rng.integers(0, vectors.shape[0], num)) for _ in range(2))
    return np.ascontiguousarray(one + np.float32(0.5) * other)


def _measure(index: LabelIndex, queries_ND: Floats, exact_NK: Labels) -> tuple[float, Sequence[float]]:
    """(recall, milliseconds of each query)."""
    k, times, found = exact_NK.shape[1], [], []
    for query_D in queries_ND[:_WARM_UP]:
        index.search(query_D[None], k)
    for query_D in queries_ND:
        start = time.perf_counter()
        found.append(index.search(query_D[None], k)[1])
        times.append(1000 * (time.perf_counter() - start))
    return recall(np.concatenate(found), exact_NK), times
