"""The stages from raw files to what training reads, each in a process of its own (`scale.py data`
runs them).

    python benchmarks/scale_data.py STAGE FOLDER '{"train": 10000, "labels": 10000}'

Prints one line of JSON: seconds, memory, and what the stage made. Legend: N queries, L labels, D
dimensions.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from measure import Memory
from synthetic import Synthetic, Words, write_dataset, write_raw, write_tokens

WIDTH = 64
BATCH = 512
# queries that are mined, fewer for more than 10^6 labels: the work is the same for each
MINED = 2048
NEGATIVES = 30  # eta x T
MAX_LENGTH = 32
Facts = dict[str, Any]


def make_raw(folder: Path, size: Facts) -> Facts:
    """Synthetic raw files."""
    write_raw(_data(size), folder / "raw")
    return {"bytes": sum(file.stat().st_size for file in (folder / "raw").iterdir())}


def make_store(folder: Path, size: Facts) -> Facts:
    """Synthetic data straight into the stored folders, for sizes at which raw files
    make no sense.
    """
    data = _data(size)
    write_dataset(data, folder / "dataset")
    for which in ("queries", "labels"):
        write_tokens(data, folder / "tokens" / which, which, _tokenizer(), MAX_LENGTH)
    return {"bytes": sum(file.stat().st_size for file in folder.rglob("*.*"))}


def ingest(folder: Path, size: Facts) -> Facts:
    """Raw files to the stored data set."""
    from unidec.data.dataset import write_dataset as store
    from unidec.data.formats import read_raw

    dataset = store(folder / "dataset", read_raw(folder / "raw"), validation_share=0.05)
    return {"pairs": dataset.manifest["meta"]["num_pairs"]}


def tokens(folder: Path, size: Facts) -> Facts:
    """Both token caches."""
    from unidec.data.dataset import XMCDataset
    from unidec.data.tokens import build_token_cache

    dataset = XMCDataset.open(folder / "dataset", verify=False)
    made = 0
    for which, count in (("queries", dataset.num_queries), ("labels", dataset.num_labels)):
        batches = dataset.text_batches(which, "title", 4096)
        build_token_cache(
            batches, _tokenizer(), MAX_LENGTH, folder / "tokens" / which, count, {"text": "title"}
        )
        made += count
    return {"texts": made}


def token_cache(folder: Path, size: Facts) -> Facts:
    """Open both caches and draw batches from them: what they take of the host's memory."""
    from unidec.data.tokens import TokenCache

    caches = [TokenCache.open(folder / "tokens" / which) for which in ("queries", "labels")]
    rng = np.random.default_rng(0)
    for cache in caches:
        for _ in range(20):
            cache.batch(rng.integers(0, len(cache), 1024))
    num_tokens, num_texts = (
        sum(len(getattr(cache, a)) for cache in caches) for a in ("ids", "offsets")
    )
    held = sum(
        array.nbytes
        for cache in caches
        for array in vars(cache).values()
        if isinstance(array, np.ndarray)
    )
    return {
        "texts": num_texts - 2,
        "tokens": num_tokens,
        "held_bytes": held,
        "bound_bytes": 2 * num_tokens + 8 * num_texts,
    }


def propensity(folder: Path, size: Facts) -> Facts:
    """Inverse propensities and frequency groups."""
    from unidec.data.dataset import XMCDataset
    from unidec.data.propensity import build_propensity

    build_propensity(
        XMCDataset.open(folder / "dataset", verify=False), 0.55, 1.5, folder / "propensity"
    )
    return {}


def label_graph(folder: Path, size: Facts) -> Facts:
    """The label co-occurrence graph."""
    from unidec.config import LabelGraph
    from unidec.data.dataset import XMCDataset
    from unidec.data.label_graph import build_label_graph, load_label_graph

    build_label_graph(
        XMCDataset.open(folder / "dataset", verify=False), LabelGraph(), folder / "label_graph"
    )
    return {"edges": int(load_label_graph(folder / "label_graph", verify=False).nnz)}


def sampler(folder: Path, size: Facts) -> Facts:
    """A pool sampler: what it takes to make, and to draw a batch."""
    from unidec.data.dataset import XMCDataset
    from unidec.model.pool import PoolSampler

    dataset = XMCDataset.open(folder / "dataset", verify=False)
    rows = dataset.rows("train")
    made = PoolSampler(dataset.relevance, dataset.filter_pairs, beta=3, eta=6, size=3000, seed=0)
    rng = np.random.default_rng(0)
    negatives = rng.integers(
        0, dataset.num_labels, (dataset.num_queries, NEGATIVES), dtype=np.int32
    )
    begin = time.perf_counter()
    for step in range(50):
        made.batch(rng.choice(rows, BATCH), epoch=0, step=step, shortlist_NH=negatives)
    return {
        "batch_ms": 1000 * (time.perf_counter() - begin) / 50,
        "shortlist_bytes": negatives.nbytes,
    }


def vectors(folder: Path, size: Facts) -> Facts:
    """Vectors of all texts, float32 of unit length: means of random token vectors, a stand-in for
    an encoder.
    """
    import torch
    import torch.nn.functional as F

    from unidec.data.tokens import TokenCache

    for which in ("queries", "labels"):
        cache = TokenCache.open(folder / "tokens" / which, verify=False)
        embedding_VD = torch.randn(
            cache.vocab_size, WIDTH, generator=torch.Generator().manual_seed(0)
        )
        shape = (len(cache), WIDTH)
        out = np.lib.format.open_memmap(
            folder / f"{which}.npy", mode="w+", dtype=np.float32, shape=shape
        )
        for start in range(0, len(cache), 65_536):
            flat, offsets = cache.ragged(np.arange(start, min(start + 65_536, len(cache))))
            mean = F.embedding_bag(
                torch.from_numpy(flat), embedding_VD, torch.from_numpy(offsets[:-1]), mode="mean"
            )
            out[start : start + len(mean)] = F.normalize(mean, dim=1).numpy()
        out.flush()
    return {}


def cluster(folder: Path, size: Facts) -> Facts:
    """Balanced clusters of all queries."""
    from unidec.training.clustering import balanced_clusters

    vectors_ND = np.load(folder / "queries.npy")  # in memory, as the encoder's outputs are
    made = balanced_clusters(vectors_ND, BATCH, 0)
    return {"clusters": len(made.offsets) - 1, "vector_bytes": vectors_ND.nbytes}


def mine(folder: Path, size: Facts) -> Facts:
    """Hard negatives of some queries among all labels."""
    from unidec.data.dataset import XMCDataset
    from unidec.training.mining import mine_hard_negatives

    dataset = XMCDataset.open(folder / "dataset", verify=False)
    rows = dataset.rows("train")[: min(MINED, MINED * 1_000_000 // dataset.num_labels)]
    query_ND = np.load(folder / "queries.npy", mmap_mode="r")[rows]
    label_LD = np.load(folder / "labels.npy")
    _, report = mine_hard_negatives(
        query_ND, rows, label_LD, (dataset.relevance, dataset.filter_pairs), NEGATIVES
    )
    return {
        "queries": len(rows),
        "ms_a_query": 1000 * report["seconds"] / len(rows),
        "vector_bytes": label_LD.nbytes,
    }


STAGES: dict[str, Callable[[Path, Facts], Facts]] = {
    "raw": make_raw,
    "store": make_store,
    "ingest": ingest,
    "tokens": tokens,
    "token_cache": token_cache,
    "propensity": propensity,
    "label_graph": label_graph,
    "sampler": sampler,
    "vectors": vectors,
    "cluster": cluster,
    "mine": mine,
}


def _data(size: Facts) -> Synthetic:
    return Synthetic(Words(), size["train"], max(1, size["train"] // 20), size["labels"])


def _tokenizer() -> Path:
    from unidec.model.sources import resolve_encoder

    return resolve_encoder("all-MiniLM-L6-v2")


def main() -> None:
    stage = sys.argv[1]
    folder = Path(sys.argv[2])
    size = json.loads(sys.argv[3])
    import torch  # loaded before the clock and the memory are read, whatever the stage

    torch.set_num_threads(int(size.get("threads", torch.get_num_threads())))
    folder.mkdir(parents=True, exist_ok=True)
    with Memory() as memory:
        begin = time.perf_counter()
        facts = STAGES[stage](folder, size)
        seconds = time.perf_counter() - begin
    print(json.dumps({"seconds": seconds, **memory.facts(), **facts}))


if __name__ == "__main__":
    main()
