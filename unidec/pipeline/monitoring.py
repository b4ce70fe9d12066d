"""Stage `monitor`: a window of live queries beside what the champion was trained on -> a report, and an MLflow run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from unidec.config import Params
from unidec.data.profile import TextMeter, Vocabulary, share, spaced
from unidec.data.storage import file_sha256
from unidec.errors import ArtifactError, DataError
from unidec.evaluation.drift import SCORE_QUANTILES, Noise, compare_served
from unidec.evaluation.drift_checks import Check, compare_answers, compare_quality, compare_texts, order
from unidec.evaluation.drift_page import DriftReport
from unidec.evaluation.metrics import evaluate, per_query
from unidec.pipeline import paths
from unidec.pipeline.drift_check import TOKENIZER, write_report
from unidec.pipeline.profile import read_profile
from unidec.retrieval.bundle import Bundle
from unidec.retrieval.window import Window, read_window
from unidec.tracking.fetch import fetch_bundle
from unidec.tracking.run import Tracker

MAX_QUERIES = 20_000  # of a window; of more, so many evenly spaced ones are looked at
BATCH = 1024
K = 100


def monitor(
    params: Params,
    queries_path: str,
    *,
    column: str | None = None,
    labels_column: str | None = None,
    bundle: str | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    """Compare a file of queries with the training profile in a bundle, and measure it where it has labels.

    Args:
        queries_path, column, labels_column: see `read_window`.
        bundle: folder or models:/ address; default: the champion.
        out: folder for drift.json and index.html; default: below runs/monitor/.

    Returns:
        {"drifted", "judged" (there were at least drift.min_window queries; else nothing drifts), "findings" (as
        `Check.to_json`, what drifted first), "queries", "model" {"source", "bundle_sha256"}, "metrics" (percent; None
        without labels), "page", "result", "run_url" (None where the tracking server is away)}.

    Raises:
        ConfigError: no such model. DataError: a file that cannot be read. ArtifactError: a bundle without a profile.
    """
    source = bundle or f"models:/{params.tracking.model_name}@champion"
    folder = fetch_bundle(source, paths.BUNDLES)
    profile = read_profile(folder)
    if profile is None:
        raise ArtifactError("a bundle without a profile of its data", where=source, fix="train again: index writes one")
    window = read_window(Path(queries_path), column, labels_column)
    if not window.texts:
        raise DataError("a window without queries", where=queries_path)
    total = len(window.texts)
    window = window.sample(spaced(np.arange(total), MAX_QUERIES))
    loaded = Bundle.load(folder)
    texts = TextMeter(folder / TOKENIZER, profile["max_length"], Vocabulary.from_json(profile["vocabulary"]))
    summary, noise = texts.measure(window.texts).summary(), Noise(profile["noise"])
    checks = compare_texts(profile, summary, noise, params.drift)
    scores: np.ndarray = np.zeros(0)
    if profile["served"] is not None:
        vectors, scores = _answers(loaded, window.texts)
        answers = compare_served(profile["served"], vectors, scores, params.drift.low_score_quantile)
        checks += compare_answers(profile["served"], answers, len(scores), noise, params.drift)
    metrics = None
    if window.labels is not None:
        metrics, quality = _quality(loaded, window, params)
        checks += quality
    judged, findings = total >= params.drift.min_window, order(checks)
    drifted = [check for check in findings if check.state != "ok"] if judged else []
    result: dict[str, Any] = {
        "drifted": bool(drifted), "judged": judged,
        "findings": [check.to_json() | {"drifted": check in drifted} for check in findings],
        "queries": total, "model": {"source": source, "bundle_sha256": loaded.sha256}, "metrics": metrics,
    }  # fmt: skip
    name = f"{Path(queries_path).name.partition('.')[0]}-{_short(file_sha256(queries_path), loaded.sha256)}"
    report = DriftReport(
        title=f"Window of {total:,} queries", verdict=_verdict(judged, drifted, params), judged=judged,
        names=("trained on", "window"), checks=findings, old=profile["queries"], new=summary,
        scores=_curves(profile, scores),
        facts={"queries": total, "looked at": len(window.texts), "bundle": loaded.sha256, "data set": profile["name"],
               "data set sha256": profile["sha256"], "metrics": metrics or {}},
    )  # fmt: skip
    result = write_report(out or paths.MONITOR / name, report, result)
    return result | {"run_url": _track(params, result, Path(result["page"]).parent, name)}


def _answers(bundle: Bundle, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Vectors in the searched space float32 [n, D'], and the best label's score float32 [n]."""
    vectors, scores = [], []
    for start in range(0, len(texts), BATCH):
        asked = bundle.encode(texts[start : start + BATCH])
        vectors.append(bundle.searched(asked.de_BD, asked.clf_BD))
        scores.append(bundle.rank(asked.de_BD, asked.clf_BD, 1, words_BF=asked.words_BF).scores[:, 0])
    return np.concatenate(vectors), np.concatenate(scores)


def _quality(bundle: Bundle, window: Window, params: Params) -> tuple[dict[str, float], list[Check]]:
    """Metrics of the queries that have labels, in percent, and their checks; a label that the bundle does not know is
    missed."""
    assert window.labels is not None
    asked = [row for row, uids in enumerate(window.labels) if uids]
    pairs = [(place, uid) for place, row in enumerate(asked) for uid in dict.fromkeys(window.labels[row])]
    unknown = sorted({uid for _, uid in pairs if uid not in bundle.row_of})
    row_of = bundle.row_of | {uid: bundle.num_labels + i for i, uid in enumerate(unknown)}
    num_labels = bundle.num_labels + len(unknown)
    place, column = [pair[0] for pair in pairs], [row_of[uid] for _, uid in pairs]
    truth = sp.csr_matrix((np.ones(len(pairs), np.float32), (place, column)), shape=(len(asked), num_labels))
    truth.sort_indices()
    missing = share(sum(uid not in bundle.row_of for _, uid in pairs), len(pairs))
    if not asked:
        return {}, []
    texts = [window.texts[row] for row in asked]
    found = bundle.predict_arrays(texts, min(K, bundle.num_labels)).rows
    every = per_query(found, truth)
    errors = {name: float(values.std() / np.sqrt(len(values))) for name, values in every.items()}
    measured = evaluate(found, truth, np.ones(num_labels), np.zeros(num_labels, dtype=np.int64))
    kept = ("P@1", "P@3", "P@5", "nDCG@5", "R@10", "R@100", "MRR")
    metrics = {name: measured[name] for name in kept if name in measured}
    reference = bundle.info.metrics.get("validation", {})
    return metrics, compare_quality(reference, metrics, errors, missing, params.drift)


def _curves(profile: dict[str, Any], scores: np.ndarray) -> tuple[Sequence[float], Sequence[float]]:
    if not len(scores):
        return (), ()
    window = np.quantile(scores, np.linspace(0, 1, SCORE_QUANTILES))
    return profile["served"]["score_quantiles"], window.tolist()


def _verdict(judged: bool, drifted: list[Check], params: Params) -> str:
    if not judged:
        return f"not judged: fewer queries than drift.min_window ({params.drift.min_window})"
    return "drifted: " + "; ".join(check.name for check in drifted) if drifted else "no drift"


def _track(params: Params, result: dict[str, Any], folder: Path, name: str) -> str | None:
    """The report as a run of its own experiment; a server that is away gets it later."""
    tracker = Tracker(f"{params.tracking.experiment}-monitor")
    tags = {"drifted": str(result["drifted"]).lower(), "bundle.sha256": result["model"]["bundle_sha256"]}
    tracker.start(folder, {"queries": result["queries"], "bundle": result["model"]["source"]}, tags, run_name=name)
    figures = {f"drift/{finding['check']}": float(finding["value"]) for finding in result["findings"]}
    tracker.log_final(figures | {"drift/drifted": float(result["drifted"])})
    tracker.log_files([result["page"], result["result"]])
    tracker.finish()
    return tracker.url


def _short(*hashes: str) -> str:
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:8]
