"""What a model has to beat: TF-IDF neighbours, TF-IDF label match, their mix, and predictions of other programs.

    python benchmarks/baselines.py data/dataset --text title

Prints a table and writes JSON. See README.md beside this file for the methods and for PECOS XR-Linear (`xr_linear.py`).

Shape legend: N queries that are evaluated, M training queries, B queries of one block, L labels, F words, K predicted
labels.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, save_npz
from sklearn.feature_extraction.text import TfidfVectorizer

from unidec.data.dataset import XMCDataset
from unidec.data.propensity import frequency_group, inverse_propensity, label_counts
from unidec.data.storage import load_array, write_folder, write_json
from unidec.errors import DataError
from unidec.evaluation.metrics import evaluate, filtered_truth, remove_filtered
from unidec.progress import progress

NUM_NEIGHBOURS = 100
LABEL_MATCH_WEIGHT = 0.5  # beside the kNN votes, in the mix
K = 100
BLOCK = 512  # queries: a block holds a few dense [B, M] and [B, L] float32 matrices
COLUMNS = ("P@1", "P@3", "P@5", "nDCG@5", "PSP@1", "PSP@3", "PSP@5", "R@10", "R@100")

Scorer = Callable[[NDArray[np.int64]], NDArray[np.float32]]


@dataclass
class Task:
    """One data set as sparse features (CSR; scipy annotates them poorly), and how predictions are measured on it."""

    x_train_MF: Any
    y_train_ML: Any
    x_NF: Any
    label_LF: Any
    truth_NL: csr_matrix
    filter_NL: csr_matrix
    inverse_L: NDArray[np.float64]
    group_L: NDArray[np.int8]
    facts: dict[str, Any]

    @property
    def search_width(self) -> int:
        """Labels to search so that K are left after filters."""
        return min(K + int(np.diff(self.filter_NL.indptr).max(initial=0)), len(self.inverse_L))

    def measure(self, label_NK: NDArray[np.int64], score_NK: NDArray[np.float32]) -> dict[str, float]:
        kept_NK, _ = remove_filtered(label_NK, score_NK, self.filter_NL, K)
        return evaluate(kept_NK, self.truth_NL, self.inverse_L, self.group_L)


def load_task(dataset: XMCDataset, text: Any, split: Any, train_on: str, a: float, b: float) -> Task:
    """TF-IDF (sublinear, without English stop words) fitted on the training queries' texts."""
    train_rows = np.sort(np.concatenate([dataset.rows(part) for part in train_on.split("+")]))  # type: ignore[arg-type]
    rows = dataset.rows(split)
    if not len(train_rows) or not len(rows):
        raise DataError("an empty split", where=str(dataset.path), got=f"{len(train_rows)} and {len(rows)} queries")
    vectorizer = TfidfVectorizer(sublinear_tf=True, stop_words="english", dtype=np.float32)  # type: ignore[arg-type]
    train_texts, label_texts = dataset.query_texts(train_rows, text), dataset.label_texts(None, text)
    vectorizer.fit(train_texts)
    y_train_ML = (dataset.relevance[train_rows] > 0).astype(np.float32)
    count_L = label_counts(dataset.relevance, train_rows)
    return Task(
        x_train_MF=vectorizer.transform(train_texts),
        y_train_ML=y_train_ML,
        x_NF=vectorizer.transform(dataset.query_texts(rows, text)),
        label_LF=vectorizer.transform(label_texts),
        truth_NL=filtered_truth(dataset.relevance[rows], dataset.filter_pairs[rows]),
        filter_NL=dataset.filter_pairs[rows],
        inverse_L=inverse_propensity(count_L, len(train_rows), a, b),
        group_L=frequency_group(count_L),
        facts={
            "dataset": dataset.name,
            "dataset_sha256": dataset.sha256,
            "text": text,
            "split": split,
            "train_on": train_on,
            "num_train": len(train_rows),
            "propensity_a": a,
            "propensity_b": b,
            "num_words": len(vectorizer.vocabulary_),
        },
    )


def neighbour_votes(task: Task, rows_B: NDArray[np.int64]) -> NDArray[np.float32]:
    """kNN: the nearest training queries vote for their labels with the square of their cosine; float32 [B, L]."""
    cosine_BM = (task.x_NF[rows_B] @ task.x_train_MF.T).toarray()
    nearest = min(NUM_NEIGHBOURS, cosine_BM.shape[1])
    place = np.argpartition(-cosine_BM, nearest - 1, axis=1)[:, :nearest]
    vote = np.take_along_axis(cosine_BM, place, axis=1) ** 2
    indptr = np.arange(0, place.size + 1, nearest)
    votes_BM = csr_matrix((vote.ravel(), place.ravel(), indptr), shape=cosine_BM.shape)
    return (votes_BM @ task.y_train_ML).toarray()


def label_match(task: Task, rows_B: NDArray[np.int64]) -> NDArray[np.float32]:
    """Cosine of the query's and the label's text; float32 [B, L]."""
    return (task.x_NF[rows_B] @ task.label_LF.T).toarray()


def mix(task: Task, rows_B: NDArray[np.int64]) -> NDArray[np.float32]:
    """kNN votes + 0.5 x label match, each scaled to a row maximum of 1; float32 [B, L]."""
    votes_BL, match_BL = neighbour_votes(task, rows_B), label_match(task, rows_B)
    for score_BL in (votes_BL, match_BL):
        score_BL /= np.maximum(score_BL.max(axis=1, keepdims=True), 1e-12)
    votes_BL += LABEL_MATCH_WEIGHT * match_BL
    return votes_BL


METHODS: dict[str, Callable[[Task, NDArray[np.int64]], NDArray[np.float32]]] = {
    "kNN": neighbour_votes,
    "label match": label_match,
    "mix": mix,
}


def top_labels(score_BL: NDArray[np.float32], width: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The best labels with a score above 0, best first, padded with -1: int64 and float32 [B, width]."""
    place = np.argpartition(-score_BL, width - 1, axis=1)[:, :width]
    place = np.sort(place, axis=1)  # among equal scores the lower label id goes first, whatever the partition did
    score = np.take_along_axis(score_BL, place, axis=1)
    order = np.argsort(-score, axis=1, kind="stable")
    place, score = np.take_along_axis(place, order, axis=1), np.take_along_axis(score, order, axis=1)
    return np.where(score > 0, place, -1).astype(np.int64), score


def predict(task: Task, name: str) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Predictions of one method for all evaluated queries, [N, search_width]."""
    num_queries = task.x_NF.shape[0]
    blocks: Iterator[NDArray[np.int64]] = (
        np.arange(start, min(start + BLOCK, num_queries)) for start in range(0, num_queries, BLOCK)
    )
    parts = []
    with progress(total=num_queries, desc=name, unit="query") as bar:
        for rows_B in blocks:
            parts.append(top_labels(METHODS[name](task, rows_B), task.search_width))
            bar.update(len(rows_B))
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def export(task: Task, out: Path) -> None:
    """Writes features and labels as scipy .npz for programs in other environments, and the width they shall predict."""
    facts = task.facts | {"search_width": task.search_width}
    with write_folder(out, "benchmark_export", 1, facts) as folder:
        for name, matrix in {
            "X.trn": task.x_train_MF,
            "Y.trn": task.y_train_ML,
            "X.tst": task.x_NF,
            "labels": task.label_LF,
        }.items():
            save_npz(folder.path / f"{name}.npz", csr_matrix(matrix))


def load_predictions(folder: Path) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """labels.npy (int64 [N, K], -1 = none) and scores.npy (float32) of another program."""
    labels = load_array(folder / "labels.npy", np.int64, ndim=2)
    return labels, load_array(folder / "scores.npy", np.float32, ndim=2)


def table(results: dict[str, dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    lines = ["| method | " + " | ".join(COLUMNS) + " | s |", "|---" * (len(COLUMNS) + 2) + "|"]
    for name, result in results.items():
        figures = [f"{result['metrics'][column]:.1f}" for column in COLUMNS]
        seconds = "-" if result["seconds"] is None else f"{result['seconds']:.0f}"
        lines.append(f"| {name} | " + " | ".join(figures) + f" | {seconds} |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path, help="a stored data set (data/dataset)")
    parser.add_argument("--text", choices=["title", "title+content"], default="title")
    parser.add_argument("--split", choices=["validation", "test"], default="test")
    parser.add_argument("--train-on", choices=["train", "train+validation"], default="train+validation")
    parser.add_argument("--propensity-a", type=float, default=0.55)
    parser.add_argument("--propensity-b", type=float, default=1.5)
    parser.add_argument("--methods", nargs="*", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--export", type=Path, help="write features for programs in other environments here")
    parser.add_argument(
        "--predictions",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="also measure another program's labels.npy and scores.npy",
    )
    parser.add_argument("--output", type=Path, help="JSON (benchmarks/results/baselines-<name>-<text>.json)")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.split == "validation" and "validation" in arguments.train_on:
        raise SystemExit("--split validation needs --train-on train: the queries would be their own neighbours")
    dataset = XMCDataset.open(arguments.dataset)
    task = load_task(
        dataset,
        arguments.text,
        arguments.split,
        arguments.train_on,
        arguments.propensity_a,
        arguments.propensity_b,
    )
    if arguments.export:
        export(task, arguments.export)
    results: dict[str, dict[str, Any]] = {}
    for name in arguments.methods:
        start = time.perf_counter()
        labels, scores = predict(task, name)
        seconds = time.perf_counter() - start
        results[name] = {"metrics": task.measure(labels, scores), "seconds": round(seconds, 1)}
    for item in arguments.predictions:
        name, _, folder = item.partition("=")
        results[name] = {"metrics": task.measure(*load_predictions(Path(folder))), "seconds": None}
    facts = task.facts | {
        "cpus": os.cpu_count(),
        "peak_memory_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }
    default = Path(__file__).parent / "results" / f"baselines-{dataset.name}-{arguments.text.replace('+', '-')}.json"
    output = arguments.output or default
    write_json(output, {"facts": facts, "results": results})
    print(table(results))


if __name__ == "__main__":
    main()
