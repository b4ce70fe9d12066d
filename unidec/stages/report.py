"""What the report of a run shows, gathered from a bundle, its test ranking and the records of its training.

Legend: n queries of the split, K places.
"""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

import unidec
from unidec.config import Params, flatten
from unidec.data.dataset import XMCDataset
from unidec.data.label_graph import load_label_graph
from unidec.data.propensity import load_propensity
from unidec.data.storage import read_manifest
from unidec.evaluation.frequency import doubling_histogram
from unidec.evaluation.metrics import GROUPS, per_query
from unidec.evaluation.pools import pool_study
from unidec.evaluation.report import ReportInput
from unidec.model.encoder import InputBuilder
from unidec.ops.provenance import code_tags, dvc_hash
from unidec.ops.tracking import Tracker
from unidec.retrieval.bundle import Bundle
from unidec.retrieval.space import head_scores
from unidec.stages import paths
from unidec.stages.ranking import Ranking, headline
from unidec.training.batches import Batches
from unidec.training.needs import draws_pools
from unidec.training.refresh import Refresh

EXAMPLES = 6  # queries answered right and as many answered wrong
SHOWN = 5  # labels shown for each
BASELINE_NOTE = "Below ours: peers measured on the same split with the same metric code, trained on {}."
WITH_VOTES = {"both": "both heads", "de": "dual encoder", "clf": "classifier"}
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
    correct = np.asarray(truth[np.arange(len(labels))[:, None], np.maximum(labels, 0)].todense()).astype(bool)
    correct &= labels >= 0
    right, wrong = _examples(bundle, ranking, truth, scores, labels, correct)
    baselines, trained_on = _baselines(dataset.name, params.tokens.text)
    card, distributions = _card(params, dataset)
    run_dir = paths.RUNS / read_manifest(paths.MODEL, "model", 1, verify=False)["meta"]["run"]
    return ReportInput(
        title=f"{dataset.name}: {(bundle.model.heads == 'both' and 'UniDEC') or bundle.model.heads}",
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        dataset=f"{dataset.name}, {params.tokens.text}",
        model=f"{params.encoder.kind} encoder ({params.encoder.name})",
        metrics=_metrics(result, bundle.model.heads),
        baselines=baselines,
        baseline_note=BASELINE_NOTE.format(trained_on) if baselines else "",
        history=history,
        rounds=rounds,
        bins=result.get("frequency_bins", ()),
        pools=_pools(params, bundle, dataset, run_dir),
        index={"kind": bundle.info.index_kind, "space": bundle.info.space, **result["index"]},
        calibration={"score": scores[:, :CALIBRATED], "correct": correct[:, :CALIBRATED]},
        right=right,
        wrong=wrong,
        card=card,
        distributions=distributions,
        params=flatten(params),
        lineage=_lineage(bundle, dataset.sha256, run_dir),
    )


def _metrics(result: dict[str, Any], heads: str) -> dict[str, dict[str, float]]:
    """Metrics by what was searched: what is served, then without the votes, each head alone, the votes alone."""
    shown = {f"{WITH_VOTES[heads]} and votes" if "knn" in result else heads: result["test"]}
    if "heads" in result:
        shown[heads] = result["heads"]
    return shown | {name: result[name] for name in ("de", "clf", "knn") if name in result}


def _baselines(name: str, text: str) -> tuple[dict[str, dict[str, float]], str]:
    """What was measured of peers on this data set, if anything was, and what they were trained on."""
    path = Path("benchmarks/results") / f"baselines-{name}-{text.replace('+', '-')}.json"
    if not path.is_file():
        return {}, ""
    stored = json.loads(path.read_text(encoding="utf-8"))
    shown = {system: headline(entry["metrics"]) for system, entry in stored["results"].items()}
    return shown, str(stored.get("facts", {}).get("train_on", "train")).replace("+", " and ")


def _card(params: Params, dataset: XMCDataset) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Facts about the data set, and how its labels and queries are distributed."""
    meta, propensity = dataset.manifest["meta"], load_propensity(paths.PROPENSITY, verify=False)
    labels_N = np.diff(dataset.relevance.indptr)
    counts_L, train_N = propensity.counts_L, labels_N[dataset.rows("train")]
    groups = np.bincount(propensity.group_L, minlength=len(GROUPS))
    card = {
        "name": dataset.name, "text": params.tokens.text, "tokens a text, at most": params.tokens.max_length,
        **{f"{split} queries": count for split, count in meta["splits"].items()}, "labels": dataset.num_labels,
        "pairs": meta["num_pairs"], "filter pairs": meta["num_filter_pairs"],
        "labels a training query, mean": round(float(train_N.mean()), 2) if len(train_N) else None,
        "training queries a label, mean": round(float(counts_L.mean()), 2) if len(counts_L) else None,
        **{f"{group} labels": int(count) for group, count in zip(GROUPS, groups, strict=True)},
        "labels without a training query": int((counts_L == 0).sum()),
        "propensity A, B": f"{params.data.propensity_a}, {params.data.propensity_b}",
    }  # fmt: skip
    distributions = [
        {"title": "Labels by their training queries", "x": "training queries", "y": "labels",
         "bars": doubling_histogram(counts_L)},
        {"title": "Training queries by their labels", "x": "labels", "y": "queries",
         "bars": doubling_histogram(train_N)},
    ]  # fmt: skip
    return card, distributions


def _pools(params: Params, bundle: Bundle, dataset: XMCDataset, run_dir: Path) -> dict[str, Any]:
    """Pools of the last round, drawn again; nothing where no loss runs over a pool or the round's clusters are gone."""
    folders = sorted((run_dir / "refresh").glob("epoch-*"))
    if not draws_pools(params) or not folders:
        return {}
    epoch = int(folders[-1].name.removeprefix("epoch-"))
    if not Refresh.is_made(folders[-1], epoch):
        return {}
    refresh = Refresh.load(folders[-1], epoch)
    graph = load_label_graph(paths.LABEL_GRAPH) if params.pool.gandalf else None
    cpu = torch.device("cpu")
    builder = InputBuilder(bundle.model.encoder, cpu)  # pools are drawn without texts: it is not called
    batches = Batches(params, dataset, {}, builder, cpu, label_graph=graph)
    of_epoch = refresh.batches(batches.rows, params.pool.batch_size, params.seed, epoch)
    return pool_study(batches.sampler, of_epoch, refresh.negatives, epoch)


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
    if bundle.neighbours is not None and info.knn is not None:
        de, clf = (None if part is None else part[i : i + 1] for part in (ranking.query_de, ranking.query_clf))
        one = dataclasses.replace(ranking, rows=ranking.rows[i : i + 1], query_de=de, query_clf=clf)
        votes = one.votes(bundle.neighbours, info.knn.neighbours)
        parts["knn"] = votes[:, np.maximum(shown[0], 0)].toarray()[0]
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


def _lineage(bundle: Bundle, dataset_sha256: str, run_dir: Path) -> dict[str, str]:
    tags = code_tags()
    found = {
        "git commit": tags.get("mlflow.source.git.commit"), "edited since": tags.get("git.dirty"),
        "unidec": unidec.__version__, "data set": dataset_sha256, "data set in DVC": dvc_hash(str(paths.DATASET)),
        "dvc.lock": tags.get("dvc.lock.sha256"), "bundle": bundle.sha256, "run folder": str(run_dir),
        "MLflow run": Tracker.resume(run_dir).run_id,
    }  # fmt: skip
    return {key: value for key, value in found.items() if value}
