"""What the report of a run shows, gathered from a bundle, its test ranking and the records of its training.

Legend: n queries of the split, K places.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unidec.config import Params, flatten
from unidec.data.dataset import XMCDataset
from unidec.data.storage import read_manifest
from unidec.evaluation.baselines import Baselines, verdict
from unidec.evaluation.frequency import doubling_histogram
from unidec.evaluation.pools import pool_study
from unidec.evaluation.report import ReportInput
from unidec.evaluation.significance import Comparison
from unidec.metric_names import BASELINES, GROUPS
from unidec.model.encoder import InputBuilder
from unidec.pipeline import paths
from unidec.pipeline.ranking import Ranking, headline
from unidec.retrieval.bundle import Bundle
from unidec.retrieval.scoring_space import head_scores
from unidec.tracking.provenance import code_tags, dvc_hash
from unidec.tracking.run import Tracker
from unidec.training.batches import Batches
from unidec.training.needs import draws_pools
from unidec.training.refresh import Refresh
from unidec.version import __version__

EXAMPLES = 6  # queries answered right and as many answered wrong
SHOWN = 5  # labels shown for each
WITH_VOTES = {"both": "both heads", "de": "dual encoder", "clf": "classifier"}
CALIBRATED = 5  # predictions a query that the calibration plot counts


@dataclass(frozen=True)
class Evaluated:
    """A bundle's answers on the test split, and what was measured of them.

    Attributes:
        scores, labels: [n, K] as searched, -1 where there is no label. result: what outputs/metrics.json holds.
        compared: the bundle beside the baselines.
    """

    bundle: Bundle
    ranking: Ranking
    scores: np.ndarray
    labels: np.ndarray
    result: dict[str, Any]
    baselines: Baselines
    compared: list[Comparison]


def report_input(
    params: Params, found: Evaluated, history: list[dict[str, Any]], rounds: list[dict[str, Any]]
) -> ReportInput:
    """Everything the page shows. history, rounds: the records of training."""
    bundle, result, labels = found.bundle, found.result, found.labels
    dataset = found.ranking.dataset
    correct = np.asarray(found.ranking.truth[np.arange(len(labels))[:, None], np.maximum(labels, 0)].todense()).astype(
        bool
    )
    correct &= labels >= 0
    right, wrong = _examples(found, correct)
    card, distributions = _card(params, dataset)
    run_dir = paths.RUNS / read_manifest(paths.MODEL, "model", 1, verify=False)["meta"]["run"]
    return ReportInput(
        title=f"{dataset.name}: {(bundle.model.heads == 'both' and 'UniDEC') or bundle.model.heads}",
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        dataset=f"{dataset.name}, {params.tokens.text}",
        model=f"{params.encoder.kind} encoder ({params.encoder.name})",
        metrics=_metrics(result, bundle.model.heads),
        baselines={BASELINES[name]: headline(dict(own)) for name, own in found.baselines.metrics.items()},
        baseline_note=found.baselines.about,
        verdict=verdict(found.compared),
        warnings=result["warnings"],
        comparison=found.compared,
        history=history,
        rounds=rounds,
        bins=result.get("frequency_bins", ()),
        pools=_pools(params, bundle, dataset, run_dir),
        index={"kind": bundle.info.index_kind, "space": bundle.info.space, **result["index"]},
        calibration={"score": found.scores[:, :CALIBRATED], "correct": correct[:, :CALIBRATED]},
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


def _card(params: Params, dataset: XMCDataset) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Facts about the data set, and how its labels and queries are distributed."""
    meta, propensity = dataset.manifest["meta"], paths.open_propensity()
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
    if not draws_pools(params.model, params.pool) or not folders:
        return {}
    epoch = int(folders[-1].name.removeprefix("epoch-"))
    if not Refresh.is_made(folders[-1], epoch):
        return {}
    refresh = Refresh.load(folders[-1], epoch)
    graph = paths.open_label_graph(params)
    cpu = torch.device("cpu")
    builder = InputBuilder(bundle.model.encoder, cpu)  # pools are drawn without texts: it is not called
    batches = Batches(params.training, dataset, {}, builder, cpu, label_graph=graph)
    of_epoch = refresh.batches(batches.rows, params.pool.batch_size, params.seed, epoch)
    return pool_study(batches.sampler, of_epoch, refresh.negatives, epoch)


def _examples(found: Evaluated, correct: np.ndarray) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Seeded draws of queries whose first label is right, and of queries none of whose shown labels is."""
    none = ~correct[:, :SHOWN].any(axis=1) & (np.diff(found.ranking.truth.indptr) > 0)
    rng = np.random.default_rng(0)
    chosen = [rng.permutation(np.flatnonzero(mask))[:EXAMPLES] for mask in (correct[:, 0], none)]
    right, wrong = ([_example(found, correct, int(i)) for i in pick] for pick in chosen)
    return right, wrong


def _example(found: Evaluated, correct: np.ndarray, i: int) -> dict[str, Any]:
    """Query `i` of the split."""
    ranking, info, vectors = found.ranking, found.bundle.info, found.ranking.vectors
    one, shown, dataset = ranking.one(i), found.labels[i : i + 1, :SHOWN], ranking.dataset
    parts = {}
    if one.query_de is not None and "de" in vectors:
        parts["de"] = head_scores(one.query_de, vectors["de"], shown)[0]
    if one.query_clf is not None and "clf" in vectors:
        bias, normalize = vectors.get("bias"), info.clf_normalize
        parts["clf"] = head_scores(one.query_clf, vectors["clf"], shown, bias_L=bias, normalize=normalize)[0]
    if found.bundle.neighbours is not None and info.knn is not None:
        votes = one.votes(found.bundle.neighbours, info.knn.neighbours)
        parts["knn"] = votes[:, np.maximum(shown[0], 0)].toarray()[0]
    true_rows, answered = found.ranking.truth[i].indices, shown[0][shown[0] >= 0]
    missed = np.setdiff1d(true_rows, answered)
    uids, titles = dataset.label_uids(answered), dataset.label_texts(answered)
    predictions = [
        {"label": uids[k], "title": titles[k], "score": float(found.scores[i, k]), "correct": bool(correct[i, k]),
         **{head: float(values[k]) for head, values in parts.items()}}
        for k in range(len(answered))
    ]  # fmt: skip
    return {
        "query": dataset.query_texts(one.rows)[0], "truth": dataset.label_texts(true_rows), "predictions": predictions,
        "missed": dataset.label_texts(missed) if len(missed) else [],
    }  # fmt: skip


def _lineage(bundle: Bundle, dataset_sha256: str, run_dir: Path) -> dict[str, str]:
    tags = code_tags()
    found = {
        "git commit": tags.get("mlflow.source.git.commit"), "edited since": tags.get("git.dirty"),
        "unidec": __version__, "data set": dataset_sha256, "data set in DVC": dvc_hash(str(paths.DATASET)),
        "dvc.lock": tags.get("dvc.lock.sha256"), "bundle": bundle.sha256, "run folder": str(run_dir),
        "MLflow run": Tracker.resume(run_dir).run_id,
    }  # fmt: skip
    return {key: value for key, value in found.items() if value}
