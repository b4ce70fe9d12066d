"""What the report of a run shows, gathered from a bundle, its test ranking and the records of its training.

Legend: n queries of the split, K places.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from unidec.config import Params, flatten
from unidec.data.dataset import XMCDataset
from unidec.evaluation.baselines import Baselines, verdict
from unidec.evaluation.report import ReportInput
from unidec.evaluation.significance import Comparison
from unidec.metric_names import BASELINES, GROUPS
from unidec.pipeline import paths
from unidec.pipeline.ranking import Ranking, headline
from unidec.retrieval.bundle import Bundle
from unidec.tracking.provenance import code_tags, dvc_hash
from unidec.tracking.run import Tracker
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
        compared: the bundle beside the baselines. tracker: the MLflow run of its training.
    """

    bundle: Bundle
    ranking: Ranking
    scores: np.ndarray
    labels: np.ndarray
    result: dict[str, Any]
    baselines: Baselines
    compared: list[Comparison]
    tracker: Tracker


def report_input(
    params: Params, found: Evaluated, history: list[dict[str, Any]], rounds: list[dict[str, Any]]
) -> ReportInput:
    """Everything the page shows. history, rounds: the records of training."""
    bundle, result, labels = found.bundle, found.result, found.labels
    dataset, truth, heads = found.ranking.dataset, found.ranking.truth, bundle.model.heads
    true = np.asarray(truth[np.arange(len(labels))[:, None], np.maximum(labels, 0)].todense()).astype(bool)
    correct = true & (labels >= 0)
    wrong = ~correct[:, :SHOWN].any(axis=1) & (np.diff(truth.indptr) > 0)
    tags = code_tags()
    lineage = {
        "git commit": tags.get("mlflow.source.git.commit"), "edited since": tags.get("git.dirty"),
        "unidec": __version__, "data set": dataset.sha256, "data set in DVC": dvc_hash(str(paths.DATASET)),
        "dvc.lock": tags.get("dvc.lock.sha256"), "bundle": bundle.sha256, "MLflow run": found.tracker.run_id,
    }  # fmt: skip
    return ReportInput(
        title=f"{dataset.name}: {'UniDEC' if heads == 'both' else heads}",
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        dataset=f"{dataset.name}, {params.tokens.text}",
        model=f"{params.encoder.kind} encoder ({params.encoder.name})",
        metrics=_metrics(result, heads),
        baselines={BASELINES[name]: headline(dict(own)) for name, own in found.baselines.metrics.items()},
        baseline_note=found.baselines.about,
        verdict=verdict(found.compared),
        warnings=result["warnings"],
        comparison=found.compared,
        history=history,
        rounds=rounds,
        bins=result["frequency_bins"],
        index={"kind": bundle.info.index_kind, "space": bundle.info.space, **result["index"]},
        calibration={"score": found.scores[:, :CALIBRATED], "correct": correct[:, :CALIBRATED]},
        right=_examples(found, correct, correct[:, 0]),
        wrong=_examples(found, correct, wrong),
        card=_card(params, dataset),
        params=flatten(params),
        lineage={key: value for key, value in lineage.items() if value},
    )


def _metrics(result: dict[str, Any], heads: str) -> dict[str, dict[str, float]]:
    """Metrics by what was searched: what is served, then without the votes, each head alone, the votes alone."""
    shown = {f"{WITH_VOTES[heads]} and votes" if "knn" in result else heads: result["test"]}
    if "heads" in result:
        shown[heads] = result["heads"]
    return shown | {name: result[name] for name in ("de", "clf", "knn") if name in result}


def _card(params: Params, dataset: XMCDataset) -> dict[str, Any]:
    """Facts about the data set."""
    meta, propensity = dataset.manifest["meta"], paths.open_propensity()
    groups = np.bincount(propensity.group_L, minlength=len(GROUPS))
    return {
        "name": dataset.name, "text": params.tokens.text, "tokens a text, at most": params.tokens.max_length,
        **{f"{split} queries": count for split, count in meta["splits"].items()}, "labels": dataset.num_labels,
        "pairs": meta["num_pairs"], "filter pairs": meta["num_filter_pairs"],
        **{f"{group} labels": int(count) for group, count in zip(GROUPS, groups, strict=True)},
        "labels without a training query": int((propensity.counts_L == 0).sum()),
        "propensity A, B": f"{params.data.propensity_a}, {params.data.propensity_b}",
    }  # fmt: skip


def _examples(found: Evaluated, correct: np.ndarray, mask: np.ndarray) -> list[dict[str, Any]]:
    """A seeded draw of the queries in `mask`, bool [n], with their first labels."""
    dataset, examples = found.ranking.dataset, []
    for i in np.random.default_rng(0).permutation(np.flatnonzero(mask))[:EXAMPLES]:
        answered, true = found.labels[i, :SHOWN], found.ranking.truth[i].indices
        answered = answered[answered >= 0]
        missed = np.setdiff1d(true, answered)
        shown = zip(dataset.label_uids(answered), dataset.label_texts(answered), found.scores[i], correct[i])
        examples.append({
            "query": dataset.query_texts(found.ranking.rows[[i]])[0], "truth": dataset.label_texts(true),
            "missed": dataset.label_texts(missed) if len(missed) else [],
            "predictions": [
                {"label": uid, "title": title, "score": float(score), "correct": bool(right)}
                for uid, title, score, right in shown
            ],
        })  # fmt: skip
    return examples
