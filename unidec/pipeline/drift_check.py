"""Drift of the data against the champion's training data (`data_change`), between any two versions
of the data (`drift`), and of a window of live queries (`monitor`). All three use
`unidec.evaluation.drift.compare`.

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

from unidec.addresses import without_credentials
from unidec.bundle.bundle import Bundle
from unidec.bundle.bundle_folder import read_info, read_labels
from unidec.bundle.text_file import Window, read_window
from unidec.config import Params
from unidec.data.dataset import XMCDataset
from unidec.data.profile import (
    LENGTH_EDGES,
    PROFILE_KEY,
    VERSION,
    measure_texts,
    profile_dataset,
    share,
    spaced,
)
from unidec.data.storage import MANIFEST, file_sha256, swap_folder, write_json
from unidec.errors import ArtifactError, DataError
from unidec.evaluation.drift import Check, compare, not_judged, served_facts
from unidec.evaluation.figures import Chart, Line, bar_chart, line_chart
from unidec.evaluation.metrics import by_query
from unidec.evaluation.page import Table, render
from unidec.metric_names import shown
from unidec.model.sources import resolve_encoder
from unidec.pipeline import paths
from unidec.tracking.fetch import fetch_bundle, find_alias
from unidec.tracking.run import Tracker
from unidec.tracking.store import answers, sqlite_path, store_errors, tracking_uri

MAX_QUERIES = 20_000  # of a larger window this many evenly spaced queries are used
BATCH = 1024
K = 100
MOVED_WORDS = 15
_PAGE = "index.html"
_FINDINGS = "drift.json"
_TOKENIZER = Path("model", "tokenizer")  # in a bundle
# the figures of one side, as `compare` takes them; empty: nothing was compared
Side = Mapping[str, Any]


@dataclass(frozen=True)
class DataChange:
    """The data set compared with the champion's training data.

    Attributes:
        accepted: the champion's "model", "version" and "dataset_sha256"; None without a champion.
        reason: why nothing was compared, or "".
        stops, warnings: a sentence for each change beyond the limits of section `drift`.
        page, docs: paths of the report and of Great Expectations' Data Docs; docs is "" if nothing
        was compared.
    """

    accepted: dict[str, str] | None
    reason: str
    stops: list[str]
    warnings: list[str]
    page: str
    docs: str


@dataclass(frozen=True)
class DataDrift:
    """Two versions of the data compared.

    Attributes:
        findings: as `Check.to_json`, those that drifted first.
        judged: False for a file with fewer queries than drift.min_window: then no drift is
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
        queries: number of queries of the whole window. metrics: in percent, None without labels.
        model: "source" and "bundle_sha256" of the bundle. run_url: page of the MLflow run.
    """

    queries: int
    metrics: dict[str, float] | None
    model: dict[str, str]
    run_url: str | None


def read_profile(bundle: Path) -> Side | None:
    """The training profile in a bundle; None if an older release wrote the bundle without one, or
    if the profile has another format version.
    """
    profile = read_info(bundle).card.get(PROFILE_KEY)
    return profile if isinstance(profile, dict) and profile.get("version") == VERSION else None


def data_change(params: Params) -> DataChange:
    """Compare the data set with the profile of the champion's training data; writes data/change.

    Great Expectations documents the checks as Data Docs.

    Raises:
        DataError: a figure changed by more than section `drift` allows.
        ArtifactError: the champion's bundle is damaged.
    """
    from unidec.validation.checkpoint_run import run_change_suite

    dataset = paths.open_dataset()
    accepted, reason, old, new = _beside_champion(params, dataset)
    checks = compare(old, new, params.drift) if old else []
    docs = "docs/index.html" if old else ""
    facts = {"accepted": accepted or "none", "now": {"dataset_sha256": dataset.sha256}}
    with swap_folder(paths.CHANGE) as folder:
        expectations = run_change_suite(checks, folder / "docs") if checks else []
        stops = [check.words for check in checks if check.state == "stop"]
        warnings = [check.words for check in checks if check.state == "warning"]
        more: Side = {
            "accepted": accepted,
            "reason": reason,
            "stops": stops,
            "warnings": warnings,
            "dataset_sha256": dataset.sha256,
            "expectations": expectations,
        }
        _write(
            folder,
            f"Change of {dataset.name}",
            ("accepted", "now"),
            (old, new),
            checks,
            facts,
            more,
            docs,
        )
    page = str(paths.CHANGE / _PAGE)
    if stops:
        fix = (
            "correct the source; or, if this is what the data is now, raise drift.stop_change or "
            "drift.stop_distance"
        )
        raise DataError(
            "the data changed beyond the limits", where=page, got="; ".join(stops), fix=fix
        )
    return DataChange(accepted, reason, stops, warnings, page, docs and str(paths.CHANGE / docs))


def champion_change(params: Params) -> dict[str, Any]:
    """The comparison of `data_change` for the validation page; an unavailable registry raises no
    error here.

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
            reason = (
                "the champion's data could not be read: "
                f"{without_credentials(str(error)).splitlines()[0]}"
            )
    names = (f"version {accepted['version']}" if accepted else "accepted", "now")
    checks = compare(old, new, params.drift) if old else []
    return {"checks": checks, "names": names, "charts": _charts(names, old, new), "reason": reason}


def _beside_champion(
    params: Params, dataset: XMCDataset
) -> tuple[dict[str, str] | None, str, Side, Side]:
    """`DataChange.accepted` and `.reason`, and the figures of the champion's training data and of
    the data set.
    """
    model = params.tracking.model_name
    if (champion := find_alias(model, "champion")) is None:
        return None, f"{model} has no champion yet: nothing to compare with", {}, {}
    accepted = {"model": model, "version": str(champion.version), "dataset_sha256": dataset.sha256}
    same_data = "the champion was trained on this very data"
    tags = champion.tags
    # after a refresh of the labels the tag names the data of the labels, not of the training
    if tags.get("dataset.sha256") == dataset.sha256 and tags.get("start.kind") != "refresh":
        return accepted, same_data, {}, {}  # no need to fetch its bundle
    bundle = fetch_bundle(f"models:/{model}/{champion.version}", paths.BUNDLES)
    info = read_info(bundle)
    accepted["dataset_sha256"] = str(info.dataset.get("sha256"))
    if (profile := read_profile(bundle)) is None:
        return (
            accepted,
            f"version {champion.version} of {model} has no profile that this code can read",
            {},
            {},
        )
    if profile["sha256"] == dataset.sha256:
        return accepted, same_data, {}, {}
    new = _figures(profile, bundle / _TOKENIZER, dataset)
    before = set(read_labels(bundle, info.num_labels)["uid"].to_pylist())
    now = set(dataset.label_uids())
    removed = len(before - now) / max(len(before), 1)
    added = len(now - before) / max(len(now), 1)
    return accepted, "", profile, new | {"label_changes": {"left": removed, "new": added}}


def drift(
    params: Params,
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    column: str | None = None,
) -> DataDrift:
    """Compare a later version of the data, or a file of queries, with an earlier version; writes
    below runs/drift.

    Args:
        first: a data set's folder, or a bundle (folder or models:/ address), which means its
        training data.
        second: a data set's folder, or a file of queries, whose texts are in `column` (default:
        "query" or "text").

    Raises:
        DataError, ArtifactError: `first` or `second` cannot be read, or is none of these.
    """
    source = os.fspath(first)
    later = Path(second)
    if source.startswith("models:") or (Path(source) / "bundle.json").is_file():
        old, tokenizer = _of_bundle(fetch_bundle(source, paths.BUNDLES), source)
    else:
        tokenizer = resolve_encoder(params.encoder.name)
        tokens = params.tokens
        old = _figures(
            {"max_length": tokens.max_length, "text": tokens.text},
            tokenizer,
            XMCDataset.open(source),
        )
    is_dataset = (later / MANIFEST).is_file()
    texts = XMCDataset.open(later) if is_dataset else read_window(later, column, params.raw).texts
    new = _figures(old, tokenizer, texts)
    reason = not_judged(new.get("count"), params.drift)
    facts = {
        "earlier": source,
        "later": str(second),
        "earlier data": old["rows"],
        "later data": new.get("rows", {}),
    }
    checks = compare(old, new, params.drift)
    out = paths.DRIFT / _digest(first, second)
    with swap_folder(out) as folder:
        more = {"judged": not reason, "reason": reason}
        outcome = _write(
            folder,
            f"Drift from {old['name']}",
            ("earlier", "later"),
            (old, new),
            checks,
            facts,
            more,
        )
    drifted, found = outcome
    return DataDrift(
        drifted, found, not reason, reason, page=str(out / _PAGE), result=str(out / _FINDINGS)
    )


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
    folder = fetch_bundle(source, paths.BUNDLES)
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
    checks = compare(
        {**old, "metrics": loaded.info.metrics.get("validation", {})}, new, params.drift
    )
    reason = not_judged(total, params.drift)
    facts = {
        "queries": total,
        "looked at": len(window.texts),
        "bundle": loaded.sha256,
        "data set": old["name"],
        "data set sha256": old["sha256"],
        "metrics": metrics or {},
    }
    model = {"source": source, "bundle_sha256": loaded.sha256}
    more = {
        "judged": not reason,
        "reason": reason,
        "queries": total,
        "metrics": metrics,
        "model": model,
    }
    window = Path(queries_path).name.partition(".")[0]
    name = f"{window}-{_digest(file_sha256(queries_path), loaded.sha256)}"
    out = paths.MONITOR / name
    title = f"Window of {total:,} queries"
    with swap_folder(out) as folder:
        drifted, found = _write(
            folder, title, ("trained on", "window"), (old, new), checks, facts, more
        )
    result = WindowDrift(
        drifted,
        found,
        not reason,
        reason,
        page=str(out / _PAGE),
        result=str(out / _FINDINGS),
        queries=total,
        metrics=metrics,
        model=model,
        run_url=None,
    )
    return replace(result, run_url=_track(params, result, checks, name))


def _of_bundle(folder: Path, source: str) -> tuple[Side, Path]:
    """The profile in a bundle, and its tokenizer's folder; an ArtifactError if it has
    no profile.
    """
    if (profile := read_profile(folder)) is None:
        fix = "`unidec index build` writes one"
        raise ArtifactError("the bundle has no profile of its training data", where=source, fix=fix)
    return profile, folder / _TOKENIZER


def _figures(old: Side, tokenizer: Path, later: XMCDataset | Sequence[str]) -> dict[str, Any]:
    """Figures of a later data set, or of texts, tokenised as by the model whose training data `old`
    describes.
    """
    if isinstance(later, XMCDataset):
        return profile_dataset(later, tokenizer, old["max_length"], old["text"])
    measured = measure_texts(later, tokenizer, old["max_length"], old["vocabulary"])
    return {"count": len(later), "queries": measured, "held_out": measured}


def _answers(bundle: Bundle, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The texts' vectors in the searched space, float32 [n, D'], and the scores of their best
    labels, float32 [n].
    """
    vectors = []
    scores = []
    for start in range(0, len(texts), BATCH):
        encoded = bundle.encode(texts[start : start + BATCH])
        vectors.append(bundle.ranker.queries(encoded))
        scores.append(bundle.ranker.rank(encoded, 1).scores[:, 0])
    return np.concatenate(vectors), np.concatenate(scores)


def _quality(
    bundle: Bundle, window: Window
) -> tuple[dict[str, tuple[float, float]], dict[str, float], int]:
    """Metrics in percent with their standard errors over the queries that have labels ({} if none
    has), the share of labels that the bundle does not know, which count as misses, and the number
    of queries that have labels.
    """
    labelled = [
        (text, set(uids))
        for text, uids in zip(window.texts, window.labels or [], strict=True)
        if uids
    ]
    row_of = dict(bundle.row_of)
    rows = [row for row, (_, uids) in enumerate(labelled) for _ in uids]
    columns = [row_of.setdefault(uid, len(row_of)) for _, uids in labelled for uid in uids]
    unknown = share(sum(column >= bundle.num_labels for column in columns), len(columns))
    if not labelled:
        return {}, unknown, 0
    truth = sp.csr_matrix(
        (np.ones(len(rows), np.float32), (rows, columns)), shape=(len(labelled), len(row_of))
    )
    predicted = bundle.predict_arrays(
        [text for text, _ in labelled], min(K, bundle.num_labels)
    ).rows
    parts = by_query(predicted, truth, shown("window"), np.ones(len(row_of)))
    percent = {name: 100.0 * above_N / below_N.mean() for name, (above_N, below_N) in parts.items()}
    figures = {
        name: (float(of.mean()), float(of.std() / np.sqrt(len(of)))) for name, of in percent.items()
    }
    return figures, unknown, len(labelled)


def _write(
    folder: Path,
    title: str,
    names: tuple[str, str],
    sides: tuple[Side, Side],
    checks: Sequence[Check],
    facts: Mapping[str, Any],
    more: Mapping[str, Any],
    docs: str = "",
) -> tuple[bool, list[dict[str, object]]]:
    """Write drift.json and index.html into a folder.

    Args:
        names: of the two sides, on the page. facts: shown on the page. docs: relative address of
        Data Docs, or "".
        more: further keys of drift.json; a "reason" is shown instead of a verdict.

    Returns:
        whether any figure drifted, and the findings; both are in drift.json.
    """
    old, new = sides
    reason = more.get("reason", "")
    findings = [check.to_json() for check in checks]
    moved = _moved_words(*(side["queries"]["words"] for side in sides)) if old and new else []
    html = render(
        "drift",
        title=title,
        names=names,
        checks=checks,
        facts_shown=facts,
        reason=reason,
        docs=docs,
        distributions=_charts(names, old, new),
        words=Table(
            ["word", *names], moved, caption="Words that moved most, by share of all words"
        ),
    )
    drifted = any(finding["drifted"] for finding in findings)
    write_json(folder / _FINDINGS, {"drifted": drifted, "findings": findings, **more})
    (folder / _PAGE).write_text(html, encoding="utf-8")
    return drifted, findings


def _charts(names: Sequence[str], old: Side, new: Side) -> list[Chart | None]:
    """The lengths of queries and labels, and the scores of the best labels, of both sides."""
    charts = [
        _lengths(which, names, old[which], new[which])
        for which in ("queries", "labels")
        if which in old and which in new
    ]
    if old.get("served") and new.get("served"):
        scores = [side["served"]["score_quantiles"] for side in (old, new)]
        lines = [Line(name, range(len(of)), of) for name, of in zip(names, scores, strict=True)]
        charts.append(
            line_chart("Score of the best label", lines, "percent of queries", "top score at most")
        )
    return charts


def _lengths(which: str, names: Sequence[str], old: Side, new: Side) -> Chart | None:
    counts = [side["length"]["histogram"] for side in (old, new)]
    filled = [i for i, pair in enumerate(zip(*counts, strict=True)) if any(pair)] or [0]
    some = slice(filled[0], filled[-1] + 1)
    bars = [
        (name, [100 * count / max(sum(side), 1) for count in side[some]])
        for name, side in zip(names, counts, strict=True)
    ]
    edges = [str(edge) for edge in LENGTH_EDGES[some]]
    return bar_chart(f"Length of {which}", edges, bars, "percent", x_label="characters from")


def _moved_words(*words: Side) -> list[list[str]]:
    """Table rows of the words whose share changed most.

    Each side has only its most frequent words; any other word counts with the share of the rarest
    of them.
    """
    old, new = (
        {word: count / max(of["count"], 1) for word, count in of["top"].items()} for of in words
    )
    least = [min(of.values(), default=0.0) for of in (old, new)]
    change = {
        word: abs(new.get(word, least[1]) - old.get(word, least[0])) for word in {**old, **new}
    }
    moved = sorted(change, key=lambda word: (-change[word], word))[:MOVED_WORDS]
    return [
        [word, *(f"{of[word]:.2%}" if word in of else "–" for of in (old, new))] for word in moved
    ]


def _digest(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:12]


def _track(params: Params, result: WindowDrift, checks: Sequence[Check], name: str) -> str | None:
    """Log the report as an MLflow run of a separate experiment; if the server does not answer, it
    is sent later.
    """
    tracker = Tracker(f"{params.tracking.experiment}-monitor")
    tags = {"drifted": str(result.drifted).lower(), "bundle.sha256": result.model["bundle_sha256"]}
    facts = {"queries": result.queries, "bundle": result.model["source"]}
    tracker.start(Path(result.page).parent, facts, tags, run_name=name)
    figures = {f"drift/{check.key}": float(check.new) for check in checks}
    tracker.log_final(figures | {"drift/drifted": float(result.drifted)})
    tracker.log_files([result.page, result.result])
    tracker.finish()
    return tracker.url
