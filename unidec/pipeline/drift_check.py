"""Drift: the data beside what the champion was trained on (stage `data_change`), any two versions of the data, and a
window of live queries (stage `monitor`). All three compare two sides by `unidec.evaluation.drift.compare`.

Legend: n queries, D' width of the searched space.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from unidec.config import Params
from unidec.data.dataset import XMCDataset
from unidec.data.profile import measure_texts, profile_dataset, share, spaced
from unidec.data.storage import MANIFEST, file_sha256, swap_folder, write_json
from unidec.errors import ArtifactError, DataError
from unidec.evaluation.drift import compare, served_facts
from unidec.evaluation.drift_page import DriftReport, render
from unidec.evaluation.metrics import by_query
from unidec.model.sources import resolve_encoder
from unidec.pipeline import paths
from unidec.pipeline.profile import read_profile
from unidec.retrieval.bundle import Bundle
from unidec.retrieval.bundle_folder import read_info, read_labels
from unidec.retrieval.text_file import Window, read_window
from unidec.tracking.fetch import fetch_bundle, find_alias
from unidec.tracking.run import Tracker

MAX_QUERIES = 20_000  # of a window; of a larger one this many evenly spaced ones are used
BATCH = 1024
K = 100
_METRICS = ("P@1", "P@3", "P@5", "nDCG@5", "R@10", "R@100", "MRR")
_PAGE = "index.html"
_TOKENIZER = Path("model", "tokenizer")  # in a bundle
Side = Mapping[str, Any]  # of a comparison, as `compare` takes it


def data_change(params: Params) -> dict[str, Any]:
    """The data set beside the profile of the data that the champion was trained on -> data/change.

    Great Expectations judges the figures.

    Returns:
        {"accepted": {"model", "version", "dataset_sha256"} or None, "reason": why nothing was compared, or "", "stops",
        "warnings": sentences, "page", "docs"}.

    Raises:
        DataError: something changed more than section `drift` allows.
        ArtifactError: the champion's bundle is damaged.
    """
    from unidec.validation.change_suite import run_change_suite

    model, dataset = params.tracking.model_name, paths.open_dataset()
    accepted, reason = None, f"{model} has no champion yet: nothing to compare with"
    old: Side = {}
    new: Side = {}
    if (champion := find_alias(model, "champion")) is not None:
        bundle = fetch_bundle(f"models:/{model}/{champion.version}", paths.BUNDLES)
        trained_on = str(read_info(bundle).dataset.get("sha256"))
        accepted = {"model": model, "version": str(champion.version), "dataset_sha256": trained_on}
        profile, reason = read_profile(bundle), ""
        if profile is None:
            reason = f"version {champion.version} of {model} has no profile that this code can read"
        elif profile["sha256"] == dataset.sha256:
            reason = "the data is the very data that the champion was trained on"
        else:
            old, (tokens, text) = profile, (profile["max_length"], profile["text"])
            new = profile_dataset(dataset, bundle / _TOKENIZER, tokens, text)
            new["label_changes"] = _label_changes(bundle, dataset)
    checks, docs = compare(old, new, params.drift) if old else [], "docs/index.html" if old else ""
    facts = {"accepted": accepted or "none", "now": {"dataset_sha256": dataset.sha256}}
    report = DriftReport(f"Change of {dataset.name}", ("accepted", "now"), checks, old, new, facts, reason, docs)
    with swap_folder(paths.CHANGE) as folder:
        expectations = run_change_suite(checks, folder / "docs") if checks else []
        stopped, warned = ({one["key"] for one in expectations if one["severity"] == severity and not one["success"]}
                           for severity in ("critical", "warning"))  # fmt: skip
        stops, warnings = (
            [check.words for check in checks if check.key in some] for some in (stopped, warned - stopped)
        )
        result = {"accepted": accepted, "reason": reason, "stops": stops, "warnings": warnings}
        stored = {"checks": [check.to_json() for check in checks], "expectations": expectations}
        write_json(folder / "result.json", result | {"dataset_sha256": dataset.sha256} | stored)
        (folder / _PAGE).write_text(render(report), encoding="utf-8")
    page = str(paths.CHANGE / _PAGE)
    if stops:
        fix = "correct the source; or, if this is what the data is now, raise drift.stop_change or drift.stop_distance"
        raise DataError("the data changed more than it may", where=page, got="; ".join(stops), fix=fix)
    return result | {"page": page, "docs": docs and str(paths.CHANGE / docs)}


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
    source, later = os.fspath(first), Path(second)
    if source.startswith("models:") or (Path(source) / "bundle.json").is_file():
        old, tokenizer = _of_bundle(fetch_bundle(source, paths.BUNDLES), source)
    else:
        tokenizer, tokens = resolve_encoder(params.encoder.name), params.tokens
        old = profile_dataset(XMCDataset.open(source), tokenizer, tokens.max_length, tokens.text)
    if (later / MANIFEST).is_file():
        new = profile_dataset(XMCDataset.open(later), tokenizer, old["max_length"], old["text"])
    else:
        new = _later_texts(old, tokenizer, read_window(later, column).texts)
    facts = {"earlier": source, "later": str(second), "earlier data": old["rows"], "later data": new.get("rows", {})}
    checks = compare(old, new, params.drift)
    report = DriftReport(f"Drift from {old['name']}", ("earlier", "later"), checks, old, new, facts)
    return _write_report(out or paths.DRIFT / _digest(first, second), report, {})


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
    source = bundle or f"models:/{params.tracking.model_name}@champion"
    folder = fetch_bundle(source, paths.BUNDLES)
    old, tokenizer = _of_bundle(folder, source)
    window = read_window(Path(queries_path), column, labels_column)
    total = len(window.texts)
    if not total:
        raise DataError("a window without queries", where=queries_path)
    window = window.sample(spaced(np.arange(total), MAX_QUERIES))
    loaded = Bundle.load(folder)
    new = _later_texts(old, tokenizer, window.texts)
    if old["served"] is not None:
        new["served"] = served_facts(*_answers(loaded, window.texts), old["served"]["score_edges"])
    metrics = None
    if window.labels is not None:
        new["metrics"], new["unknown_labels"] = _quality(loaded, window)
        metrics = {name: value for name, (value, _) in new["metrics"].items()}
    checks = compare({**old, "metrics": loaded.info.metrics.get("validation", {})}, new, params.drift)
    judged = total >= params.drift.min_window
    reason = "" if judged else f"not judged: fewer queries than drift.min_window ({params.drift.min_window})"
    facts = {"queries": total, "looked at": len(window.texts), "bundle": loaded.sha256, "data set": old["name"],
             "data set sha256": old["sha256"], "metrics": metrics or {}}  # fmt: skip
    sides = ("trained on", "window")
    report = DriftReport(f"Window of {total:,} queries", sides, checks, old, new, facts, reason)
    model = {"source": source, "bundle_sha256": loaded.sha256}
    name = f"{Path(queries_path).name.partition('.')[0]}-{_digest(file_sha256(queries_path), loaded.sha256)}"
    more = {"judged": judged, "queries": total, "model": model, "metrics": metrics}
    result = _write_report(out or paths.MONITOR / name, report, more)
    return result | {"run_url": _track(params, result, name)}


def _of_bundle(folder: Path, source: str) -> tuple[Side, Path]:
    """The profile in a bundle, and its tokenizer's folder."""
    if (profile := read_profile(folder)) is None:
        raise ArtifactError("a bundle without a profile of its data", where=source, fix="unidec index build writes one")
    return profile, folder / _TOKENIZER


def _later_texts(old: Side, tokenizer: Path, texts: Sequence[str]) -> dict[str, Any]:
    measured = measure_texts(texts, tokenizer, old["max_length"], old["vocabulary"])
    return {"queries": measured, "held_out": measured}


def _label_changes(bundle: Path, dataset: XMCDataset) -> dict[str, float]:
    """Share of the champion's labels that are gone, and of the data's that are new; by uid."""
    before = set(read_labels(bundle, read_info(bundle).num_labels)["uid"].to_pylist())
    now = set(dataset.label_uids())
    return {"left": len(before - now) / max(len(before), 1), "new": len(now - before) / max(len(now), 1)}


def _answers(bundle: Bundle, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Vectors in the searched space float32 [n, D'], and the best label's score float32 [n]."""
    vectors, scores = [], []
    for start in range(0, len(texts), BATCH):
        asked = bundle.encode(texts[start : start + BATCH])
        vectors.append(bundle.searched(asked.de_BD, asked.clf_BD))
        scores.append(bundle.rank(asked.de_BD, asked.clf_BD, 1, words_BF=asked.words_BF).scores[:, 0])
    return np.concatenate(vectors), np.concatenate(scores)


def _quality(bundle: Bundle, window: Window) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
    """Metrics in percent with their standard errors, of the queries that have labels ({}: none has), and the share of
    labels that the bundle does not know; such a label is missed."""
    asked = [(text, set(uids)) for text, uids in zip(window.texts, window.labels or [], strict=True) if uids]
    row_of, place = dict(bundle.row_of), [row for row, (_, uids) in enumerate(asked) for _ in uids]
    columns = [row_of.setdefault(uid, len(row_of)) for _, uids in asked for uid in uids]
    unknown = share(sum(column >= bundle.num_labels for column in columns), len(columns))
    if not asked:
        return {}, unknown
    truth = sp.csr_matrix((np.ones(len(place), np.float32), (place, columns)), shape=(len(asked), len(row_of)))
    found = bundle.predict_arrays([text for text, _ in asked], min(K, bundle.num_labels)).rows
    parts = by_query(found, truth, _METRICS, np.ones(len(row_of)))
    percent = {name: 100.0 * above_N / below_N.mean() for name, (above_N, below_N) in parts.items()}
    return {name: (float(of.mean()), float(of.std() / np.sqrt(len(of)))) for name, of in percent.items()}, unknown


def _write_report(target: Path, report: DriftReport, more: dict[str, Any]) -> dict[str, Any]:
    """drift.json and index.html; the result: whether something drifted, the findings, `more`, and the files' paths."""
    findings = [check.to_json() | {"drifted": check.state != "ok" and not report.reason} for check in report.checks]
    result = {"drifted": any(finding["drifted"] for finding in findings), "findings": findings, **more}
    with swap_folder(target) as folder:
        write_json(folder / "drift.json", result)
        (folder / _PAGE).write_text(render(report), encoding="utf-8")
    return result | {"page": str(target / _PAGE), "result": str(target / "drift.json")}


def _digest(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:12]


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
