"""What one run is worth and costs, as it goes into its result.json.

Legend: n test queries, K labels a query.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unidec.comparison.peers.running import K
from unidec.comparison.workspace import PREDICTIONS
from unidec.config import Params, flatten
from unidec.data.storage import read_json_lines
from unidec.machine import host_peak
from unidec.pipeline import paths

TIMED_QUERIES, TIMED_K = 512, 10  # queries whose prediction is timed


def of_recipe(params: Params, costs: dict[str, float], run_dir: Path | None) -> dict[str, Any]:
    """Metrics, costs and curve of a model of ours whose bundle is in outputs/.

    Args:
        costs: what was measured so far.
        run_dir: the training's folder; None: trained by another cell.
    """
    import pyarrow.parquet as pq

    from unidec.retrieval.bundle import Bundle
    from unidec.tracking.run import tracking_state

    metrics = json.loads(paths.METRICS.read_text(encoding="utf-8"))
    lists = pq.read_table(paths.PREDICTIONS, columns=["labels"])["labels"].to_pylist()
    labels = np.full((len(lists), K), -1, dtype=np.int32)  # [n, K], -1 behind the last
    for row, found in enumerate(lists):
        labels[row, : min(len(found), K)] = found[:K]
    np.save(PREDICTIONS, labels, allow_pickle=False)
    bundle = Bundle.load(paths.BUNDLE, verify=False)
    heads = [head for head in (bundle.model.head_de, bundle.model.head_clf) if head is not None]
    weights = [parameter for part in (bundle.model.encoder, *heads) for parameter in part.parameters()]
    classifier = [bundle.vectors[name].size for name in ("clf", "bias") if name in bundle.vectors]
    costs = costs | {
        "search_ms": _search_ms(bundle, params),
        "parameters": float(sum(weight.numel() for weight in weights) + sum(classifier)),
        "bundle_bytes": float(sum(file.stat().st_size for file in paths.BUNDLE.rglob("*") if file.is_file())),
    }
    curve = read_json_lines(run_dir / "rounds.jsonl") if run_dir else []
    if run_dir is not None:
        costs["train_seconds"] = float(sum(line["train_seconds"] for line in curve))
        costs["refresh_seconds"] = float(sum(line.get("refresh", {}).get("refresh_seconds", 0) for line in curve))
    return {
        "metrics": metrics["test"], "validation": metrics.get("validation", {}), "costs": costs, "curve": curve,
        "params": flatten(params), "dataset": _card(params), "lineage": _lineage(),
        "mlflow_run": run_dir and tracking_state(run_dir).get("run_id"),
    }  # fmt: skip


def of_peer(params: Params, name: str, labels: NDArray[np.int64], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics and costs of a peer: filtered pairs are removed, what is left is measured as our labels are.

    Args:
        labels, facts: as `run_peer` returns them.
    """
    from unidec.evaluation.metrics import evaluate, filtered_truth, remove_filtered

    dataset, propensity = paths.open_dataset(), paths.open_propensity()
    rows = dataset.rows("test")
    filters = dataset.filter_pairs[rows]
    truth, labels = filtered_truth(dataset.relevance[rows], filters), remove_filtered(labels, filters, K)
    np.save(PREDICTIONS, labels.astype(np.int32), allow_pickle=False)
    metrics = evaluate(labels, truth, propensity.inverse_L, propensity.group_L)
    costs = {"peak_memory_bytes": float(host_peak())} | {key: facts[key] for key in facts if key != "version"}
    return {
        "metrics": metrics, "validation": {}, "costs": costs, "curve": [], "dataset": _card(params),
        "lineage": _lineage() | {name: facts["version"]}, "mlflow_run": _tracked(params, name, metrics, costs),
    }  # fmt: skip


# -- parts ------------------------------------------------------------------------------------------------------------


def _lineage() -> dict[str, str]:
    """What the figures were measured with and on: versions, commit, machine; no names."""
    import torch

    from unidec.tracking.provenance import COMMIT_TAG, DIRTY_TAG, code_tags

    tags, names = code_tags(), {COMMIT_TAG: "commit", DIRTY_TAG: "edited", "unidec.version": "unidec"}
    found = {short: tags[name] for name, short in names.items() if name in tags}
    found |= {
        "system": f"{platform.system()} {platform.machine()}", "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()), "python": platform.python_version(), "torch": torch.__version__,
    }  # fmt: skip
    return found | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


def _search_ms(bundle: Any, params: Params) -> float:
    """Milliseconds a test query, from its text to its labels."""
    dataset = paths.open_dataset()
    texts = dataset.query_texts(dataset.rows("test")[:TIMED_QUERIES], params.tokens.text)
    bundle.predict_arrays(texts[:8], k=TIMED_K)  # what is loaded at the first call is no search time
    begin = time.perf_counter()
    bundle.predict_arrays(texts, k=TIMED_K)
    return 1000 * (time.perf_counter() - begin) / max(len(texts), 1)


def _card(params: Params) -> dict[str, Any]:
    dataset = paths.open_dataset()
    meta = dataset.manifest["meta"]
    return {
        "name": dataset.name, "text": params.tokens.text, "tokens a text": params.tokens.max_length, **meta["splits"],
        "labels": dataset.num_labels, "pairs": meta["num_pairs"], "filter pairs": meta["num_filter_pairs"],
        "propensity A, B": f"{params.data.propensity_a}, {params.data.propensity_b}", "sha256": dataset.sha256,
    }  # fmt: skip


def _tracked(params: Params, peer: str, metrics: Mapping[str, float], costs: Mapping[str, float]) -> str | None:
    """An MLflow run for a peer: its settings and figures."""
    from unidec.tracking.run import Tracker

    tracker, dataset = Tracker(params.tracking.experiment), paths.open_dataset()
    about = {"name": dataset.name, "digest": dataset.sha256, "path": "data/dataset"}
    tracker.start("runs/peer", {"peer": peer, "seed": params.seed}, {}, about)
    figures = {f"test/{name}": value for name, value in metrics.items()}
    tracker.log_final(figures | {f"cost/{name}": value for name, value in costs.items()})
    tracker.finish("FINISHED")
    return tracker.run_id
