"""Stage `data_change`: is the data still what the champion was trained on? And any two versions beside each other."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from unidec.config import Params
from unidec.data.dataset import XMCDataset
from unidec.data.profile import DatasetProfile, TextMeter, Vocabulary, profile_dataset
from unidec.data.storage import MANIFEST, swap_folder, write_json
from unidec.errors import ArtifactError, DataError
from unidec.evaluation.drift import Noise, text_noise
from unidec.evaluation.drift_checks import Check, compare_datasets, compare_texts, order
from unidec.evaluation.drift_page import DriftReport, render
from unidec.model.sources import resolve_encoder
from unidec.pipeline import paths
from unidec.pipeline.profile import read_profile
from unidec.retrieval.bundle_folder import read_info, read_labels
from unidec.retrieval.window import read_window
from unidec.tracking.fetch import fetch_bundle, find_alias

TOKENIZER = Path("model") / "tokenizer"  # in a bundle


def data_change(params: Params) -> dict[str, Any]:
    """The data set beside the profile of the data that the champion was trained on -> data/change.

    Returns:
        {"accepted": {"model", "version", "dataset_sha256"} or None, "reason": why nothing was compared, or "", "stops",
        "warnings": sentences, "page", "docs"}.

    Raises:
        DataError: something changed more than section `drift` allows.
        ArtifactError: the champion's bundle is damaged.
    """
    model = params.tracking.model_name
    version = find_alias(model, "champion")
    accepted, profile, reason = None, None, f"{model} has no champion yet: nothing to compare with"
    if version is not None:
        bundle = fetch_bundle(f"models:/{model}/{version.version}", paths.BUNDLES)
        profile, dataset_sha256 = read_profile(bundle), str(read_info(bundle).dataset.get("sha256"))
        accepted = {"model": model, "version": str(version.version), "dataset_sha256": dataset_sha256}
        reason = "" if profile else f"version {version.version} of {model} carries no profile that this code can read"
    dataset = paths.open_dataset()
    if profile is not None and profile["sha256"] == dataset.sha256:
        reason = "the data is the very data that the champion was trained on"
    checks: list[Check] = []
    new: Mapping[str, Any] = {}
    if profile is not None and not reason:
        new = profile_dataset(dataset, bundle / TOKENIZER, profile["max_length"], profile["text"]).figures
        labels = _label_changes(bundle, dataset)
        checks = compare_datasets(profile, new, Noise(profile["noise"]), params.drift, labels)
    result = _write_change(accepted, reason, checks, profile or {}, new, dataset)
    if result["stops"]:
        raise DataError(
            "the data changed more than it may",
            where=result["page"],
            got="; ".join(result["stops"]),
            fix="mend the source; or, if this is what the data is now, raise drift.stop_change or drift.stop_distance",
        )
    return result


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
    old, noise, tokenizer = _first_side(params, first)
    facts: dict[str, Any] = {"earlier": str(first), "later": str(second)}
    labels: tuple[Any, Any] = ({}, {})
    target = out or paths.DRIFT / _name(str(first), str(second))
    if (Path(second) / MANIFEST).is_file():
        dataset = XMCDataset.open(second)
        new = profile_dataset(dataset, tokenizer, old["max_length"], old["text"]).figures
        checks, later = compare_datasets(old, new, noise, params.drift), new["queries"]
        labels = (old["labels"], new["labels"])
        facts |= {"earlier data": _brief(old), "later data": _brief(new)}
    else:
        vocabulary = Vocabulary.from_json(old["vocabulary"])
        later = TextMeter(tokenizer, old["max_length"], vocabulary).measure(read_window(Path(second), column).texts)
        later = later.summary()
        checks = compare_texts(old, later, noise, params.drift)
        facts |= {"earlier data": _brief(old), "later queries": later["count"]}
    findings = order(checks)
    drifted = [check.words for check in findings if check.state != "ok"]
    report = DriftReport(
        title=f"Drift from {old['name']}", judged=True, names=("earlier", "later"), checks=findings, old=old["queries"],
        new=later, labels=labels, facts=facts,
        verdict=f"{len(drifted)} of {len(findings)} figures changed more than they may"
        if drifted else "nothing changed more than it may",
    )  # fmt: skip
    result = {"drifted": bool(drifted), "findings": [check.to_json() for check in findings]}
    return write_report(target, report, result)


def write_report(target: Path, report: DriftReport, result: dict[str, Any]) -> dict[str, Any]:
    """drift.json and index.html; the result with their paths."""
    with swap_folder(target) as folder:
        write_json(folder / "drift.json", result)
        (folder / "index.html").write_text(render(report), encoding="utf-8")
    return result | {"page": str(target / "index.html"), "result": str(target / "drift.json")}


def _first_side(params: Params, source: str | os.PathLike[str]) -> tuple[dict[str, Any], Noise, Path]:
    """Figures, noise and tokenizer of the earlier side."""
    text = os.fspath(source)
    if text.startswith("models:") or (Path(text) / "bundle.json").is_file():
        bundle = fetch_bundle(text, paths.BUNDLES)
        profile = read_profile(bundle)
        if profile is None:
            raise ArtifactError(
                "a bundle without a profile of its data", where=text, fix="unidec index build writes one"
            )
        return profile, Noise(profile["noise"]), bundle / TOKENIZER
    dataset = XMCDataset.open(text)
    tokenizer = resolve_encoder(params.encoder.name)
    made: DatasetProfile = profile_dataset(dataset, tokenizer, params.tokens.max_length, params.tokens.text)
    return made.figures, Noise(text_noise(made)), tokenizer


def _label_changes(bundle: Path, dataset: XMCDataset) -> dict[str, float]:
    """Share of the champion's labels that are gone, and of the data's that are new; by uid."""
    before = np.unique(read_labels(bundle, read_info(bundle).num_labels)["uid"].to_numpy().astype(str))
    now = np.unique(np.asarray(dataset.label_uids()).astype(str))
    kept = len(np.intersect1d(before, now, assume_unique=True))
    return {"left": 1 - kept / max(len(before), 1), "new": 1 - kept / max(len(now), 1)}


def _write_change(
    accepted: dict[str, str] | None, reason: str, checks: list[Check], old: Mapping[str, Any], new: Mapping[str, Any],
    dataset: XMCDataset,
) -> dict[str, Any]:  # fmt: skip
    """data/change: what Great Expectations says of the checks, as result.json, page and Data Docs."""
    from unidec.validation.change_suite import run_change_suite

    words = {check.key: check.words for check in checks}
    with swap_folder(paths.CHANGE) as folder:
        results = run_change_suite(checks, folder / "docs") if checks else []
        failed = {level: [r["key"] for r in results if not r["success"] and r["severity"] == level]
                  for level in ("critical", "warning")}  # fmt: skip
        stops = [words[key] for key in failed["critical"]]
        warnings = [words[key] for key in failed["warning"] if key not in failed["critical"]]
        verdict = reason or (
            f"{len(stops)} of {len(checks)} figures stop a retraining" if stops
            else f"{len(warnings)} of {len(checks)} figures warn" if warnings
            else "nothing changed more than it may"
        )  # fmt: skip
        write_json(
            folder / "result.json",
            {"accepted": accepted, "reason": reason, "dataset_sha256": dataset.sha256, "stops": stops,
             "warnings": warnings, "checks": [check.to_json() for check in checks], "expectations": results},
        )  # fmt: skip
        report = DriftReport(
            title=f"Change of {dataset.name}", verdict=verdict, judged=bool(checks), names=("accepted", "now"),
            checks=checks, old=old.get("queries", {}) if new else {}, new=new.get("queries", {}),
            labels=(old.get("labels", {}) if new else {}, new.get("labels", {})),
            facts={"accepted": accepted or "none", "now": {"dataset_sha256": dataset.sha256}},
            links=[("docs/index.html", "Data Docs of Great Expectations")] if checks else [],
        )  # fmt: skip
        (folder / "index.html").write_text(render(report), encoding="utf-8")
    docs = str(paths.CHANGE / "docs" / "index.html") if checks else ""
    return {
        "accepted": accepted, "reason": reason, "stops": stops, "warnings": warnings,
        "page": str(paths.CHANGE / "index.html"), "docs": docs,
    }  # fmt: skip


def _brief(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": figures["name"], "sha256": figures["sha256"], **figures["rows"]}


def _name(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
