"""Drift: the data beside what the champion was trained on (stage `data_change`), any two versions of the data, and a
window of live queries (stage `monitor`).

Legend: n queries, D' width of the searched space.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from unidec.config import Params
from unidec.data.dataset import XMCDataset
from unidec.data.profile import TextMeter, Vocabulary, profile_dataset, share, spaced
from unidec.data.storage import MANIFEST, file_sha256, swap_folder, write_json
from unidec.errors import ArtifactError, DataError
from unidec.evaluation.drift import SCORE_QUANTILES, Noise, compare_served, text_noise
from unidec.evaluation.drift_checks import (
    Check,
    compare_answers,
    compare_datasets,
    compare_quality,
    compare_texts,
    order,
)
from unidec.evaluation.drift_page import DriftReport, render
from unidec.evaluation.metrics import evaluate, per_query
from unidec.model.sources import resolve_encoder
from unidec.pipeline import paths
from unidec.pipeline.profile import read_profile
from unidec.retrieval.bundle import Bundle
from unidec.retrieval.bundle_folder import read_info, read_labels
from unidec.retrieval.window import Window, read_window
from unidec.tracking.fetch import fetch_bundle, find_alias
from unidec.tracking.run import Tracker

MAX_QUERIES = 20_000  # of a window; of a larger one this many evenly spaced ones are used
BATCH = 1024
K = 100
_METRICS = ("P@1", "P@3", "P@5", "nDCG@5", "R@10", "R@100", "MRR")


@dataclass(frozen=True)
class _Reference:
    """The earlier side of a comparison: figures of its data, what chance explains, and its tokenizer's folder."""

    figures: Mapping[str, Any]
    noise: Noise
    tokenizer: Path

    @classmethod
    def of_bundle(cls, bundle: Path, source: str) -> _Reference:
        profile = read_profile(bundle)
        if profile is None:
            fix = "unidec index build writes one"
            raise ArtifactError("a bundle without a profile of its data", where=source, fix=fix)
        return cls(profile, Noise(profile["noise"]), bundle / "model" / "tokenizer")

    def profile(self, dataset: XMCDataset) -> Mapping[str, Any]:
        """Figures of a later data set."""
        return profile_dataset(dataset, self.tokenizer, self.figures["max_length"], self.figures["text"]).figures

    def summary(self, texts: Sequence[str]) -> dict[str, Any]:
        """Figures of later queries."""
        vocabulary = Vocabulary.from_json(self.figures["vocabulary"])
        return TextMeter(self.tokenizer, self.figures["max_length"], vocabulary).measure(texts).summary()


# -- data_change ------------------------------------------------------------------------------------------------------


def data_change(params: Params) -> dict[str, Any]:
    """The data set beside the profile of the data that the champion was trained on -> data/change.

    Returns:
        {"accepted": {"model", "version", "dataset_sha256"} or None, "reason": why nothing was compared, or "", "stops",
        "warnings": sentences, "page", "docs"}.

    Raises:
        DataError: something changed more than section `drift` allows.
        ArtifactError: the champion's bundle is damaged.
    """
    model, dataset = params.tracking.model_name, paths.open_dataset()
    version = find_alias(model, "champion")
    accepted, reference, reason = None, None, f"{model} has no champion yet: nothing to compare with"
    if version is not None:
        bundle = fetch_bundle(f"models:/{model}/{version.version}", paths.BUNDLES)
        trained_on = str(read_info(bundle).dataset.get("sha256"))
        accepted = {"model": model, "version": str(version.version), "dataset_sha256": trained_on}
        profile, reason = read_profile(bundle), ""
        if profile is None:
            reason = f"version {version.version} of {model} has no profile that this code can read"
        elif profile["sha256"] == dataset.sha256:
            reason = "the data is the very data that the champion was trained on"
        else:
            reference = _Reference.of_bundle(bundle, str(bundle))
    checks: list[Check] = []
    old: Mapping[str, Any] = {}
    new: Mapping[str, Any] = {}
    if reference is not None:
        old, new = reference.figures, reference.profile(dataset)
        checks = compare_datasets(old, new, reference.noise, params.drift, _label_changes(bundle, dataset))
    result = _write_change(accepted, reason, checks, (old, new), dataset)
    if result["stops"]:
        raise DataError(
            "the data changed more than it may", where=result["page"], got="; ".join(result["stops"]),
            fix="correct the source; or, if this is what the data is now, raise drift.stop_change or "
            "drift.stop_distance",
        )  # fmt: skip
    return result


def _label_changes(bundle: Path, dataset: XMCDataset) -> dict[str, float]:
    """Share of the champion's labels that are gone, and of the data's that are new; by uid."""
    before = np.unique(read_labels(bundle, read_info(bundle).num_labels)["uid"].to_numpy().astype(str))
    now = np.unique(np.asarray(dataset.label_uids()).astype(str))
    kept = len(np.intersect1d(before, now, assume_unique=True))
    return {"left": 1 - kept / max(len(before), 1), "new": 1 - kept / max(len(now), 1)}


def _write_change(
    accepted: dict[str, str] | None, reason: str, checks: list[Check],
    figures: tuple[Mapping[str, Any], Mapping[str, Any]], dataset: XMCDataset,
) -> dict[str, Any]:  # fmt: skip
    """data/change: the verdict of Great Expectations on the checks, as result.json, page and Data Docs."""
    from unidec.validation.change_suite import run_change_suite

    words = {check.key: check.words for check in checks}
    with swap_folder(paths.CHANGE) as folder:
        results = run_change_suite(checks, folder / "docs") if checks else []
        critical, warned = (
            [r["key"] for r in results if not r["success"] and r["severity"] == level]
            for level in ("critical", "warning")
        )
        stops, warnings = [words[key] for key in critical], [words[key] for key in warned if key not in critical]
        verdict = reason or "nothing changed more than it may"
        if stops or warnings:
            found, does = (stops, "stop a retraining") if stops else (warnings, "warn")
            verdict = f"{len(found)} of {len(checks)} figures {does}"
        write_json(
            folder / "result.json",
            {"accepted": accepted, "reason": reason, "dataset_sha256": dataset.sha256, "stops": stops,
             "warnings": warnings, "checks": [check.to_json() for check in checks], "expectations": results},
        )  # fmt: skip
        old, new = figures
        report = DriftReport(
            title=f"Change of {dataset.name}", verdict=verdict, judged=bool(checks), names=("accepted", "now"),
            checks=checks, old=old.get("queries", {}), new=new.get("queries", {}),
            labels=(old.get("labels", {}), new.get("labels", {})),
            facts={"accepted": accepted or "none", "now": {"dataset_sha256": dataset.sha256}},
            links=[("docs/index.html", "Data Docs of Great Expectations")] if checks else [],
        )  # fmt: skip
        (folder / "index.html").write_text(render(report), encoding="utf-8")
    return {
        "accepted": accepted, "reason": reason, "stops": stops, "warnings": warnings,
        "page": str(paths.CHANGE / "index.html"),
        "docs": str(paths.CHANGE / "docs" / "index.html") if checks else "",
    }  # fmt: skip


# -- drift ------------------------------------------------------------------------------------------------------------


def drift(
    params: Params, first: str | os.PathLike[str], second: str | os.PathLike[str], out: Path | None = None,
    column: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A later version of the data, or a file of queries, beside an earlier version.

    Args:
        first: a data set's folder, or a bundle (folder or models:/ address): the data that it was trained on.
        second: a data set's folder, or a file of queries; their text is in `column`, or "query" or "text".
        out: folder for drift.json and index.html; default: below runs/drift/.

    Returns:
        {"drifted", "findings" (as `Check.to_json`, what drifted first), "page", "result"}.

    Raises:
        DataError, ArtifactError: something that is neither, or that cannot be read.
    """
    reference = _first_side(params, first)
    old = reference.figures
    labels: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    facts: dict[str, Any] = {"earlier": str(first), "later": str(second), "earlier data": _brief(old)}
    if (Path(second) / MANIFEST).is_file():
        new = reference.profile(XMCDataset.open(second))
        checks, later = compare_datasets(old, new, reference.noise, params.drift), new["queries"]
        labels, facts["later data"] = (old["labels"], new["labels"]), _brief(new)
    else:
        later = reference.summary(read_window(Path(second), column).texts)
        checks, facts["later queries"] = compare_texts(old, later, reference.noise, params.drift), later["count"]
    findings = order(checks)
    drifted = sum(check.state != "ok" for check in findings)
    verdict = f"{drifted} of {len(findings)} figures changed" if drifted else "nothing changed"
    report = DriftReport(
        title=f"Drift from {old['name']}", judged=True, names=("earlier", "later"), checks=findings, old=old["queries"],
        new=later, labels=labels, facts=facts, verdict=f"{verdict} more than it may",
    )  # fmt: skip
    result = {"drifted": bool(drifted), "findings": [check.to_json() for check in findings]}
    return _write_report(out or paths.DRIFT / _hash(f"{first}\n{second}")[:12], report, result)


def _first_side(params: Params, source: str | os.PathLike[str]) -> _Reference:
    text = os.fspath(source)
    if text.startswith("models:") or (Path(text) / "bundle.json").is_file():
        return _Reference.of_bundle(fetch_bundle(text, paths.BUNDLES), text)
    tokenizer = resolve_encoder(params.encoder.name)
    profile = profile_dataset(XMCDataset.open(text), tokenizer, params.tokens.max_length, params.tokens.text)
    return _Reference(profile.figures, Noise(text_noise(profile)), tokenizer)


def _brief(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": figures["name"], "sha256": figures["sha256"], **figures["rows"]}


def _write_report(target: Path, report: DriftReport, result: dict[str, Any]) -> dict[str, Any]:
    """drift.json and index.html; the result with their paths."""
    with swap_folder(target) as folder:
        write_json(folder / "drift.json", result)
        (folder / "index.html").write_text(render(report), encoding="utf-8")
    return result | {"page": str(target / "index.html"), "result": str(target / "drift.json")}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# -- monitor ----------------------------------------------------------------------------------------------------------


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
    reference = _Reference.of_bundle(folder, source)
    profile = reference.figures
    window = read_window(Path(queries_path), column, labels_column)
    total = len(window.texts)
    if not total:
        raise DataError("a window without queries", where=queries_path)
    window = window.sample(spaced(np.arange(total), MAX_QUERIES))
    loaded = Bundle.load(folder)
    summary = reference.summary(window.texts)
    checks = compare_texts(profile, summary, reference.noise, params.drift)
    curves: tuple[Sequence[float], Sequence[float]] = ((), ())
    if profile["served"] is not None:
        vectors, scores = _answers(loaded, window.texts)
        answers = compare_served(profile["served"], vectors, scores, params.drift.low_score_quantile)
        checks += compare_answers(profile["served"], answers, len(scores), reference.noise, params.drift)
        quantiles = np.quantile(scores, np.linspace(0, 1, SCORE_QUANTILES))
        curves = (profile["served"]["score_quantiles"], quantiles.tolist())
    metrics = None
    if window.labels is not None:
        metrics, quality = _quality(loaded, window, params)
        checks += quality
    judged, findings = total >= params.drift.min_window, order(checks)
    drifted = [check for check in findings if check.state != "ok"] if judged else []
    verdict = "drifted: " + "; ".join(check.name for check in drifted) if drifted else "no drift"
    if not judged:
        verdict = f"not judged: fewer queries than drift.min_window ({params.drift.min_window})"
    result: dict[str, Any] = {
        "drifted": bool(drifted), "judged": judged,
        "findings": [check.to_json() | {"drifted": check in drifted} for check in findings],
        "queries": total, "model": {"source": source, "bundle_sha256": loaded.sha256}, "metrics": metrics,
    }  # fmt: skip
    report = DriftReport(
        title=f"Window of {total:,} queries", verdict=verdict, judged=judged, names=("trained on", "window"),
        checks=findings, old=profile["queries"], new=summary, scores=curves,
        facts={"queries": total, "looked at": len(window.texts), "bundle": loaded.sha256, "data set": profile["name"],
               "data set sha256": profile["sha256"], "metrics": metrics or {}},
    )  # fmt: skip
    name = f"{Path(queries_path).name.partition('.')[0]}-{_hash(file_sha256(queries_path) + loaded.sha256)[:8]}"
    result = _write_report(out or paths.MONITOR / name, report, result)
    return result | {"run_url": _track(params, result, name)}


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
    asked = [(text, list(dict.fromkeys(uids))) for text, uids in zip(window.texts, window.labels or [], strict=True)]
    texts, right = [text for text, uids in asked if uids], [uids for _, uids in asked if uids]
    if not texts:
        return {}, []
    row_of = dict(bundle.row_of)
    place, columns = [], []
    for row, uids in enumerate(right):
        place += [row] * len(uids)
        columns += [row_of.setdefault(uid, len(row_of)) for uid in uids]
    truth = sp.csr_matrix((np.ones(len(place), np.float32), (place, columns)), shape=(len(texts), len(row_of)))
    truth.sort_indices()
    missing = share(sum(column >= bundle.num_labels for column in columns), len(columns))
    found = bundle.predict_arrays(texts, min(K, bundle.num_labels)).rows
    errors = {name: float(of.std() / np.sqrt(len(of))) for name, of in per_query(found, truth).items()}
    measured = evaluate(found, truth, np.ones(len(row_of)), np.zeros(len(row_of), dtype=np.int64))
    metrics = {name: measured[name] for name in _METRICS if name in measured}
    reference = bundle.info.metrics.get("validation", {})
    return metrics, compare_quality(reference, metrics, errors, missing, params.drift)


def _track(params: Params, result: dict[str, Any], name: str) -> str | None:
    """The report as a run of its own experiment; a server that is away gets it later."""
    tracker = Tracker(f"{params.tracking.experiment}-monitor")
    tags = {"drifted": str(result["drifted"]).lower(), "bundle.sha256": result["model"]["bundle_sha256"]}
    facts = {"queries": result["queries"], "bundle": result["model"]["source"]}
    tracker.start(Path(result["page"]).parent, facts, tags, run_name=name)
    figures = {f"drift/{finding['check']}": float(finding["value"]) for finding in result["findings"]}
    tracker.log_final(figures | {"drift/drifted": float(result["drifted"])})
    tracker.log_files([result["page"], result["result"]])
    tracker.finish()
    return tracker.url
