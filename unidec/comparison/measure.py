"""What one run is worth and costs, as it goes into its result.json.

Legend: n test queries, K labels a query.
"""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np

from unidec.comparison.peers.running import PeerOutcome
from unidec.config import Params, flatten
from unidec.data.storage import read_json_lines
from unidec.machine import host_peak

K = 100
TIMED_QUERIES = 512  # queries whose prediction is timed, in batches of 256
PREDICTIONS = "labels.npy"
_TIMED_K = 10


def of_recipe(params: Params, costs: dict[str, float], run_dir: Path | None) -> dict[str, Any]:
    """Result of a model of ours whose bundle is in outputs/.

    Args:
        costs: what was measured so far.
        run_dir: the training's folder; None: trained by another cell.
    """
    import pyarrow.parquet as pq

    from unidec.pipeline import paths
    from unidec.pipeline.ranking import headline
    from unidec.retrieval.bundle import Bundle
    from unidec.tracking.run import Tracker

    metrics = json.loads(paths.METRICS.read_text(encoding="utf-8"))
    lists = pq.read_table(paths.PREDICTIONS, columns=["labels"])["labels"].to_pylist()
    labels = np.full((len(lists), K), -1, dtype=np.int32)  # [n, K], -1 behind the last
    for row, found in enumerate(lists):
        labels[row, : min(len(found), K)] = found[:K]
    np.save(PREDICTIONS, labels, allow_pickle=False)
    records = paths.MODEL if run_dir is None else run_dir
    curve = read_json_lines(records / "rounds.jsonl")
    bundle = Bundle.load(paths.BUNDLE, verify=False)
    costs = costs | _search_times(bundle, params) | _sizes(bundle, paths.BUNDLE)
    if run_dir is not None:
        costs["train_seconds"] = float(sum(line["train_seconds"] for line in curve))
        costs["refresh_seconds"] = float(sum(line.get("refresh", {}).get("refresh_seconds", 0) for line in curve))
    parts = {name: headline(metrics[name]) for name in ("de", "clf", "heads", "knn") if name in metrics}
    tracker = Tracker.resume(run_dir) if run_dir is not None else None
    return {
        "metrics": metrics["test"], "validation": metrics.get("validation", {}), "parts": parts,
        "costs": costs, "curve": curve if run_dir is not None else [], "params": flatten(params),
        "dataset": _card(params), "lineage": _lineage(), "mlflow_run": tracker.run_id if tracker is not None else None,
    }  # fmt: skip


def of_peer(params: Params, name: str, outcome: PeerOutcome) -> dict[str, Any]:
    """Result of a peer: filtered pairs are removed from its predictions, which are then measured as ours are."""
    from unidec.evaluation.metrics import evaluate, filtered_truth, remove_filtered
    from unidec.pipeline import paths

    dataset, propensity = paths.open_dataset(), paths.open_propensity()
    figures: dict[str, dict[str, float]] = {}
    for split, (found, _) in outcome.predictions.items():
        rows = dataset.rows(split)
        filters = dataset.filter_pairs[rows]
        labels = remove_filtered(found, filters, K)
        truth = filtered_truth(dataset.relevance[rows], filters)
        figures[split] = evaluate(labels, truth, propensity.inverse_L, propensity.group_L)
        if split == "test":
            np.save(PREDICTIONS, labels.astype(np.int32), allow_pickle=False)
    result = {
        "metrics": figures["test"], "validation": figures.get("validation", {}), "parts": {},
        "costs": {"peak_memory_bytes": float(host_peak())} | dict(outcome.costs), "curve": [],
        "dataset": _card(params), "lineage": _lineage() | {name: outcome.version},
    }  # fmt: skip
    return result | {"mlflow_run": _tracked(params, name, result)}


def _lineage() -> dict[str, str]:
    """What the figures were measured with and on: versions, commit, machine; no names."""
    import torch

    from unidec.tracking import provenance

    tags = provenance.code_tags()
    names = {"mlflow.source.git.commit": "commit", "git.dirty": "edited", "unidec.version": "unidec"}
    found = {short: tags[name] for name, short in names.items() if name in tags}
    found |= {
        "system": f"{platform.system()} {platform.machine()}", "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()), "python": platform.python_version(), "torch": torch.__version__,
    }  # fmt: skip
    return found | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


# -- parts ------------------------------------------------------------------------------------------------------------


def _search_times(bundle: Any, params: Params) -> dict[str, float]:
    """Milliseconds a test query: encoding (tokens and heads), and the rest of a prediction."""
    from unidec.data.tokens import encode_texts
    from unidec.pipeline import paths

    dataset = paths.open_dataset()
    rows = dataset.rows("test")[:TIMED_QUERIES]
    if not len(rows):
        return {}
    texts = dataset.query_texts(rows, params.tokens.text)
    bundle.predict_arrays(texts[:8], k=_TIMED_K)  # what is loaded at the first call is no search time
    begin = time.perf_counter()
    bundle.predict_arrays(texts, k=_TIMED_K)
    whole = time.perf_counter() - begin
    begin = time.perf_counter()
    for start in range(0, len(texts), 256):
        part = texts[start : start + 256]
        tokens = encode_texts(part, bundle.model.tokenizer_folder, bundle.model.max_length)
        bundle.model.encode_queries(tokens, np.arange(len(part)), batch_size=len(part))
    encoding = time.perf_counter() - begin
    return {"encode_ms": 1000 * encoding / len(texts), "search_ms": 1000 * max(whole - encoding, 0) / len(texts)}


def _sizes(bundle: Any, folder: Path) -> dict[str, float]:
    """Numbers of parameters by part, those that do not train included, and the bundle's bytes."""
    model = bundle.model
    heads = [head for head in (model.head_de, model.head_clf) if head is not None]
    stored = [bundle.vectors[name].size for name in ("clf", "bias") if name in bundle.vectors]
    return {
        "parameters_encoder": float(sum(parameter.numel() for parameter in model.encoder.parameters())),
        "parameters_heads": float(sum(parameter.numel() for head in heads for parameter in head.parameters())),
        "parameters_classifier": float(sum(stored)),
        "bundle_bytes": float(sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())),
    }


def _card(params: Params) -> dict[str, Any]:
    from unidec.pipeline import paths

    dataset = paths.open_dataset()
    meta = dataset.manifest["meta"]
    return {
        "name": dataset.name, "text": params.tokens.text, "tokens a text": params.tokens.max_length, **meta["splits"],
        "labels": dataset.num_labels, "pairs": meta["num_pairs"], "filter pairs": meta["num_filter_pairs"],
        "propensity A, B": f"{params.data.propensity_a}, {params.data.propensity_b}", "sha256": dataset.sha256,
    }  # fmt: skip


def _tracked(params: Params, peer: str, result: dict[str, Any]) -> str | None:
    """An MLflow run for a peer: its settings and figures."""
    from unidec.tracking.run import Tracker

    tracker = Tracker(params.tracking.experiment)
    about = {"name": result["dataset"]["name"], "digest": result["dataset"]["sha256"], "path": "data/dataset"}
    tracker.start("runs/peer", {"peer": peer, "seed": params.seed}, {}, about)
    tracker.log_final(
        {f"test/{name}": value for name, value in result["metrics"].items()}
        | {f"cost/{name}": value for name, value in result["costs"].items()}
    )
    tracker.finish("FINISHED")
    return tracker.run_id
