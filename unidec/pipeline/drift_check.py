"""Drift: the data beside what the champion was trained on (stage `data_change`), any two versions of the data, and a
window of live queries (stage `monitor`).

Legend: n queries, D' width of the searched space.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from unidec.config import Params
from unidec.data.dataset import XMCDataset
from unidec.data.profile import Vocabulary, measure_texts, profile_dataset, share, spaced
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
from unidec.evaluation.metrics import by_query
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
_PAGE = "index.html"


@dataclass(frozen=True)
class _Reference:
    """The earlier side of a comparison: figures of its data, with what chance explains, and its tokenizer's folder."""

    figures: Mapping[str, Any]
    tokenizer: Path

    @classmethod
    def of_bundle(cls, bundle: Path, source: str) -> _Reference:
        profile = read_profile(bundle)
        if profile is None:
            fix = "unidec index build writes one"
            raise ArtifactError("a bundle without a profile of its data", where=source, fix=fix)
        return cls(profile, bundle / "model" / "tokenizer")

    @property
    def noise(self) -> Noise:
        return Noise(self.figures["noise"])

    def profile(self, dataset: XMCDataset) -> Mapping[str, Any]:
        """Figures of a later data set."""
        return profile_dataset(dataset, self.tokenizer, self.figures["max_length"], self.figures["text"]).figures

    def summary(self, texts: Sequence[str]) -> dict[str, Any]:
        """Figures of later queries."""
        vocabulary = Vocabulary.from_json(self.figures["vocabulary"])
        return measure_texts(texts, self.tokenizer, self.figures["max_length"], vocabulary).summary()


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
    accepted, reason = None, f"{model} has no champion yet: nothing to compare with"
    checks: list[Check] = []
    old: Mapping[str, Any] = {}
    new: Mapping[str, Any] = {}
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
            old, new = reference.figures, reference.profile(dataset)
            checks = compare_datasets(old, new, reference.noise, params.drift, _label_changes(bundle, dataset))
    report = DriftReport(
        title=f"Change of {dataset.name}", verdict=reason, judged=bool(checks), names=("accepted", "now"),
        checks=checks, old=old.get("queries", {}), new=new.get("queries", {}),
        labels=(old.get("labels", {}), new.get("labels", {})),
        facts={"accepted": accepted or "none", "now": {"dataset_sha256": dataset.sha256}},
        links=[("docs/index.html", "Data Docs of Great Expectations")] if checks else [],
    )  # fmt: skip
    result = _write_change(report, {"accepted": accepted, "reason": reason}, dataset.sha256)
    if result["stops"]:
        fix = "correct the source; or, if this is what the data is now, raise drift.stop_change or drift.stop_distance"
        got = "; ".join(result["stops"])
        raise DataError("the data changed more than it may", where=result["page"], got=got, fix=fix)
    return result


def _label_changes(bundle: Path, dataset: XMCDataset) -> dict[str, float]:
    """Share of the champion's labels that are gone, and of the data's that are new; by uid."""
    before = np.unique(read_labels(bundle, read_info(bundle).num_labels)["uid"].to_numpy().astype(str))
    now = np.unique(np.asarray(dataset.label_uids()).astype(str))
    kept = len(np.intersect1d(before, now, assume_unique=True))
    return {"left": 1 - kept / max(len(before), 1), "new": 1 - kept / max(len(now), 1)}


def _write_change(report: DriftReport, result: dict[str, Any], dataset_sha256: str) -> dict[str, Any]:
    """data/change: the verdict of Great Expectations on the report's checks, as result.json, page and Data Docs."""
    from unidec.validation.change_suite import run_change_suite

    checks = report.checks
    with swap_folder(paths.CHANGE) as folder:
        expectations = run_change_suite(checks, folder / "docs") if checks else []
        failed = {(r["severity"], r["key"]) for r in expectations if not r["success"]}
        stops = [check.words for check in checks if ("critical", check.key) in failed]
        warned = [check for check in checks if ("warning", check.key) in failed]
        warnings = [check.words for check in warned if ("critical", check.key) not in failed]
        verdict = report.verdict or "nothing changed more than it may"
        if stops or warnings:
            verdict = f"{len(stops or warnings)} of {len(checks)} figures {'stop a retraining' if stops else 'warn'}"
        result |= {"stops": stops, "warnings": warnings}
        stored = {"checks": [check.to_json() for check in checks], "expectations": expectations}
        write_json(folder / "result.json", result | {"dataset_sha256": dataset_sha256} | stored)
        (folder / _PAGE).write_text(render(replace(report, verdict=verdict)), encoding="utf-8")
    docs = str(paths.CHANGE / "docs" / _PAGE) if checks else ""
    return result | {"page": str(paths.CHANGE / _PAGE), "docs": docs}


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
    drifted = sum(check.state != "ok" for check in checks)
    verdict = f"{drifted} of {len(checks)} figures changed" if drifted else "nothing changed"
    report = DriftReport(
        title=f"Drift from {old['name']}", judged=True, names=("earlier", "later"), checks=checks, old=old["queries"],
        new=later, labels=labels, facts=facts, verdict=f"{verdict} more than it may",
    )  # fmt: skip
    return _write_report(out or paths.DRIFT / _hash(f"{first}\n{second}")[:12], report, {})


def _first_side(params: Params, source: str | os.PathLike[str]) -> _Reference:
    text = os.fspath(source)
    if text.startswith("models:") or (Path(text) / "bundle.json").is_file():
        return _Reference.of_bundle(fetch_bundle(text, paths.BUNDLES), text)
    tokenizer = resolve_encoder(params.encoder.name)
    profile = profile_dataset(XMCDataset.open(text), tokenizer, params.tokens.max_length, params.tokens.text)
    return _Reference(profile.figures | {"noise": text_noise(profile)}, tokenizer)


def _brief(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": figures["name"], "sha256": figures["sha256"], **figures["rows"]}


def _write_report(target: Path, report: DriftReport, more: dict[str, Any]) -> dict[str, Any]:
    """drift.json and index.html; the result: whether something drifted, the findings, `more`, and the files' paths."""
    findings = [check.to_json() for check in order(report.checks)]
    for finding in findings:
        finding["drifted"] &= report.judged
    result = {"drifted": any(finding["drifted"] for finding in findings), "findings": findings, **more}
    with swap_folder(target) as folder:
        write_json(folder / "drift.json", result)
        (folder / _PAGE).write_text(render(report), encoding="utf-8")
    return result | {"page": str(target / _PAGE), "result": str(target / "drift.json")}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# -- monitor ----------------------------------------------------------------------------------------------------------


def monitor(
    params: Params, queries_path: str, *, column: str | None = None, labels_column: str | None = None,
    bundle: str | None = None, out: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
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
    limits, source = params.drift, bundle or f"models:/{params.tracking.model_name}@champion"
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
    checks = compare_texts(profile, summary, reference.noise, limits)
    curves: tuple[Sequence[float], Sequence[float]] = ((), ())
    if profile["served"] is not None:
        vectors, scores = _answers(loaded, window.texts)
        answers = compare_served(profile["served"], vectors, scores, limits.low_score_quantile)
        checks += compare_answers(profile["served"], answers, len(scores), reference.noise, limits)
        quantiles = np.quantile(scores, np.linspace(0, 1, SCORE_QUANTILES))
        curves = (profile["served"]["score_quantiles"], quantiles.tolist())
    metrics = None
    if window.labels is not None:
        metrics, errors, unknown = _quality(loaded, window)
        if metrics:
            checks += compare_quality(loaded.info.metrics.get("validation", {}), metrics, errors, unknown, limits)
    drifted, judged = [check.name for check in order(checks) if check.state != "ok"], total >= limits.min_window
    verdict = f"drifted: {'; '.join(drifted)}" if drifted else "no drift"
    report = DriftReport(
        title=f"Window of {total:,} queries", judged=judged, names=("trained on", "window"), checks=checks,
        verdict=verdict if judged else f"not judged: fewer queries than drift.min_window ({limits.min_window})",
        old=profile["queries"], new=summary, scores=curves,
        facts={"queries": total, "looked at": len(window.texts), "bundle": loaded.sha256, "data set": profile["name"],
               "data set sha256": profile["sha256"], "metrics": metrics or {}},
    )  # fmt: skip
    model = {"source": source, "bundle_sha256": loaded.sha256}
    name = f"{Path(queries_path).name.partition('.')[0]}-{_hash(file_sha256(queries_path) + loaded.sha256)[:8]}"
    more = {"judged": judged, "queries": total, "model": model, "metrics": metrics}
    result = _write_report(out or paths.MONITOR / name, report, more)
    return result | {"run_url": _track(params, result, name)}


def _answers(bundle: Bundle, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Vectors in the searched space float32 [n, D'], and the best label's score float32 [n]."""
    vectors, scores = [], []
    for start in range(0, len(texts), BATCH):
        asked = bundle.encode(texts[start : start + BATCH])
        vectors.append(bundle.searched(asked.de_BD, asked.clf_BD))
        scores.append(bundle.rank(asked.de_BD, asked.clf_BD, 1, words_BF=asked.words_BF).scores[:, 0])
    return np.concatenate(vectors), np.concatenate(scores)


def _quality(bundle: Bundle, window: Window) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Metrics of the queries that have labels in percent ({}: none has), their standard errors, and the share of labels
    that the bundle does not know; such a label is missed."""
    asked = [(text, list(dict.fromkeys(uids))) for text, uids in zip(window.texts, window.labels or [], strict=True)]
    asked = [(text, uids) for text, uids in asked if uids]
    if not asked:
        return {}, {}, {}
    row_of = dict(bundle.row_of)
    place = [row for row, (_, uids) in enumerate(asked) for _ in uids]
    columns = [row_of.setdefault(uid, len(row_of)) for _, uids in asked for uid in uids]
    truth = sp.csr_matrix((np.ones(len(place), np.float32), (place, columns)), shape=(len(asked), len(row_of)))
    truth.sort_indices()
    missing = share(sum(column >= bundle.num_labels for column in columns), len(columns))
    found = bundle.predict_arrays([text for text, _ in asked], min(K, bundle.num_labels)).rows
    parts = by_query(found, truth, _METRICS, np.ones(len(row_of)))
    percent = {name: 100.0 * above_N / below_N.mean() for name, (above_N, below_N) in parts.items()}
    errors = {name: float(of.std() / np.sqrt(len(of))) for name, of in percent.items()}
    return {name: float(of.mean()) for name, of in percent.items()}, errors, missing


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
