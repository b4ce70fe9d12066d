"""A search index of many labels: recall against exact search, time of a query, memory; writes
benchmarks/results/index-search.json.

    python benchmarks/index_search.py --folder WORK                # 1.3 million labels x 512; what is there stays
    python benchmarks/index_search.py --folder WORK --labels 1e5   # a quick look

Labels are made from those of a trained bundle (its dual encoder's vectors), queries from real test queries:

    like    a label is a real one moved by the difference of another real label and its nearest, times 0.4 to 1.4, at
            unit length. So clusters, spectrum and the directions in which similar labels differ are real. From 400 to
            12,941 of the real labels the median distance to the nearest falls from 0.97 to 0.70, and would reach 0.34
            to 0.44 at 1.3 million; with these factors it is about 0.5: sparser, so harder, than that.
    sparse  the same with one of the ten nearest, times 1: 0.72 to the nearest, as if more labels had made none closer
    query   a made label moved by what a real test query differs from one of its real labels (median cosine 0.51)

What is built is kept in the folder (5 GB for 1.3 million labels), also the exact results.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from measure import MIB, Memory, machine, status

from unidec.data.storage import write_json
from unidec.progress import progress
from unidec.ranking.heads import as_heads
from unidec.ranking.index import IndexOptions, Kind, LabelIndex, faiss_threads, recall
from unidec.ranking.index_tune import exact_labels

RESULT = Path(__file__).resolve().parent / "results" / "index-search.json"
AT_ONCE = 1 << 16
Floats = npt.NDArray[np.float32]


def make_labels(real_RD: Floats, num: int, path: Path, sparse: bool, seed: int = 0) -> None:
    """A memory-mapped float32 [num, D] file of made labels, unit length."""
    rng = np.random.default_rng(seed)
    near_RK = exact_labels(as_heads(real_RD), real_RD, 11)[:, 1:]
    out = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(num, real_RD.shape[1]))
    for start in progress(range(0, num, AT_ONCE), desc="labels", unit="block"):
        count = min(AT_ONCE, num - start)
        base, other = rng.integers(0, len(real_RD), count), rng.integers(0, len(real_RD), count)
        which = rng.integers(0, 10, count) if sparse else np.zeros(count, dtype=np.int64)
        factor = np.float32(1) if sparse else rng.uniform(0.4, 1.4, (count, 1)).astype(np.float32)
        made = real_RD[base] + factor * (real_RD[other] - real_RD[near_RK[other, which]])
        out[start : start + count] = made / np.linalg.norm(made, axis=1, keepdims=True)
    out.flush()


def make_queries(label_LD: Floats, query_ND: Floats, positive_ND: Floats, num: int, seed: int = 1) -> Floats:
    """float32 [num, D]: made labels moved as real queries lie to their real labels, unit length."""
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.integers(0, len(label_LD), num))
    offset = (query_ND - positive_ND)[rng.integers(0, len(query_ND), num)]
    made = label_LD[rows] + offset
    return np.ascontiguousarray(made / np.linalg.norm(made, axis=1, keepdims=True), dtype=np.float32)


def real_queries(bundle_path: Path, num: int = 2000) -> tuple[Floats, Floats]:
    """Test queries of data/dataset and one true label of each, by the bundle's dual encoder, float32 [N, D] each."""
    from unidec.bundle.bundle import Bundle
    from unidec.pipeline import paths

    bundle, dataset = Bundle.load(bundle_path, verify=False), paths.open_dataset()
    rng, rows = np.random.default_rng(0), dataset.rows("test")[:num]
    relevance = dataset.relevance[rows]
    asked = np.flatnonzero(np.diff(relevance.indptr))
    labels = [int(rng.choice(relevance.indices[relevance.indptr[i] : relevance.indptr[i + 1]])) for i in asked]
    texts = dataset.query_texts(rows[asked])
    encoded = [bundle.encode(texts[start : start + 256]).de_BD for start in range(0, len(texts), 256)]
    return np.concatenate([part for part in encoded if part is not None]), np.array(bundle.vectors["de"][labels])


def material(
    folder: Path, bundle: Path, num: int, num_queries: int, k: int, sparse: bool
) -> tuple[Floats, Floats, Any]:
    """Labels (memory-mapped), queries and exact results; made where they are not there."""
    name = f"{'sparse' if sparse else 'like'}-{num}"
    labels, asked = folder / f"{name}.npy", folder / f"{name}-{num_queries}-{k}.npz"
    folder.mkdir(parents=True, exist_ok=True)
    if not labels.exists():
        real = np.load(bundle / "vectors" / "de.npy", allow_pickle=False)
        make_labels(np.ascontiguousarray(real, dtype=np.float32), num, labels, sparse)
    label_LD = np.load(labels, mmap_mode="r", allow_pickle=False)
    if not asked.exists():
        query_ND = make_queries(label_LD, *real_queries(bundle), num_queries)
        np.savez(asked, queries=query_ND, exact=exact_labels(as_heads(label_LD), query_ND, k))
    with np.load(asked, allow_pickle=False) as stored:
        return label_LD, stored["queries"], stored["exact"]


def built(folder: Path, label_LD: Floats, kind: Kind, options: IndexOptions, name: str, threads: int) -> dict[str, Any]:
    """Facts of the build; the file is made where it is not there."""
    path = folder / f"{name}.faiss"
    about = path.with_suffix(".json")
    if not path.exists():
        start = time.perf_counter()
        with Memory() as memory:
            index = LabelIndex.build(as_heads(label_LD), kind, threads, True, **options.model_dump())
            index.save(path)
        write_json(about, {"build_seconds": round(time.perf_counter() - start, 1), "threads": threads,
                           "anonymous_mib": memory.facts()["anonymous_mib"]})  # fmt: skip
    return json.loads(about.read_text()) if about.exists() else {}


def measured(index: LabelIndex, query_ND: Floats, exact_NK: Any, settings: dict[str, int]) -> dict[str, Any]:
    """Recall and times of queries asked one by one, and in batches of 32."""
    index, k = index.with_options(**settings), exact_NK.shape[1]
    times, found = [], []
    for query in range(len(query_ND) // 4):  # pages and caches as in service
        index.search(query_ND[query : query + 1], k)
    for query in range(len(query_ND)):
        start = time.perf_counter()
        found.append(index.search(query_ND[query : query + 1], k)[1])
        times.append(1000 * (time.perf_counter() - start))
    start = time.perf_counter()
    for query in range(0, len(query_ND), 32):
        index.search(query_ND[query : query + 32], k)
    rate = len(query_ND) / (time.perf_counter() - start)
    labels = np.concatenate(found)
    p50, p99 = np.percentile(times, [50, 99])
    return {
        **settings, f"recall@{k}": round(recall(labels, exact_NK), 4),
        "recall@10": round(recall(labels[:, :10], exact_NK[:, :10]), 4), "p50_ms": round(float(p50), 2),
        "p99_ms": round(float(p99), 2), "queries_a_second_32": round(rate),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where labels and indexes are kept")
    parser.add_argument("--labels", type=float, default=1.3e6)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("-k", type=int, default=100)
    parser.add_argument("--kind", default="ivf-pq", help="of index")
    parser.add_argument("--lists", type=int, default=0)
    parser.add_argument("--code-dims", type=int, default=4)
    parser.add_argument("--probes", default="128,256,512,1024", help="to try")
    parser.add_argument("--rescore", default="4,8", help="to try")
    parser.add_argument("--sparse", action="store_true", help="the harder labels")
    parser.add_argument("--threads", type=int, default=2, help="of the build; searches have one")
    parser.add_argument("--bundle", type=Path, default=Path("outputs/bundle"))
    parser.add_argument("--build-only", action="store_true")
    given = parser.parse_args()
    num = int(given.labels)
    with faiss_threads(given.threads):
        label_LD, query_ND, exact_NK = material(given.folder, given.bundle, num, given.queries, given.k, given.sparse)
    options = IndexOptions(lists=given.lists, code_dims=given.code_dims)
    name = f"{'sparse' if given.sparse else 'like'}-{num}-{given.kind}-{given.lists}-{given.code_dims}"
    facts = built(given.folder, label_LD, given.kind, options, name, given.threads)
    if given.build_only:
        return
    path, before = given.folder / f"{name}.faiss", status()
    start = time.perf_counter()
    index = LabelIndex.load(path, num, label_LD.shape[1], given.kind, options, as_heads(label_LD))
    index.threads = 1
    loaded = {"load_seconds": round(time.perf_counter() - start, 2), "index_mib": round(path.stat().st_size / MIB, 1)}
    rows = [
        measured(index, query_ND, exact_NK, {"probes": int(probes), "rescore": int(factor)})
        for factor in given.rescore.split(",") for probes in given.probes.split(",")
    ]  # fmt: skip
    after = status()
    loaded |= {f"{name}_mib": round((after[key] - before[key]) / MIB, 1) for name, key in
               (("own_memory", "RssAnon"), ("mapped", "RssFile"))}  # fmt: skip
    loaded["vectors_mib"] = round(label_LD.nbytes / MIB, 1)
    print("\t".join(rows[0]))
    for row in rows:
        print("\t".join(str(value) for value in row.values()))
    print({**facts, **loaded})
    results = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    results[name] = {"machine": machine(), "labels": num, "dim": label_LD.shape[1], **facts, **loaded, "searches": rows}
    write_json(RESULT, results)


if __name__ == "__main__":
    sys.exit(main())
