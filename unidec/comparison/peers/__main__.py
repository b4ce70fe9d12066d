"""Peers alone, without a comparison: prints a table and keeps the figures for the reports.

    python -m unidec.comparison.peers data/dataset --text title --peers knn label-match mix xr-linear

Writes benchmarks/results/baselines-<data set>-<text>.json. The report of `unidec evaluate` on the same data shows it,
without the TF-IDF peers, which each evaluation measures itself.
Peers that are not asked for keep the figures that the file has of them, where it is about the same data.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from unidec.comparison import peers
from unidec.comparison.peers.task import K, peer_task, training_rows
from unidec.data.dataset import XMCDataset
from unidec.data.propensity import frequency_group, inverse_propensity, label_counts
from unidec.data.storage import write_json
from unidec.errors import UnidecError
from unidec.evaluation.metrics import evaluate, filtered_truth, remove_filtered

COLUMNS = ("P@1", "P@3", "P@5", "nDCG@5", "PSP@1", "PSP@3", "PSP@5", "R@10", "R@100")
SAME = ("dataset_sha256", "text", "split", "train_on", "propensity_a", "propensity_b")


def measure(dataset: XMCDataset, outputs: Path, counts_L: Any, inverse_L: Any) -> dict[str, float]:
    """Every metric of a peer's predictions on the test split, filtered pairs removed."""
    rows = dataset.rows("test")
    filters = dataset.filter_pairs[rows]
    labels, scores = (np.load(outputs / f"{name}.npy", allow_pickle=False) for name in ("labels", "scores"))
    kept, _ = remove_filtered(labels, scores, filters, K)
    truth = filtered_truth(dataset.relevance[rows], filters)
    return evaluate(kept, truth, inverse_L, frequency_group(counts_L))


def kept_results(path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Results of an earlier call on the same data."""
    if not path.is_file():
        return {}
    before = json.loads(path.read_text(encoding="utf-8"))
    return before["results"] if all(before["facts"].get(key) == facts[key] for key in SAME) else {}


def table(results: dict[str, dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    lines = ["| method | " + " | ".join(COLUMNS) + " | s |", "|---" * (len(COLUMNS) + 2) + "|"]
    for name, result in results.items():
        figures = [f"{result['metrics'][column]:.1f}" for column in COLUMNS]
        seconds = "-" if result["seconds"] is None else f"{result['seconds']:.0f}"
        lines.append(f"| {name} | " + " | ".join(figures) + f" | {seconds} |")
    return "\n".join(lines)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m unidec.comparison.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("dataset", type=Path, help="a stored data set (data/dataset)")
    parser.add_argument("--peers", nargs="+", choices=peers.NAMES, default=["knn", "label-match", "mix"])
    parser.add_argument("--text", choices=["title", "title+content"], default="title")
    parser.add_argument("--train-on", choices=["train", "train+validation"], default="train+validation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--propensity-a", type=float, default=0.55)
    parser.add_argument("--propensity-b", type=float, default=1.5)
    group = parser.add_argument_group("of sentence-transformers")
    group.add_argument("--encoder", default="all-MiniLM-L6-v2")
    group.add_argument("--max-length", type=int, default=32)
    group.add_argument("--epochs", type=int, default=12)
    group.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--work", type=Path, default=Path("runs/peers"), help="features, environments, predictions")
    parser.add_argument("--output", type=Path, help="JSON (benchmarks/results/baselines-<name>-<text>.json)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    given = parse(arguments)
    dataset = XMCDataset.open(given.dataset)
    rows = training_rows(dataset, given.train_on)
    counts_L = label_counts(dataset.relevance, rows)
    inverse_L = inverse_propensity(counts_L, len(rows), given.propensity_a, given.propensity_b)
    task = peer_task(dataset, given.text, given.train_on, given.work / "peer-tasks")
    facts = task.facts | {"split": "test", "propensity_a": given.propensity_a, "propensity_b": given.propensity_b,
                          "cpus": os.cpu_count()}  # fmt: skip
    default = Path("benchmarks/results") / f"baselines-{dataset.name}-{given.text.replace('+', '-')}.json"
    output = given.output or default
    results = kept_results(output, facts)
    settings = {
        "text": given.text, "max_length": given.max_length, "encoder": {"name": given.encoder}, "epochs": given.epochs,
        "batch_size": given.batch_size, "threads": given.threads, "shared": str(given.work.absolute()),
    }  # fmt: skip
    for name in given.peers:
        folder = given.work / f"{dataset.name}-{given.text.replace('+', '-')}-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "data").mkdir(parents=True)
        (folder / "data" / "dataset").symlink_to(given.dataset.absolute())
        write_json(folder / "peer.json", settings)
        told = peers.run(name, folder, given.seed, {"train_on": given.train_on})
        metrics = measure(dataset, folder / "outputs", counts_L, inverse_L)
        told["seconds"] = told["train_seconds"] + told["search_ms"] * dataset.rows("test").size / 1000
        results[told["title"]] = {"metrics": metrics, "seconds": round(told["seconds"], 1), "facts": told}
        write_json(output, {"facts": facts, "results": results})
    print(table(results))


if __name__ == "__main__":
    try:
        main()
    except UnidecError as error:
        sys.exit(f"error: {error}")
