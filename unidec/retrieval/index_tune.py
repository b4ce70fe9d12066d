"""Which kind of index, with which settings, is the fastest that finds enough: measured on these labels and queries.

Legend: L labels, N queries, K results, D' width of the searched space.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from unidec.model.search import exact_search
from unidec.progress import progress
from unidec.retrieval.index import LabelIndex, recall
from unidec.retrieval.index_kinds import GRAPHS, LISTS, PACKED, IndexOptions, Kind
from unidec.retrieval.label_rows import Vectors

ROWS_AT_ONCE = 1 << 16
GRAPH_LABELS = 200_000
"""More labels than this, and graphs are measured only where they are asked for: they take hours to build."""
LIST_LABELS = 5_000
"""Fewer labels than this, and lists are not worth a look."""
_WARM_UP = 20

Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Trial:
    """One build, and settings of the search to try on it: lines of them, each from quick to thorough."""

    kind: Kind
    build: dict[str, int]
    lines: list[list[dict[str, int]]]


@dataclass(frozen=True)
class Measured:
    """What one setting is worth.

    Attributes:
        kind, options: of the index.
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

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def default_kinds(num_labels: int) -> tuple[Kind, ...]:
    """Kinds worth measuring on so many labels."""
    kinds: list[Kind] = ["flat", "sq8", "pq"]
    if num_labels <= GRAPH_LABELS:
        kinds += ["hnsw", "hnsw-sq8"]
    if num_labels >= LIST_LABELS:
        kinds += ["ivf-sq8", "ivf-pq"]
    return tuple(kinds)


def trials(kinds: Iterable[Kind], num_labels: int, k: int) -> list[Trial]:
    """What is tried, kind by kind."""
    found: list[Trial] = []
    lists = IndexOptions().num_lists(num_labels)
    probes = sorted({max(1, lists // part) for part in (64, 32, 16, 8, 4)})
    for kind in kinds:
        if kind == "flat":
            found.append(Trial(kind, {}, [[{}]]))
        elif kind == "sq8":
            found.append(Trial(kind, {}, [[{"rescore": factor} for factor in (1, 2, 4)]]))
        elif kind == "pq":
            line = [{"rescore": factor} for factor in (2, 4, 8, 16, 32)]
            found += [Trial(kind, {"code_dims": dims}, [line]) for dims in (8, 4, 2)]
        elif kind in GRAPHS:
            widths = [factor * k for factor in (1, 2, 4, 8)]
            more = {"rescore": 1} if kind == "hnsw-sq8" else {}
            found += [Trial(kind, {"links": links}, [[{"search": width} | more for width in widths]])
                      for links in ((16, 32) if kind == "hnsw" else (32,))]  # fmt: skip
        elif kind in PACKED:
            lines = [[{"rescore": factor, "probes": n} for n in probes] for factor in (2, 4, 8)]
            found += [Trial(kind, {"lists": lists, "code_dims": dims}, lines) for dims in (4, 2)]
        elif kind in LISTS:
            found.append(Trial(kind, {"lists": lists}, [[{"rescore": 2, "probes": n} for n in probes]]))
    return found


def tune(
    vectors: Vectors, queries_ND: Floats, k: int, wanted: float, kinds: Iterable[Kind], threads: int = 1
) -> tuple[list[Measured], LabelIndex | None]:
    """Measure every trial; a line ends at its first setting that finds enough, or is slower than one that does.

    Args:
        vectors: of the labels.
        queries_ND: float32 [N, D'], asked one by one.
        k: results of a search.
        wanted: recall of the first k against exact search, 0 to 1.
        kinds: to be measured.
        threads: of builds and searches.

    Returns:
        What was measured, and the index with the least median time of those that find enough; None where none does.
    """
    exact_NK = exact_labels(vectors, queries_ND, min(k, vectors.shape[0]))
    measured: list[Measured] = []
    best: tuple[float, LabelIndex] | None = None
    with progress(total=len(plan := trials(kinds, vectors.shape[0], k)), desc="index tune", unit="build") as bar:
        for trial in plan:
            start = time.perf_counter()
            index = LabelIndex.build(vectors, trial.kind, threads, False, **trial.build)
            seconds, num_bytes = time.perf_counter() - start, index.num_bytes
            index.threads = threads
            for line in trial.lines:
                for settings in line:
                    candidate = index.with_options(**settings)
                    share, times = _measure(candidate, queries_ND, exact_NK)
                    p50, p99 = (float(x) for x in np.percentile(times, [50, 99]))
                    options = _said(trial.kind, trial.build | settings)
                    measured.append(Measured(trial.kind, options, share, p50, p99, num_bytes, seconds))
                    if best is not None and p50 >= best[0]:
                        break
                    if share >= wanted:
                        best = (p50, candidate)
                        break
            bar.update()
            bar.note(f"{trial.kind} {trial.build or ''}")
    return measured, None if best is None else best[1]


def exact_labels(vectors: Vectors, queries_ND: Floats, k: int) -> Labels:
    """The first k labels of each query, int64 [N, k], by all inner products, a block of labels at a time."""
    scores_NK = np.full((len(queries_ND), k), -np.inf, dtype=np.float32)
    labels_NK = np.full((len(queries_ND), k), -1, dtype=np.int64)
    for start in range(0, vectors.shape[0], ROWS_AT_ONCE):
        rows = np.arange(start, min(start + ROWS_AT_ONCE, vectors.shape[0]))
        score, label = exact_search(queries_ND, vectors.take(rows), k)
        scores = np.concatenate([scores_NK, score], axis=1)
        labels = np.concatenate([labels_NK, np.where(label >= 0, label + start, -1)], axis=1)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        scores_NK, labels_NK = (np.take_along_axis(x, order, axis=1) for x in (scores, labels))
    return labels_NK


def like_queries(vectors: Vectors, num: int, seed: int = 0) -> Floats:
    """Stand-ins where there are no queries: a label's vector and half of another's, float32 [num, D'].

    Real queries lie further from their labels than a label from itself, and off the labels' own clusters; how an index
    does on these is a hint, no measurement.
    """
    rng = np.random.default_rng(seed)
    one, other = (vectors.take(rng.integers(0, vectors.shape[0], num)) for _ in range(2))
    return np.ascontiguousarray(one + np.float32(0.5) * other)


def _measure(index: LabelIndex, queries_ND: Floats, exact_NK: Labels) -> tuple[float, Sequence[float]]:
    """(recall, milliseconds of each query)."""
    k, times, found = exact_NK.shape[1], [], []
    for query in range(min(_WARM_UP, len(queries_ND))):
        index.search(queries_ND[query : query + 1], k)
    for query in range(len(queries_ND)):
        start = time.perf_counter()
        found.append(index.search(queries_ND[query : query + 1], k)[1])
        times.append(1000 * (time.perf_counter() - start))
    return recall(np.concatenate(found), exact_NK), times


def _said(kind: Kind, options: dict[str, int]) -> dict[str, int]:
    """Only what this kind looks at."""
    return {name: value for name, value in options.items() if name != "rescore" or kind not in ("flat", "hnsw")}
