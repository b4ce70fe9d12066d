"""Drift: the data beside what the champion was trained on (stage `data_change`), any two versions of the data, and a
window of live queries (stage `monitor`). All three compare two sides by `unidec.evaluation.drift.compare`.

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
from unidec.data.profile import LENGTH_EDGES, PROFILE_KEY, VERSION, measure_texts, profile_dataset, share, spaced
from unidec.data.storage import MANIFEST, file_sha256, swap_folder, write_json
from unidec.errors import ArtifactError, DataError, without_credentials
from unidec.evaluation.drift import Check, compare, served_facts
from unidec.evaluation.figures import Chart, Line, bar_chart, line_chart
from unidec.evaluation.metrics import by_query
from unidec.evaluation.page import Table, render
from unidec.model.sources import resolve_encoder
from unidec.pipeline import paths
from unidec.retrieval.bundle import Bundle
from unidec.retrieval.bundle_folder import read_info, read_labels
from unidec.retrieval.text_file import Window, read_window
from unidec.tracking.fetch import fetch_bundle, find_alias
from unidec.tracking.run import Tracker
from unidec.tracking.store import answers, sqlite_path, store_errors, tracking_uri

MAX_QUERIES = 20_000  # of a window; of a larger one this many evenly spaced ones are used
BATCH = 1024
K = 100
_METRICS = ("P@1", "P@3", "P@5", "nDCG@5", "R@10", "R@100", "MRR")
MOVED_WORDS = 15
_PAGE, _FINDINGS = "index.html", "drift.json"
_TOKENIZER = Path("model", "tokenizer")  # in a bundle
Side = Mapping[str, Any]  # of a comparison, as `compare` takes it; empty: nothing was compared


@dataclass(frozen=True)
class DataChange:
    """The data beside the champion's: `accepted` has its "model", "version" and "dataset_sha256", None without one;
    `reason`: why nothing was compared, or ""; stops and warnings are sentences."""

    accepted: dict[str, str] | None
    reason: str
    stops: list[str]
    warnings: list[str]
    page: str
    docs: str


@dataclass(frozen=True)
class DataDrift:
    """Two versions of the data: findings as `Check.to_json`, what drifted first; the report and its JSON file."""

    drifted: bool
    findings: list[dict[str, object]]
    page: str
    result: str


@dataclass(frozen=True)
class WindowDrift:
    """Queries beside a bundle's training data (`model`: "source" and "bundle_sha256"), as `DataDrift`; metrics in
    percent, None without labels. Fewer queries than drift.min_window are not `judged`: no drift is reported, and
    `reason` says why."""

    drifted: bool
    findings: list[dict[str, object]]
    judged: bool
    reason: str
    queries: int
    metrics: dict[str, float] | None
    model: dict[str, str]
    page: str
    result: str
    run_url: str | None


def read_profile(bundle: Path) -> Side | None:
    """The profile in a bundle; None in one of before there were any, or of a version that this code does not know."""
    profile = read_info(bundle).card.get(PROFILE_KEY)
    return profile if isinstance(profile, dict) and profile.get("version") == VERSION else None


def data_change(params: Params) -> DataChange:
    """The data set beside the profile of the data that the champion was trained on -> data/change.

    Great Expectations judges the figures.

    Raises:
        DataError: something changed more than section `drift` allows.
        ArtifactError: the champion's bundle is damaged.
    """
    from unidec.validation.suite import run_change_suite

    dataset = paths.open_dataset()
    accepted, reason, old, new = _beside_champion(params, dataset)
    checks, docs = compare(old, new, params.drift) if old else [], "docs/index.html" if old else ""
    facts = {"accepted": accepted or "none", "now": {"dataset_sha256": dataset.sha256}}
    with swap_folder(paths.CHANGE) as folder:
        expectations = run_change_suite(checks, folder / "docs") if checks else []
        critical = {one["key"] for one in expectations if one["severity"] == "critical" and not one["success"]}
        stops = [check.words for check in checks if check.key in critical]
        warnings = [check.words for check in checks if check.state == "warning" and check.key not in critical]
        more: Side = {"accepted": accepted, "reason": reason, "stops": stops, "warnings": warnings,
                      "dataset_sha256": dataset.sha256, "expectations": expectations}  # fmt: skip
        _write(folder, f"Change of {dataset.name}", ("accepted", "now"), (old, new), checks, facts, more, docs)
    page = str(paths.CHANGE / _PAGE)
    if stops:
        fix = "correct the source; or, if this is what the data is now, raise drift.stop_change or drift.stop_distance"
        raise DataError("the data changed more than it may", where=page, got="; ".join(stops), fix=fix)
    return DataChange(accepted, reason, stops, warnings, page, docs and str(paths.CHANGE / docs))


def champion_change(params: Params) -> dict[str, Any]:
    """The comparison of `data_change` for the page of the data's validation, which no registry may fail.

    Returns:
        {"checks", "names" (of both sides), "charts", "reason" (why nothing was compared, or "")}.
    """
    uri = tracking_uri()
    database = sqlite_path(uri)
    accepted: dict[str, str] | None = None
    old: Side = {}
    new: Side = {}
    reason = "the registry does not answer"
    if database is not None and not database.is_file():
        reason = "there is no registry yet: nothing to compare with"
    elif answers(uri):
        try:
            accepted, reason, old, new = _beside_champion(params, paths.open_dataset())
        except store_errors() as error:
            reason = f"the champion's data could not be read: {without_credentials(str(error)).splitlines()[0]}"
    names = (f"version {accepted['version']}" if accepted else "accepted", "now")
    checks = compare(old, new, params.drift) if old else []
    return {"checks": checks, "names": names, "charts": _charts(names, old, new), "reason": reason}


def _beside_champion(params: Params, dataset: XMCDataset) -> tuple[dict[str, str] | None, str, Side, Side]:
    """`DataChange.accepted` and `.reason`, and both sides: what the champion was trained on, and the data set."""
    model = params.tracking.model_name
    if (champion := find_alias(model, "champion")) is None:
        return None, f"{model} has no champion yet: nothing to compare with", {}, {}
    accepted = {"model": model, "version": str(champion.version), "dataset_sha256": dataset.sha256}
    the_same = "the data is the very data that the champion was trained on"
    tags = champion.tags
    if tags.get("dataset.sha256") == dataset.sha256 and tags.get("start.kind") != "refresh":  # that is of the labels
        return accepted, the_same, {}, {}  # no need to fetch its bundle
    bundle = fetch_bundle(f"models:/{model}/{champion.version}", paths.BUNDLES)
    info = read_info(bundle)
    accepted["dataset_sha256"] = str(info.dataset.get("sha256"))
    if (profile := read_profile(bundle)) is None:
        return accepted, f"version {champion.version} of {model} has no profile that this code can read", {}, {}
    if profile["sha256"] == dataset.sha256:
        return accepted, the_same, {}, {}
    new = _figures(profile, bundle / _TOKENIZER, dataset)
    # shares of the champion's labels that are gone, and of the data's that are new
    before, now = set(read_labels(bundle, info.num_labels)["uid"].to_pylist()), set(dataset.label_uids())
    left, added = len(before - now) / max(len(before), 1), len(now - before) / max(len(now), 1)
    return accepted, "", profile, new | {"label_changes": {"left": left, "new": added}}


def drift(
    params: Params, first: str | os.PathLike[str], second: str | os.PathLike[str], column: str | None = None
) -> DataDrift:
    """A later version of the data, or a file of queries, beside an earlier version.

    Args:
        first: a data set's folder, or a bundle (folder or models:/ address): the data that it was trained on.
        second: a data set's folder, or a file of queries; their text is in `column`, or "query" or "text".

    Raises:
        DataError, ArtifactError: something that is neither, or that cannot be read.
    """
    source, later = os.fspath(first), Path(second)
    if source.startswith("models:") or (Path(source) / "bundle.json").is_file():
        old, tokenizer = _of_bundle(fetch_bundle(source, paths.BUNDLES), source)
    else:
        tokenizer, tokens = resolve_encoder(params.encoder.name), params.tokens
        old = _figures({"max_length": tokens.max_length, "text": tokens.text}, tokenizer, XMCDataset.open(source))
    is_dataset = (later / MANIFEST).is_file()
    new = _figures(old, tokenizer, XMCDataset.open(later) if is_dataset else read_window(later, column).texts)
    facts = {"earlier": source, "later": str(second), "earlier data": old["rows"], "later data": new.get("rows", {})}
    checks = compare(old, new, params.drift)
    out = paths.DRIFT / _digest(first, second)
    with swap_folder(out) as folder:
        found = _write(folder, f"Drift from {old['name']}", ("earlier", "later"), (old, new), checks, facts, {})
    return DataDrift(*found, str(out / _PAGE), str(out / _FINDINGS))


def monitor(params: Params, queries_path: str, *, column: str | None = None, bundle: str | None = None) -> WindowDrift:
    """Compare a file of queries with the training profile in a bundle, and measure it where it has labels.

    Args:
        queries_path, column: see `read_window`.
        bundle: folder or models:/ address; default: the champion.

    Raises:
        ConfigError: no such model. DataError: a file that cannot be read. ArtifactError: a bundle without a profile.
    """
    source = bundle or f"models:/{params.tracking.model_name}@champion"
    folder = fetch_bundle(source, paths.BUNDLES)
    old, tokenizer = _of_bundle(folder, source)
    window = read_window(Path(queries_path), column)
    total = len(window.texts)
    if not total:
        raise DataError("a window without queries", where=queries_path)
    window = window.sample(spaced(np.arange(total), MAX_QUERIES))
    loaded = Bundle.load(folder)
    new, metrics = _figures(old, tokenizer, window.texts), None
    if old["served"] is not None:
        new["served"] = served_facts(*_answers(loaded, window.texts), old["served"]["score_edges"])
    if window.labels is not None:
        new["metrics"], new["unknown_labels"] = _quality(loaded, window)
        metrics = {name: value for name, (value, _) in new["metrics"].items()}
    checks = compare({**old, "metrics": loaded.info.metrics.get("validation", {})}, new, params.drift)
    judged = total >= params.drift.min_window
    reason = "" if judged else f"not judged: fewer queries than drift.min_window ({params.drift.min_window})"
    facts = {"queries": total, "looked at": len(window.texts), "bundle": loaded.sha256, "data set": old["name"],
             "data set sha256": old["sha256"], "metrics": metrics or {}}  # fmt: skip
    model = {"source": source, "bundle_sha256": loaded.sha256}
    more = {"judged": judged, "reason": reason, "queries": total, "metrics": metrics, "model": model}
    name = f"{Path(queries_path).name.partition('.')[0]}-{_digest(file_sha256(queries_path), loaded.sha256)}"
    out, title = paths.MONITOR / name, f"Window of {total:,} queries"
    with swap_folder(out) as folder:
        found = _write(folder, title, ("trained on", "window"), (old, new), checks, facts, more)
    files = str(out / _PAGE), str(out / _FINDINGS)
    result = WindowDrift(*found, judged, reason, total, metrics, model, *files, run_url=None)
    return replace(result, run_url=_track(params, result, checks, name))


def _of_bundle(folder: Path, source: str) -> tuple[Side, Path]:
    """The profile in a bundle, and its tokenizer's folder."""
    if (profile := read_profile(folder)) is None:
        raise ArtifactError("a bundle without a profile of its data", where=source, fix="unidec index build writes one")
    return profile, folder / _TOKENIZER


def _figures(old: Side, tokenizer: Path, later: XMCDataset | Sequence[str]) -> dict[str, Any]:
    """Of a later data set, or of texts, as a model reads them whose data `old` describes."""
    if isinstance(later, XMCDataset):
        return profile_dataset(later, tokenizer, old["max_length"], old["text"])
    measured = measure_texts(later, tokenizer, old["max_length"], old["vocabulary"])
    return {"queries": measured, "held_out": measured}


def _answers(bundle: Bundle, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Vectors in the searched space float32 [n, D'], and the best label's score float32 [n]."""
    vectors, scores = [], []
    for start in range(0, len(texts), BATCH):
        asked = bundle.encode(texts[start : start + BATCH])
        vectors.append(bundle.searched(asked))
        scores.append(bundle.rank(asked, 1).scores[:, 0])
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


def _write(
    folder: Path, title: str, names: tuple[str, str], sides: tuple[Side, Side], checks: Sequence[Check],
    facts: Mapping[str, Any], more: Mapping[str, Any], docs: str = "",
) -> tuple[bool, list[dict[str, object]]]:  # fmt: skip
    """drift.json: whether something drifted and the findings, which are returned, and `more`, whose "reason" tells why
    nothing was judged; and index.html, where the sides have these names, and Data Docs this address."""
    old, new = sides
    reason = more.get("reason", "")
    findings = [check.to_json(judged=not reason) for check in checks]
    words = _words(*(side["queries"]["words"] for side in sides)) if old and new else []
    html = render(
        "drift", title=title, names=names, checks=checks, facts_shown=facts, reason=reason, docs=docs,
        distributions=_charts(names, old, new),
        words=Table(["word", *names], words, caption="Words that moved most, by share of all words"),
    )  # fmt: skip
    drifted = any(finding["drifted"] for finding in findings)
    write_json(folder / _FINDINGS, {"drifted": drifted, "findings": findings, **more})
    (folder / _PAGE).write_text(html, encoding="utf-8")
    return drifted, findings


def _charts(names: Sequence[str], old: Side, new: Side) -> list[Chart | None]:
    charts = [_lengths(which, names, old[which], new[which]) for which in ("queries", "labels")
              if which in old and which in new]  # fmt: skip
    if old.get("served") and new.get("served"):
        scores = [side["served"]["score_quantiles"] for side in (old, new)]
        lines = [Line(name, range(len(of)), of) for name, of in zip(names, scores, strict=True)]
        charts.append(line_chart("Score of the best label", lines, "percent of queries", "top score at most"))
    return charts


def _lengths(which: str, names: Sequence[str], old: Side, new: Side) -> Chart | None:
    counts = [side["length"]["histogram"] for side in (old, new)]
    filled = [i for i, pair in enumerate(zip(*counts, strict=True)) if any(pair)] or [0]
    some = slice(filled[0], filled[-1] + 1)
    bars = [(name, [100 * count / max(sum(side), 1) for count in side[some]])
            for name, side in zip(names, counts, strict=True)]  # fmt: skip
    edges = [str(edge) for edge in LENGTH_EDGES[some]]
    return bar_chart(f"Length of {which}", edges, bars, "percent", x_label="characters from")


def _words(*words: Side) -> list[list[str]]:
    """Only the commonest words of each side are known; of another the share counts as that of the rarest of them."""
    old, new = ({word: count / max(of["count"], 1) for word, count in of["top"].items()} for of in words)
    least = [min(of.values(), default=0.0) for of in (old, new)]
    change = {word: abs(new.get(word, least[1]) - old.get(word, least[0])) for word in {**old, **new}}
    moved = sorted(change, key=lambda word: (-change[word], word))[:MOVED_WORDS]
    return [[word, *(f"{of[word]:.2%}" if word in of else "–" for of in (old, new))] for word in moved]


def _digest(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:12]


def _track(params: Params, result: WindowDrift, checks: Sequence[Check], name: str) -> str | None:
    """The report as a run of its own experiment; a server that is away gets it later."""
    tracker = Tracker(f"{params.tracking.experiment}-monitor")
    tags = {"drifted": str(result.drifted).lower(), "bundle.sha256": result.model["bundle_sha256"]}
    facts = {"queries": result.queries, "bundle": result.model["source"]}
    tracker.start(Path(result.page).parent, facts, tags, run_name=name)
    figures = {f"drift/{check.key}": float(check.new) for check in checks}
    tracker.log_final(figures | {"drift/drifted": float(result.drifted)})
    tracker.log_files([result.page, result.result])
    tracker.finish()
    return tracker.url
