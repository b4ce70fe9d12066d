"""What votes, words and the fusion cost with M training queries and L labels: time of a query, time
and memory to fit, bytes on disk, memory when loaded.

    python benchmarks/scale_ranking.py                                  # 10^4, 10^5 and 10^6
    python benchmarks/scale_ranking.py --sizes 10000 --output small.json
    python benchmarks/scale_ranking.py --sizes= --data ../shared/data/npm-words

A size is M and L of synthetic texts (`synthetic.py`), --data a folder in the layout xmc-json.
Vectors are random: no encoder is measured. One process fits and writes, another loads and ranks.
Seconds and milliseconds are processor time of all threads; pairs are the median and the 99th
percentile. The parts of a query are timed after the whole, so they find warm caches; "words"
include the votes, "features" the words.

Legend: M training queries, B queries, L labels, F words, N voters, P pairs of a query and a label.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from measure import MIB, Memory, machine, status
from scipy.sparse import vstack
from synthetic import Ragged, Synthetic, Words, write_raw

from unidec.bundle.bundle_info import BundleInfo, KnnInfo
from unidec.bundle.neighbour_files import read_neighbours, write_neighbours
from unidec.config.index_spec import IndexSpec
from unidec.cores import one_thread_of_blas
from unidec.data.formats import read_raw
from unidec.data.storage import write_json
from unidec.data.tokens import encode_texts
from unidec.model.sources import resolve_encoder
from unidec.model.words import WordSpace
from unidec.ranking.fusion import CANDIDATES, FEWEST_CANDIDATES, Fusion, LabelEvidence
from unidec.ranking.fusion_fit import fit_fusion, fit_word_network
from unidec.ranking.heads import Heads, unit_rows
from unidec.ranking.index import LabelIndex
from unidec.ranking.neighbours import Neighbours
from unidec.ranking.query_encoder import Encoded
from unidec.ranking.ranker import Ranker, Voting

TOKENIZER = resolve_encoder("all-MiniLM-L6-v2")
DIM = 64
VOTERS = 100
PROPENSITY = (0.55, 1.5)
K = 5
BATCH = 256
FITTED = 500  # held-out queries on which the fusion is fitted
COMPARED = 50  # queries whose nearest voters are compared with the exact ones
NO_PAIRS = np.zeros(0, dtype=np.int64)
Facts = dict[str, Any]


class Steps:
    """Processor seconds of steps, one after the other, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begin = time.process_time()

    def end(self, name: str) -> None:
        """Name the step that ends now."""
        now = time.process_time()
        self.seconds[name] = now - self._begin
        self._begin = now


def tokens_of(texts: list[str]) -> Ragged:
    """Token ids and offsets."""
    encoded = encode_texts(texts, TOKENIZER, 32)
    return encoded.ragged(np.arange(len(texts)))


def random_vectors(seed: int, num: int) -> list[np.ndarray]:
    """Of both heads, of unit length."""
    vectors = np.random.default_rng(seed).standard_normal((2, num, DIM), dtype=np.float32)
    return [unit_rows(of_head) for of_head in vectors]


def random_heads(num_labels: int) -> Heads:
    de_LD, clf_LD = random_vectors(0, num_labels)
    return Heads({"de": de_LD, "clf": clf_LD}, "both", clf_normalize=False)


def random_queries(words_BF: Any) -> Encoded:
    """Queries of these words."""
    return Encoded(*random_vectors(1, words_BF.shape[0]), words_BF)


def index_spec(num_labels: int) -> IndexSpec:
    if num_labels < 200_000:
        return IndexSpec.parse("PQx4")
    return IndexSpec.parse("IVF,PQx4", "nprobe=325")


def fit(folder: str, num_new: int) -> Facts:
    """Fit what ranks to FOLDER/raw, as the stage `index` does, and write it to the folder."""
    out = Path(folder)
    raw = read_raw(out / "raw")
    labels_ML = raw.relevance["train"]
    num_queries, num_labels = labels_ML.shape
    tables = (raw.queries["train"], raw.labels, raw.queries["test"][: FITTED + num_new])
    texts, label_texts, new_texts = (table["title"].to_pylist() for table in tables)
    tokens = tokens_of(texts + label_texts)
    new_tokens = tokens_of(new_texts)
    heads = random_heads(num_labels)
    uids = list(map(str, range(num_queries)))
    begin = time.perf_counter()
    with Memory() as memory:
        steps = Steps()
        space = WordSpace.fit(TOKENIZER, [tokens])
        words_F = space.vectors(*tokens)
        words_MF = words_F[:num_queries]
        label_words_LF = words_F[num_queries:]
        steps.end("words")
        by_words: Any = {"words": space, "label_words_LF": label_words_LF}
        neighbours = Neighbours(words_MF, labels_ML, uids, uids, **by_words)
        reader = LabelEvidence(heads, neighbours, VOTERS, PROPENSITY)
        steps.end("votes and evidence")
        reader.by_words = fit_word_network(reader.words, NO_PAIRS)
        steps.end("word network")
        index = LabelIndex.build(heads, index_spec(num_labels), show=True)
        steps.end("index")
        queries = random_queries(space.vectors(*new_tokens)[:FITTED])
        found = Ranker(heads, index).search(queries, CANDIDATES)
        evidence = reader.read(queries, found.rows, NO_PAIRS)
        steps.end("features")
        truth_P = raw.relevance["test"][evidence.query_P, evidence.label_P]
        relevant_P = np.asarray(truth_P).ravel() > 0
        fusion = fit_fusion(evidence, relevant_P, PROPENSITY, by_words=reader.by_words).fusion
        steps.end("fusion")
        wall = time.perf_counter() - begin
    write_neighbours(out, neighbours)
    on_disk = sum(file.stat().st_size for file in out.glob("neighbours/*.npy"))
    index.save(out / "index.faiss")
    knn = KnnInfo.of(neighbours, 1.0, VOTERS)
    info = BundleInfo.model_construct(num_labels=num_labels, dim=DIM, knn=knn, fusion=fusion)
    (out / "info.json").write_text(info.model_dump_json())
    np.savez(out / "queries.npz", *new_tokens)
    return {
        "training queries": num_queries,
        "labels": num_labels,
        "words": knn.num_words,
        "has word network": fusion.words is not None,
        "fit s": {name: round(seconds, 1) for name, seconds in steps.seconds.items()},
        "fit, wall clock s": round(wall, 1),
        "fit, peak MiB": memory.facts()["peak_mib"],
        "words on disk MiB": round(on_disk / MIB, 1),
    }


def load_and_rank(folder: str) -> Facts:
    """Load what `fit` has written, and rank the queries that it has not used."""
    root = Path(folder)
    stored = json.loads((root / "info.json").read_text())
    num_labels = stored["num_labels"]
    knn = KnnInfo(**stored["knn"])
    fusion = Fusion.model_validate_json(json.dumps(stored["fusion"]))
    info = BundleInfo.model_construct(num_labels=num_labels, dim=DIM, knn=knn, fusion=fusion)
    heads = random_heads(num_labels)
    file = root / "index.faiss"
    index = LabelIndex.load(file, num_labels, heads.shape[1], index_spec(num_labels), heads)
    steps = Steps()
    before = status()["RssAnon"]
    neighbours = read_neighbours(root, info, TOKENIZER)
    ranker = Ranker(heads, index, Voting(neighbours=neighbours, num=VOTERS), fusion)
    steps.end("load")
    loaded = status()["RssAnon"] - before
    assert neighbours.words is not None
    words_BF = neighbours.words.vectors(*np.load(root / "queries.npz").values())
    queries = random_queries(words_BF[FITTED:])
    ranker.rank(queries.take(slice(4)), K)  # warms up
    return {
        "load s": round(steps.seconds["load"], 2),
        "loaded MiB, not shared": round(loaded / MIB),
        "alone ms": milliseconds(ranker, queries, 1),
        f"in batches of {BATCH} ms": milliseconds(ranker, queries, BATCH),
        "recall of the nearest": recall(neighbours, queries.words_BF[:COMPARED]),
        "ranking, resident MiB": round(status()["VmRSS"] / MIB),
    }


def milliseconds(ranker: Ranker, queries: Encoded, size: int) -> dict[str, list[float]]:
    """Milliseconds a query in blocks of `size` queries: median and 99th percentile."""
    found: dict[str, list[float]] = {}
    for start in range(0, len(queries) - size + 1, size):
        block = queries.take(slice(start, start + size))
        for name, seconds in ranking_steps(ranker, block).items():
            found.setdefault(name, []).append(1000 * seconds / size)
    return {name: np.quantile(each, [0.5, 0.99]).round(2).tolist() for name, each in found.items()}


def ranking_steps(ranker: Ranker, queries: Encoded) -> dict[str, float]:
    """Seconds of the whole ranking, then of its parts."""
    reader: Any = ranker.evidence
    voting: Any = ranker.voting
    steps = Steps()
    ranker.rank(queries, K)
    steps.end("whole")
    found = ranker.search(queries, FEWEST_CANDIDATES)
    steps.end("search")
    voting.votes(queries)
    steps.end("votes")
    reader.words.score(queries.words_BF)
    steps.end("words")
    evidence = reader.read(queries, found.rows, NO_PAIRS)
    steps.end("features")
    reader.rank(ranker.fusion, evidence, K)
    steps.end("fusion")
    return steps.seconds


def recall(neighbours: Neighbours, words_BF: Any) -> float:
    """Share of the nearest voters that are found; of equal cosines any may be."""
    voters = vstack([neighbours.compared_MD, neighbours.compared_labels], format="csr")
    _, rows_BN = neighbours.nearest(words_BF, VOTERS)
    found = expected = 0
    for words_1F, rows_N in zip(words_BF, rows_BN, strict=True):
        cosines = (words_1F @ voters.T).toarray()[0]
        least = max(np.sort(cosines)[-VOTERS:][0] - 1e-6, 1e-6)
        found += (cosines[rows_N[rows_N >= 0]] >= least).sum()
        expected += min(VOTERS, (cosines > 0).sum())
    return round(float(found / max(expected, 1)), 4)


def write_texts(source: str, out: Path, num_queries: int) -> None:
    """Raw files of a size; or those of a folder, with row numbers as uids, which must differ."""
    if source.isdigit():
        size = int(source)
        write_raw(Synthetic(Words(), size, FITTED + num_queries, size), out)
        return
    out.mkdir()
    for file in Path(source).glob("*.json.gz"):
        with gzip.open(file, "rt") as lines, gzip.open(out / file.name, "wt", 1) as copy:
            for row, line in enumerate(lines):
                numbered = json.loads(line) | {"uid": f"{file.name} {row}"}
                copy.write(f"{json.dumps(numbered)}\n")


def measured(source: str, num_queries: int) -> Facts:
    """The figures of a size, or of a folder of raw files."""
    with tempfile.TemporaryDirectory() as folder:
        write_texts(source, Path(folder) / "raw", num_queries)
        with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as own_process:
            fitted = own_process.submit(fit, folder, num_queries).result()
            return fitted | own_process.submit(load_and_rank, folder).result()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="10000,100000,1000000", help="with commas")
    parser.add_argument("--data", action="append", default=[], help="folder of raw files")
    parser.add_argument("--queries", type=int, default=512, help="new queries, at least a batch")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    one_thread_of_blas()  # in the processes that are started, as in the server
    results: dict[str, Facts] = {}
    for source in [*filter(None, options.sizes.split(",")), *options.data]:
        results[Path(source).name] = measured(source, options.queries)
        if options.output:  # a larger size may end for want of memory
            write_json(options.output, {"machine": machine(), "measured": results})
    lines = pd.json_normalize(list(results.values()), sep=": ")
    print(lines.set_axis(list(results)).T.to_string())


if __name__ == "__main__":
    main()
