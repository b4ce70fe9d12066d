"""What the report of a run shows, gathered from a bundle, its test ranking and the records of its training.

Legend: n queries of the split, K places.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

import unidec
from unidec.config import Params, flatten
from unidec.data.storage import read_manifest
from unidec.evaluation.metrics import per_query
from unidec.evaluation.report import ReportInput
from unidec.ops.provenance import code_tags, dvc_hash
from unidec.ops.tracking import Tracker
from unidec.retrieval.bundle import Bundle
from unidec.retrieval.space import head_scores
from unidec.stages import paths
from unidec.stages.ranking import Ranking, headline

EXAMPLES = 6  # queries answered right and as many answered wrong
SHOWN = 5  # labels shown for each
BASELINE_NOTE = "Below ours: benchmarks/baselines.py, same split and metric code, trained on train and validation."
CALIBRATED = 5  # predictions a query that the calibration plot counts


def report_input(
    params: Params,
    bundle: Bundle,
    ranking: Ranking,
    truth: sp.csr_matrix,
    scores: np.ndarray,
    labels: np.ndarray,
    result: dict[str, Any],
    history: list[dict[str, Any]],
    rounds: list[dict[str, Any]],
) -> ReportInput:
    """Everything the page shows.

    Args:
        truth: bool csr [n, L], filtered pairs removed. scores, labels: [n, K] as searched, -1 where there is no label.
        result: what outputs/metrics.json holds. history, rounds: the records of training.
    """
    dataset = ranking.dataset
    meta = dataset.manifest["meta"]
    heads = {"both": result["test"]} if bundle.model.heads == "both" else {bundle.model.heads: result["test"]}
    heads |= {name: result[name] for name in ("de", "clf") if name in result}
    correct = np.asarray(truth[np.arange(len(labels))[:, None], np.maximum(labels, 0)].todense()).astype(bool)
    correct &= labels >= 0
    right, wrong = _examples(bundle, ranking, truth, scores, labels, correct)
    baselines = _baselines(dataset.name, params.tokens.text)
    card = {"name": dataset.name, "task": params.tokens.text, **meta["splits"], "labels": dataset.num_labels,
            "pairs": meta["num_pairs"], "filter pairs": meta["num_filter_pairs"],
            "propensity A, B": f"{params.data.propensity_a}, {params.data.propensity_b}"}  # fmt: skip
    return ReportInput(
        title=f"{dataset.name}: {(bundle.model.heads == 'both' and 'UniDEC') or bundle.model.heads}",
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        dataset=f"{dataset.name}, {params.tokens.text}",
        model=f"{params.encoder.kind} encoder ({params.encoder.name})",
        metrics=heads,
        baselines=baselines,
        baseline_note=BASELINE_NOTE if baselines else "",
        history=history,
        rounds=rounds,
        index={"kind": bundle.info.index_kind, **result["index"]},
        calibration={"score": scores[:, :CALIBRATED], "correct": correct[:, :CALIBRATED]},
        right=right,
        wrong=wrong,
        card=card,
        params=flatten(params),
        lineage=_lineage(bundle, dataset.sha256),
    )


def _baselines(name: str, text: str) -> dict[str, dict[str, float]]:
    """What `benchmarks/baselines.py` measured on this data set, if it did."""
    path = Path("benchmarks/results") / f"baselines-{name}-{text.replace('+', '-')}.json"
    if not path.is_file():
        return {}
    results = json.loads(path.read_text(encoding="utf-8"))["results"]
    return {system: headline(entry["metrics"]) for system, entry in results.items()}


def _examples(
    bundle: Bundle, ranking: Ranking, truth: sp.csr_matrix, scores: np.ndarray, labels: np.ndarray, correct: np.ndarray
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Seeded draws of queries whose first label is right, and of queries none of whose shown labels is."""
    has_truth = np.diff(truth.indptr) > 0
    first = per_query(labels[:, :1], truth)["P@1"] > 0
    none = ~correct[:, :SHOWN].any(axis=1) & has_truth
    rng = np.random.default_rng(0)
    chosen = [rng.permutation(np.flatnonzero(mask))[:EXAMPLES] for mask in (first, none)]
    right, wrong = (
        [_example(bundle, ranking, truth, scores, labels, correct, int(i)) for i in pick] for pick in chosen
    )
    return right, wrong


def _example(
    bundle: Bundle,
    ranking: Ranking,
    truth: sp.csr_matrix,
    scores: np.ndarray,
    labels: np.ndarray,
    correct: np.ndarray,
    i: int,
) -> dict[str, Any]:
    dataset, info = ranking.dataset, bundle.info
    shown = labels[i : i + 1, :SHOWN]
    parts = {}
    if ranking.query_de is not None and ranking.label_de is not None:
        parts["de"] = head_scores(ranking.query_de[i : i + 1], ranking.label_de, shown)[0]
    if ranking.query_clf is not None and ranking.label_clf is not None:
        parts["clf"] = head_scores(
            ranking.query_clf[i : i + 1], ranking.label_clf, shown, bias_L=ranking.bias, normalize=info.clf_normalize
        )[0]
    true_rows = truth.indices[truth.indptr[i] : truth.indptr[i + 1]]
    found = [label for label in shown[0] if label >= 0]
    uids, titles = dataset.label_uids(np.array(found)), dataset.label_texts(np.array(found))
    predictions = [
        {"label": uids[k], "title": titles[k], "score": float(scores[i, k]), "correct": bool(correct[i, k]),
         **{head: float(values[k]) for head, values in parts.items()}}
        for k in range(len(found))
    ]  # fmt: skip
    missed = np.setdiff1d(true_rows, found)
    return {
        "query": dataset.query_texts(ranking.rows[i : i + 1])[0],
        "truth": dataset.label_texts(true_rows),
        "predictions": predictions,
        "missed": dataset.label_texts(missed) if len(missed) else [],
    }


def _lineage(bundle: Bundle, dataset_sha256: str) -> dict[str, str]:
    run = read_manifest(paths.MODEL, "model", 1, verify=False)["meta"]["run"]
    tags = code_tags()
    found = {
        "git commit": tags.get("mlflow.source.git.commit"), "edited since": tags.get("git.dirty"),
        "unidec": unidec.__version__, "data set": dataset_sha256, "data set in DVC": dvc_hash(str(paths.DATASET)),
        "dvc.lock": tags.get("dvc.lock.sha256"), "bundle": bundle.sha256, "run folder": str(paths.RUNS / run),
        "MLflow run": Tracker.resume(paths.RUNS / run).run_id,
    }  # fmt: skip
    return {key: value for key, value in found.items() if value}
