"""Drift of the data against the champion's training data (`data_change`), between any two versions
of the data (`drift`), and of a window of live queries (`monitor`). All three use
`unidec.evaluation.drift.compare`.

Legend: n queries, D' width of the searched space.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from unidec.bundle.bundle import Bundle
from unidec.bundle.bundle_folder import read_info, read_labels
from unidec.bundle.text_file import Window, read_window
from unidec.config import Params
from unidec.data.chunks import blocks
from unidec.data.dataset import XMCDataset
from unidec.data.profile import (
    PROFILE_KEY,
    VERSION,
    measure_texts,
    profile_dataset,
    share,
    spaced,
)
from unidec.data.storage import MANIFEST, file_sha256, swap_folder, text_sha256
from unidec.errors import ArtifactError, DataError
from unidec.evaluation.drift import Check, compare, not_judged, served_facts
from unidec.evaluation.metrics import by_query
from unidec.metric_names import shown
from unidec.model.sources import resolve_encoder
from unidec.pipeline import paths
from unidec.pipeline.drift_page import FINDINGS, PAGE, Comparison, Side
from unidec.tracking.fetch import fetch_bundle, find_alias
from unidec.tracking.run import Tracker

MAX_QUERIES = 20_000  # larger windows are reduced to this many evenly spaced queries
BATCH = 1024
K = 100
_TOKENIZER = Path("model", "tokenizer")  # in a bundle


@dataclass(frozen=True)
class DataChange:
    """The data set compared with the champion's training data.

    Attributes:
        accepted: the champion's "model", "version" and "dataset_sha256"; None without a champion.
        reason: why nothing was compared, or "".
        stops, warnings: a sentence for each change beyond the limits of section `drift`.
        page: path of the report.
    """

    accepted: dict[str, str] | None
    reason: str
    stops: list[str]
    warnings: list[str]
    page: str


@dataclass(frozen=True)
class DataDrift:
    """Two versions of the data compared.

    Attributes:
        findings: results of `Check.to_json`, drifted ones first.
        judged: False for a file with fewer queries than drift.min_window: no drift is then
            reported, and `reason` says why.
        page, result: paths of the report and of its JSON file.
    """

    drifted: bool
    findings: list[dict[str, object]]
    judged: bool
    reason: str
    page: str
    result: str


@dataclass(frozen=True)
class WindowDrift(DataDrift):
    """A window of queries compared with a bundle's training data.

    Attributes:
        queries: number of queries in the whole window. metrics: in percent; None without labels.
        model: "source" and "bundle_sha256" of the bundle. run_url: page of the MLflow run.
    """

    queries: int
    metrics: dict[str, float] | None
    model: dict[str, str]
    run_url: str | None


def read_profile(bundle: Path) -> Side | None:
    """The training profile in a bundle; None if there is none, or its version differs."""
    profile = read_info(bundle).card.get(PROFILE_KEY)
    return profile if isinstance(profile, dict) and profile.get("version") == VERSION else None


def data_change(params: Params) -> DataChange:
    """Compare the data set with the profile of the champion's training data; writes data/change.

    Raises:
        DataError: a figure changed by more than section `drift` allows.
        ArtifactError: the champion's bundle is damaged.
    """
    dataset = paths.open_dataset()
    accepted, reason, bundle = _accepted(params, dataset)
    old: Side = {}
    new: Side = {}
    checks: list[Check] = []
    if bundle is not None:
        old, tokenizer = _of_bundle(bundle, str(bundle))
        new = _figures(old, tokenizer, dataset) | {"label_changes": _label_changes(bundle, dataset)}
        checks = compare(old, new, params.drift)
    found = Comparison(
        title=f"Change of {dataset.name}",
        names=("accepted", "now"),
        old=old,
        new=new,
        checks=checks,
        reason=reason,
        facts={"accepted": accepted or "none", "now": {"dataset_sha256": dataset.sha256}},
    )
    page = _written(found, paths.CHANGE)["page"]
    stops = [check.words for check in checks if check.state == "stop"]
    if stops:
        raise DataError(
            "the data changed beyond the limits",
            where=page,
            got="; ".join(stops),
            fix="correct the source; or, if this is what the data is now, raise drift.stop",
        )
    warnings = [check.words for check in checks if check.state == "warning"]
    return DataChange(accepted, reason, stops, warnings, page)


def _accepted(
    params: Params, dataset: XMCDataset
) -> tuple[dict[str, str] | None, str, Path | None]:
    """`DataChange.accepted` and `.reason`, and the champion's bundle if there is something to
    compare.
    """
    model = params.tracking.model_name
    champion = find_alias(model, "champion")
    if champion is None:
        return None, f"{model} has no champion yet: nothing to compare with", None
    version = str(champion.version)
    sha256 = dataset.sha256
    accepted = {"model": model, "version": version, "dataset_sha256": sha256}
    same = "the champion was trained on this very data"
    tags = champion.tags
    # after a label refresh, the tag names the data of the labels, not that of the training
    if tags.get("dataset.sha256") == sha256 and tags.get("start.kind") != "refresh":
        return accepted, same, None  # without fetching the bundle
    bundle = fetch_bundle(f"models:/{model}/{version}")
    accepted["dataset_sha256"] = str(read_info(bundle).dataset.get("sha256"))
    profile = read_profile(bundle)
    if profile is None:
        return accepted, f"version {version} of {model} has no profile of this version", None
    if profile["sha256"] == sha256:
        return accepted, same, None
    return accepted, "", bundle


def _label_changes(bundle: Path, dataset: XMCDataset) -> dict[str, float]:
    """Shares of the champion's labels that are gone, and of the data set's that are new."""
    before = set(read_labels(bundle, read_info(bundle).num_labels)["uid"].to_pylist())
    now = set(dataset.label_uids())
    return {
        "left": len(before - now) / max(len(before), 1),
        "new": len(now - before) / max(len(now), 1),
    }


def drift(
    params: Params,
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    column: str | None = None,
) -> DataDrift:
    """Compare a later version of the data, or a file of queries, with an earlier version; writes to
    a folder in runs/drift.

    Args:
        first: a data set's folder, or a bundle (folder or models:/ address), that is: its
        training data.
        second: a data set's folder, or a file of queries, whose texts are in `column` (default:
        "query" or "text").

    Raises:
        DataError, ArtifactError: `first` or `second` cannot be read, or is of another kind.
    """
    source = os.fspath(first)
    later = Path(second)
    if source.startswith("models:") or (Path(source) / "bundle.json").is_file():
        old, tokenizer = _of_bundle(fetch_bundle(source), source)
    else:
        tokenizer = resolve_encoder(params.encoder.name)
        read = {"max_length": params.tokens.max_length, "text": params.tokens.text}
        old = _figures(read, tokenizer, XMCDataset.open(source))
    if (later / MANIFEST).is_file():
        new = _figures(old, tokenizer, XMCDataset.open(later))
    else:
        new = _figures(old, tokenizer, read_window(later, column, params.raw).texts)
    found = Comparison(
        title=f"Drift from {old['name']}",
        names=("earlier", "later"),
        old=old,
        new=new,
        checks=compare(old, new, params.drift),
        reason=not_judged(new.get("count"), params.drift),
        facts={
            "earlier": source,
            "later": str(second),
            "earlier data": old["rows"],
            "later data": new.get("rows", {}),
        },
    )
    return DataDrift(**_written(found, paths.DRIFT / _digest(first, second)))


def monitor(
    params: Params, queries_path: str, *, column: str | None = None, bundle: str | None = None
) -> WindowDrift:
    """Compare a file of queries with the training profile in a bundle; if the file has labels, also
    measure metrics.

    Writes a folder of runs/monitor, and an MLflow run.

    Args:
        queries_path, column: see `read_window`.
        bundle: folder or models:/ address; default: the champion.

    Raises:
        ConfigError: no such model. DataError: the file cannot be read, or has no queries.
            ArtifactError: the bundle has no profile.
    """
    source = bundle or f"models:/{params.tracking.model_name}@champion"
    folder = fetch_bundle(source)
    old, tokenizer = _of_bundle(folder, source)
    window = read_window(Path(queries_path), column, params.raw)
    total = len(window.texts)
    if not total:
        raise DataError(
            "the window has no queries", where=queries_path, expected="a row for each query"
        )
    window = window.sample(spaced(np.arange(total), MAX_QUERIES))
    loaded = Bundle.load(folder)
    new = _figures(old, tokenizer, window.texts)
    metrics = None
    new["count"] = total
    if old["served"] is not None:
        new["served"] = served_facts(*_answers(loaded, window.texts), old["served"]["score_edges"])
    if window.labels is not None:
        new["metrics"], new["unknown_labels"], new["labelled"] = _quality(loaded, window)
        metrics = {name: value for name, (value, _) in new["metrics"].items()}
    old = {**old, "metrics": loaded.info.metrics.get("validation", {})}
    model = {"source": source, "bundle_sha256": loaded.sha256}
    found = Comparison(
        title=f"Window of {total:,} queries",
        names=("trained on", "window"),
        old=old,
        new=new,
        checks=compare(old, new, params.drift),
        reason=not_judged(total, params.drift),
        facts={
            "queries": total,
            "looked at": len(window.texts),
            "bundle": loaded.sha256,
            "data set": old["name"],
            "data set sha256": old["sha256"],
            "metrics": metrics or {},
        },
    )
    stem = Path(queries_path).name.partition(".")[0]
    out = paths.MONITOR / f"{stem}-{_digest(file_sha256(queries_path), loaded.sha256)}"
    return WindowDrift(
        **_written(found, out),
        queries=total,
        metrics=metrics,
        model=model,
        run_url=_track(params, found, out, model),
    )


def _written(found: Comparison, out: Path) -> dict[str, Any]:
    """Write a comparison to the folder `out`; returns the fields of a `DataDrift`."""
    with swap_folder(out) as folder:
        facts = found.write(folder)
    return {**facts, "page": str(out / PAGE), "result": str(out / FINDINGS)}


def _of_bundle(folder: Path, source: str) -> tuple[Side, Path]:
    """The profile in a bundle, and its tokenizer's folder; an ArtifactError if it has
    no profile.
    """
    if (profile := read_profile(folder)) is None:
        raise ArtifactError(
            "the bundle has no profile of its training data",
            where=source,
            fix="`unidec index build` writes one",
        )
    return profile, folder / _TOKENIZER


def _figures(old: Side, tokenizer: Path, later: XMCDataset | Sequence[str]) -> dict[str, Any]:
    """Figures of a later data set, or of texts, tokenised as for the model whose training data
    `old` describes.
    """
    if isinstance(later, XMCDataset):
        return profile_dataset(later, tokenizer, old["max_length"], old["text"])
    measured = measure_texts(later, tokenizer, old["max_length"], old["vocabulary"])
    return {"count": len(later), "queries": measured, "held_out": measured}


def _answers(bundle: Bundle, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The texts' vectors in the searched space, float32 [n, D'], and the scores of their best
    labels, float32 [n].
    """
    ranker = bundle.ranker
    encoded = [bundle.encode(texts[some]) for some in blocks(len(texts), BATCH)]
    vectors = np.concatenate(list(map(ranker.queries, encoded)))
    return vectors, np.concatenate([ranker.rank(part, 1).scores[:, 0] for part in encoded])


def _quality(
    bundle: Bundle, window: Window
) -> tuple[dict[str, tuple[float, float]], dict[str, float], int]:
    """Metrics in percent with standard errors over the queries that have labels ({} without such
    queries); the share of labels unknown to the bundle, which count as misses; and the number of
    queries that have labels.
    """
    from sklearn.preprocessing import MultiLabelBinarizer

    given = window.labels or []
    window = window.sample([row for row, uids in enumerate(given) if uids])
    labels = window.labels or []
    known = bundle.uids.to_pylist()
    unknown = sorted(set(chain.from_iterable(labels)) - set(known))
    binarizer = MultiLabelBinarizer(classes=[*known, *unknown], sparse_output=True)
    truth = sp.csr_matrix(binarizer.fit_transform(labels), dtype=np.float32)
    share_unknown = share(truth[:, len(known) :].nnz, truth.nnz)
    if not labels:
        return {}, share_unknown, 0
    predicted = bundle.predict_arrays(window.texts, min(K, bundle.num_labels)).rows
    parts = by_query(predicted, truth, shown("window"), np.ones(truth.shape[1]))
    figures = {}
    num_labelled = len(labels)
    for name, (above_N, below_N) in parts.items():
        percent_N = 100.0 * above_N / below_N.mean()
        error = percent_N.std() / np.sqrt(num_labelled)
        figures[name] = (float(percent_N.mean()), float(error))
    return figures, share_unknown, num_labelled


def _digest(*parts: object) -> str:
    return text_sha256("\n".join(map(str, parts)))[:12]


def _track(params: Params, found: Comparison, folder: Path, model: Mapping[str, str]) -> str | None:
    """Log the report in `folder` as an MLflow run in a separate experiment; if the server does not
    answer, the run is sent later.
    """
    tracker = Tracker(f"{params.tracking.experiment}-monitor")
    tags = {"drifted": str(found.drifted).lower(), "bundle.sha256": model["bundle_sha256"]}
    parameters = {"queries": found.facts["queries"], "bundle": model["source"]}
    tracker.start(folder, parameters, tags, run_name=folder.name)
    figures = {f"drift/{check.key}": float(check.new) for check in found.checks}
    tracker.log_final(figures | {"drift/drifted": float(found.drifted)})
    tracker.log_files([folder / PAGE, folder / FINDINGS])
    tracker.finish()
    return tracker.url
