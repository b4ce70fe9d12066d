"""What it costs to encode and answer queries, by runtime, and what the runtimes' answers are worth; writes
benchmarks/results/query-path-<name>.json.

    python benchmarks/query_path.py outputs/bundle                          # every runtime, 2,000 test queries
    python benchmarks/query_path.py outputs/bundle --queries 0 --threads 2  # all test queries
    python benchmarks/query_path.py outputs/bundle --runtimes torch,onnx --queries 200

Runtimes take turns query by query, so that what else runs on the machine meets them alike. Times are on the clock (ms)
and, with "cpu" in their names, of the processor: those hardly move when others use the machine too.

    open        from a loaded bundle to a runtime that answers
    encode      text to vectors, one query at a time, and 32 at a time (per query)
    answer      text to five labels with titles and parts, likewise; what is not encoding is search (mostly) and words
    quality     P@1, nDCG@5 and R@100 of the test split by exact scores of all labels; filtered pairs are left out
    nearness    largest difference of a score of the ten best from torch's; share of queries with the same first label
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from measure import machine

from unidec.bundle.answer import Answerer, Request
from unidec.bundle.bundle import Bundle
from unidec.data.dataset import XMCDataset
from unidec.data.storage import write_json
from unidec.evaluation.metrics import by_query, filtered_truth, remove_filtered
from unidec.ranking.query_encoder import open_encoder

RESULTS = Path(__file__).resolve().parent / "results"
RUNTIMES = ("torch", "onnx", "onnx-int8")
TOP, BATCH, BLOCK = 120, 32, 512  # 120: 100 are left where filtered pairs are taken out
WARM = 20


def test_queries(path: Path, num: int, long: bool) -> tuple[list[str], Any, Any]:
    """Texts of `num` queries of the test split (0: all), their relevance and filtered pairs."""
    dataset = XMCDataset.open(path)
    rows = dataset.rows("test")
    if num and num < len(rows):
        rows = rows[np.linspace(0, len(rows) - 1, num).astype(np.int64)]
    texts = list(dataset.query_texts(rows, "title+content" if long else "title"))
    return texts, dataset.relevance[rows], dataset.filter_pairs[rows]


def timed(action: Any, *given: Any) -> tuple[float, float]:
    """Milliseconds on the clock, and of the processor (of all threads of this process)."""
    clock, processor = time.perf_counter(), time.process_time()
    action(*given)
    return 1e3 * (time.perf_counter() - clock), 1e3 * (time.process_time() - processor)


def spread(times: list[tuple[float, float]], per: int = 1) -> dict[str, float]:
    """Quantiles of `timed`'s, divided by `per`."""
    clock, processor = np.asarray(times).T / per
    return {
        "p50": round(float(np.median(clock)), 3), "p99": round(float(np.percentile(clock, 99)), 3),
        "cpu p50": round(float(np.median(processor)), 3),
    }  # fmt: skip


def speed(answerers: dict[str, Answerer], texts: list[str]) -> dict[str, dict[str, Any]]:
    """Times of encoding and answering, one query and 32 at a time."""
    out: dict[str, dict[str, Any]] = {name: {} for name in answerers}
    for name, size in (("one", 1), (f"of {BATCH}", BATCH)):
        batches = [texts[start : start + size] for start in range(0, len(texts) - size + 1, size)]
        encode: dict[str, list[Any]] = {runtime: [] for runtime in answerers}
        answer: dict[str, list[Any]] = {runtime: [] for runtime in answerers}
        for place, batch in enumerate(batches):
            requests = [Request(text) for text in batch]
            for runtime, answerer in answerers.items():
                times = timed(answerer.encoder.encode, batch), timed(answerer.answer, requests)
                if place >= WARM // size:
                    encode[runtime].append(times[0])
                    answer[runtime].append(times[1])
        for runtime in answerers:
            out[runtime] |= {f"encode, {name}": spread(encode[runtime], size)}
            out[runtime] |= {f"answer, {name}": spread(answer[runtime], size)}
    return out


def exact(bundle: Bundle, texts: list[str], answerer: Answerer) -> tuple[np.ndarray, np.ndarray]:
    """The `TOP` best labels by exact scores of all labels, int64 and float32 [N, TOP]."""
    label_LD = bundle.ranker.heads.take(slice(None))
    rows, scores = [], []
    for start in range(0, len(texts), BLOCK):
        asked = [
            answerer.encoder.encode(texts[i : i + BATCH]) for i in range(start, min(start + BLOCK, len(texts)), BATCH)
        ]
        query = np.concatenate([bundle.ranker.queries(one) for one in asked])
        score = query @ label_LD.T
        top = np.argpartition(-score, TOP, axis=1)[:, :TOP]
        top_score = np.take_along_axis(score, top, axis=1)
        order = np.lexsort((top, -top_score), axis=1)
        rows.append(np.take_along_axis(top, order, axis=1))
        scores.append(np.take_along_axis(top_score, order, axis=1))
    return np.concatenate(rows), np.concatenate(scores)


def quality(
    bundle: Bundle, texts: list[str], relevance: Any, filters: Any, answerers: dict[str, Answerer]
) -> dict[str, dict[str, Any]]:
    """What the answers are worth, and how near to the first runtime's."""
    truth = filtered_truth(relevance, filters)
    first: tuple[np.ndarray, np.ndarray] | None = None
    out = {}
    for runtime, answerer in answerers.items():
        rows, scores = exact(bundle, texts, answerer)
        first = (rows, scores) if first is None else first
        found = by_query(
            remove_filtered(rows, filters, 100), truth, ["P@1", "nDCG@5", "R@100"], np.ones(truth.shape[1])
        )
        out[runtime] = {
            name: round(100 * above_N.sum() / below_N.sum(), 2) for name, (above_N, below_N) in found.items()
        } | {
            "same first label": round(float((rows[:, 0] == first[0][:, 0]).mean()), 4),
            "largest difference of ten scores": float(np.abs(scores[:, :10] - first[1][:, :10]).max()),
        }
    return out


def main(argv: list[str]) -> None:
    """See above."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("bundle", type=Path)
    asked.add_argument("--dataset", type=Path, default=Path("data/dataset"))
    asked.add_argument("--runtimes", default=",".join(RUNTIMES))
    asked.add_argument("--queries", type=int, default=2000, help="of the test split, for quality; 0: all")
    asked.add_argument("--timed", type=int, default=320, help="queries that are timed")
    asked.add_argument("--threads", type=int, default=1)
    asked.add_argument("--name", default="", help="of the file of results; the encoder's kind")
    given = asked.parse_args(argv)
    bundle = Bundle.load(given.bundle, verify=False)
    texts, relevance, filters = test_queries(given.dataset, given.queries, bundle.info.text != "title")
    answerers, opened = {}, {}
    for runtime in given.runtimes.split(","):
        clock, processor = time.perf_counter(), time.process_time()
        encoder = open_encoder(bundle, runtime, given.threads)
        encoder.encode(texts[:1])
        answerers[runtime] = Answerer(bundle, encoder)
        opened[runtime] = {"open s": round(time.perf_counter() - clock, 2),
                           "open cpu s": round(time.process_time() - processor, 2)}  # fmt: skip
    times = speed(answerers, texts[: given.timed])
    worth = quality(bundle, texts, relevance, filters, answerers)
    kind = bundle.model.encoder_settings.kind
    result = {
        "bundle": bundle.sha256, "encoder": kind, "index": bundle.info.index_kind, "threads": given.threads,
        "queries": len(texts), "machine": machine(),
        "runtimes": {name: opened[name] | times[name] | worth[name] for name in answerers},
    }  # fmt: skip
    write_json(RESULTS / f"query-path-{given.name or kind}.json", result)
    for name, figures in result["runtimes"].items():
        print(name)
        for key, value in figures.items():
            print(f"  {key:34}", "  ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value)


if __name__ == "__main__":
    main(sys.argv[1:])
