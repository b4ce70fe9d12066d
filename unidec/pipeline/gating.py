"""Stages `gate` (may the challenger replace the champion? every check is recorded, passed or not)
and `promote`.

Both bundles are fetched from the registry and their hashes checked. Each is served in a fresh
process, and both rank the texts of the current test split by the same code, each with its own
tokenizer. Queries that either was trained on are left out. Labels are matched by uid.

Legend: N test queries that neither has seen, K results per query, B labels of a bundle.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unidec.bundle.bundle import Bundle
from unidec.bundle.probe import Probe, probe_bundle
from unidec.config import Gate, Params
from unidec.data.chunks import blocks
from unidec.data.dataset import XMCDataset
from unidec.data.json_file import time_now
from unidec.data.profile import spaced
from unidec.data.storage import files_sha256, write_json
from unidec.data.temporary import remove_folder
from unidec.errors import ArtifactError
from unidec.evaluation.metrics import moved_up, truth_of
from unidec.evaluation.page import render, write_page
from unidec.evaluation.significance import Check, challenge
from unidec.metric_names import headline
from unidec.pipeline import paths
from unidec.pipeline.ranking import K
from unidec.pipeline.registration import record_code
from unidec.pipeline.seen import unseen_queries
from unidec.progress import progress
from unidec.ranking.query_encoder import Runtime
from unidec.tracking import promotion
from unidec.tracking.fetch import fetch_bundle
from unidec.tracking.promotion import (
    CHALLENGER,
    CHAMPION,
    ROLLED_BACK,
    known_version,
    rolled_back_words,
    version_of,
)
from unidec.tracking.provenance import COMMIT_TAG, DIRTY_TAG, uncommitted, unknown_code
from unidec.tracking.registry import HASH_TAG, bundle_hash
from unidec.tracking.repository import git
from unidec.tracking.store import open_client
from unidec.training.precision import choose_device

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

GATE_JSON = Path("outputs/gate.json")
GATE_PAGE = Path("outputs/gate.html")
_KEPT_COPIES = 10  # local copies of bundles that are kept
_BLOCK = 1024  # queries ranked at a time
# maximum number of extra results searched to replace labels that the data set lacks
_MOST_REMOVED = 3 * K
PROBE_K = 10
RUNTIME: Runtime = "auto"  # as `unidec serve` encodes queries
_MEASUREMENTS = 3  # at most, of both bundles in turn; repeated while the challenger fails a time
_TIMEOUT = 600.0  # seconds until a fresh process counts as hung
_TIMES = ("load_seconds", "load_cpu_seconds", "p50_ms", "p95_ms", "p95_cpu_ms")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verdict:
    """Whether a challenger may become champion, and why.

    Attributes:
        already: the challenger is the champion already.
        challenger, champion: versions; champion is None without one.
        metrics: headline metrics of "challenger" and "champion" in percent; empty if they were not
        compared.
        page: path of the report. run: id of the challenger's MLflow run.
    """

    passed: bool
    already: bool
    model: str
    reasons: list[Check]
    challenger: str
    champion: str | None
    metrics: dict[str, dict[str, float]]
    page: str
    run: str | None


def gate(params: Params, version: str | int = CHALLENGER) -> Verdict:
    """Compare a version with the champion and check that it can be served; the verdict is written
    to files and tags.

    Without a champion, the version only has to be servable. The champion itself passes unchecked.

    Args:
        version: number or alias.

    Raises:
        ConfigError: no such version.
        DataError, ArtifactError: no data set, or the champion's bundle is damaged. A challenger
            that is worse, damaged or does not load is no error: it does not pass.
    """
    client, challenger, champion = _versions(params, version)
    challenger = _with_commit(client, challenger)
    already = champion is not None and champion.version == challenger.version
    checks = [Check("champion", True, None, None, "it is already the champion")]
    passed = True
    details: dict[str, Any] = {}
    if not already:
        dataset = paths.open_dataset()
        checks = list(_checks(params, challenger, champion, dataset, details))
        passed = all(check.passed for check in checks)
        details |= {
            "model": challenger.name,
            "passed": passed,
            "reasons": checks,
            "at": time_now(),
            "challenger": _described(challenger),
            "champion": champion and _described(champion),
            "data": {
                "name": dataset.name,
                "sha256": dataset.sha256,
                "test queries": len(dataset.rows("test")),
            },
            "settings": params.gate.model_dump(),
        }
        write_json(GATE_JSON, details)
        write_page(GATE_PAGE, render("gate", verdict=details))
        promotion.record_verdict(
            client, challenger, details, _conditions(params, challenger, champion)
        )
        _purge({bundle_hash(version)[:16] for version in (challenger, champion) if version})
    for check in checks:
        level = logging.INFO if check.passed else logging.WARNING
        log.log(level, "gate: %s: %s", check.check, check.words)
    compared = details.get("metrics", {}).items()
    return Verdict(
        passed=passed,
        already=already,
        model=challenger.name,
        reasons=checks,
        challenger=str(challenger.version),
        champion=str(champion.version) if champion else None,
        metrics={which: headline(values) for which, values in compared},
        page=str(GATE_PAGE),
        run=challenger.run_id or None,
    )


def needs_gate(params: Params, version: str | int) -> bool:
    """Whether the gate could reach a new verdict on a version.

    True without a champion. False for the champion itself, for a version that was rolled back, and
    for a refused version while the conditions of the refusal (champion, data set, gate settings,
    uncommitted changes) are unchanged.
    """
    _, challenger, champion = _versions(params, version)
    if champion is None:
        return True
    if champion.version == challenger.version or ROLLED_BACK[0] in challenger.tags:
        return False
    if challenger.tags.get("gate.passed") != "false":
        return True
    return challenger.tags.get("gate.settings") != _conditions(params, challenger, champion)


def _versions(
    params: Params, version: str | int
) -> tuple[MlflowClient, ModelVersion, ModelVersion | None]:
    """A client of the registry, this version, and the champion."""
    name = params.tracking.model_name
    client = open_client()
    return client, known_version(client, name, version), version_of(client, name, CHAMPION)


def promote(
    params: Params, version: str | int = CHALLENGER, *, force: bool = False, reason: str = ""
) -> promotion.Promotion:
    """Make a version champion and the champion previous; see
    `unidec.tracking.promotion.promote`.
    """
    return promotion.promote(params.tracking.model_name, version, force=force, reason=reason)


def _conditions(params: Params, challenger: ModelVersion, champion: ModelVersion | None) -> str:
    """A hash of everything that a verdict depends on, apart from the model."""
    facts = {
        "champion": champion and str(champion.version),
        "data": paths.open_dataset().sha256,
        "settings": params.gate.model_dump(),
        "validation": params.validation.model_dump(),
        "uncommitted": bool(uncommitted(challenger.tags) or unknown_code(challenger.tags)),
    }
    return files_sha256({key: json.dumps(value) for key, value in facts.items()})[:16]


def _described(version: ModelVersion) -> dict[str, Any]:
    shown = (HASH_TAG, "dataset.sha256", COMMIT_TAG, DIRTY_TAG, "start.kind")
    tags = {key: version.tags.get(key) for key in shown}
    return {"version": str(version.version), "run": version.run_id, **tags}


def _provenance(version: ModelVersion, champion: ModelVersion | None, rules: Gate) -> list[Check]:
    """Whether the code and parameters of a version's training are in git, and whether it was rolled
    back.

    The first champion replaces nothing, so uncommitted changes are accepted for it.
    """
    tags = version.tags
    force = f"`unidec models promote {version.version} --force`"
    is_accepted = rules.allow_dirty
    fix = f": correct that and run `make train`, or run {force}"
    if is_accepted:
        fix = ", which gate.allow_dirty accepts"
    if reason := unknown_code(tags):
        what = f"unknown, because git does not answer ({reason})"
        check = Check("code", is_accepted, "unknown", "clean", what + fix)
    elif files := uncommitted(tags):
        what = f"made with uncommitted changes ({', '.join(files[:5])})"
        if champion is None:
            is_accepted = True
            fix = ", accepted for a first champion; commit them, or later models are refused"
            log.warning("gate: version %s was %s%s", version.version, what, fix)
        check = Check("code", is_accepted, "dirty", "clean", what + fix)
    else:
        commit = tags.get(COMMIT_TAG, "")[:12]
        words = f"commit {commit}" if commit else "not in a git repository"
        check = Check("code", True, commit or None, None, words)
    if ROLLED_BACK[0] not in tags:
        return [check]
    what = f"{rolled_back_words(tags)}; {force} overrules that"
    return [check, Check("rolled back", False, tags[ROLLED_BACK[0]], None, what)]


def _with_commit(client: MlflowClient, version: ModelVersion) -> ModelVersion:
    """The version; if its uncommitted changes have been committed since, its tags are updated to
    name the current commit.
    """
    if version.tags.get(DIRTY_TAG) != "true" or uncommitted(version.tags):
        return version
    commit = git(".", "rev-parse", "HEAD") or ""
    record_code(client, version, {COMMIT_TAG: commit, DIRTY_TAG: "false"})
    return known_version(client, version.name, str(version.version))


def _checks(
    params: Params,
    challenger: ModelVersion,
    champion: ModelVersion | None,
    dataset: XMCDataset,
    details: dict[str, Any],
) -> Iterator[Check]:
    """All checks. Fills the details that the page shows: "probes", "seen", "labels", "metrics",
    "comparison".
    """
    rules = params.gate
    # only the labels changed: the challenger need not be better
    if challenger.tags.get("start.kind") == "refresh":
        rules = rules.model_copy(update={"margin": min(rules.margin, -rules.tolerance)})
    yield from _provenance(challenger, champion, rules)
    sha256 = bundle_hash(challenger)
    champion_folder = {} if champion is None else {"champion": _fetch(champion)}
    rows = dataset.rows("test")
    probed = spaced(rows if len(rows) else dataset.rows("train"), rules.probes)
    check = "hash"
    try:
        folders = {"challenger": _fetch(challenger)} | champion_folder
        yield Check(check, True, sha256, sha256, f"sha256 {sha256[:16]}, as registered")
        check = "loads"
        bundle = Bundle.load(folders["challenger"], lazy=True, verify=False)
        texts = own_texts(bundle, dataset, probed) or ["a query"]
    except ArtifactError as error:
        yield Check(check, False, None, None, str(error).replace("\n", " "))
        return
    serving_checks, probes = servability(folders, texts, rules)
    details["probes"] = {which: asdict(probe) for which, probe in probes.items()}
    yield from serving_checks
    if not probes or champion is None:
        return
    if not len(rows):
        what = "the data set has no test queries on which it could be compared with the champion"
        yield Check(rules.metric, False, None, None, what)
        return
    unseen = unseen_queries(folders, dataset, params.validation)
    yield unseen.check
    details["seen"] = unseen.counts
    if not unseen.check.passed:
        return
    device = choose_device(params.device).type
    ranked = {}
    details["labels"] = {}
    for which, folder in folders.items():
        # hashes were checked when the bundle was fetched
        bundle = Bundle.load(folder, verify=False, device=device)
        ranked[which], details["labels"][which] = rank_queries(bundle, dataset, unseen.rows)
    propensity = paths.open_propensity()
    metric_checks, comparison = challenge(
        ranked["challenger"],
        ranked["champion"],
        truth_of(dataset, unseen.rows),
        propensity.inverse_L,
        propensity.group_L,
        rules,
    )
    details |= comparison
    yield from metric_checks


def servability(
    folders: Mapping[str, Path], texts: Sequence[str], rules: Gate
) -> tuple[list[Check], dict[str, Probe]]:
    """Serve the bundles in fresh processes; returns the checks of load, times and size, and each
    bundle's measurements.

    Args:
        folders: folders of the bundles "challenger" and, if there is one, "champion".
        texts: probe queries.

    Returns:
        checks, and measurements: {} if the challenger cannot be served; without the champion if
        that cannot be served.
    """
    probes: dict[str, Probe] = {}
    timeout = max(_TIMEOUT, 2 * rules.bound("max_load").own) + len(texts)
    for _ in range(_MEASUREMENTS):
        for name, folder in folders.items():
            try:
                probe = probe_bundle(folder, texts, PROBE_K, timeout, runtime=RUNTIME, threads=1)
            except ArtifactError as error:
                if "challenger" not in probes:
                    return [Check("loads", False, None, None, str(error).replace("\n", " "))], {}
                # the champion cannot be served, so there are no times and sizes to compare with
                continue
            # the shortest times count: other processes can only increase them
            before = probes.get(name, probe)
            shortest = {time: min(getattr(probe, time), getattr(before, time)) for time in _TIMES}
            probes[name] = replace(probe, **shortest)
        checks = resource_checks(probes, rules)
        if all(check.passed or check.check.startswith("size") for check in checks):
            break
    what = f"a fresh process loads it, all hashes match, and it answers {len(texts)} probe queries"
    return [Check("loads", True, None, None, what), *checks], probes


def resource_checks(probes: Mapping[str, Probe], rules: Gate) -> list[Check]:
    """Checks of processor time and size as multiples of the champion's, and of wall time and size
    against the configured limits.
    """
    probe = probes["challenger"]
    champion = probes.get("champion")
    checks = []
    for name, bound, key, unit in (
        ("load time", "max_load", "load_seconds", "s from start to the first answer"),
        ("latency", "max_latency", "p95_ms", "ms, p95 of single queries"),
        ("size", "max_size", "megabytes", "MB on disk"),
    ):
        got = getattr(probe, key)
        if limit := rules.bound(bound).own:
            words = f"{got:.3g} {unit}, at most {limit:g}"
            checks.append(Check(name, got <= limit, got, limit, words))
    for name, bound, key, unit in (
        ("load ratio", "max_load", "load_cpu_seconds", "s of processor time to an answer"),
        ("latency ratio", "max_latency", "p95_cpu_ms", "ms of processor time, p95 of a query"),
        ("size ratio", "max_size", "megabytes", "MB"),
    ):
        limit = rules.bound(bound).ratio
        before = getattr(champion, key, 0.0)
        if limit and before:
            got = getattr(probe, key)
            ratio = got / before
            words = f"{got:.3g} against {before:.3g} {unit}: {ratio:.2f} times the champion's"
            words += f", at most {limit:g}"
            checks.append(Check(name, ratio <= limit, ratio, limit, words))
    return checks


def rank_queries(
    bundle: Bundle, dataset: XMCDataset, rows: np.ndarray
) -> tuple[np.ndarray, dict[str, int]]:
    """Rank labels for the queries at these rows of the data set, without filtered pairs.

    Returns:
        int32 [N, K], rows of the data set's labels, best first, -1 = none; and the numbers of
        "unknown" labels (in the data set, not in the bundle) and "removed" ones (in the bundle, not
        in the data set).
    """
    import pandas as pd

    row_of_B = pd.Index(dataset.label_uids()).get_indexer(bundle.uids.to_pylist())
    removed = int((row_of_B < 0).sum())
    places = K + min(removed, _MOST_REMOVED)
    filtered = dataset.filter_pairs[rows]
    excluded = [dataset.labels["uid"].take(row.indices).to_pylist() for row in filtered]
    texts = own_texts(bundle, dataset, rows)
    parts = []
    every = list(blocks(len(texts), _BLOCK))
    for block in progress(every, desc=f"queries by {bundle.sha256[:8]}", unit="block"):
        predicted = bundle.predict_arrays(texts[block], places, excluded[block]).rows
        mapped_NK = np.where(predicted >= 0, row_of_B[predicted], -1)
        parts.append(moved_up(mapped_NK, K).astype(np.int32))
    unknown = dataset.num_labels - (len(row_of_B) - removed)
    return np.concatenate(parts), {"unknown": unknown, "removed": removed}


def own_texts(bundle: Bundle, dataset: XMCDataset, rows: np.ndarray) -> list[str]:
    """Texts of queries, with or without content as in the training of the bundle's model."""
    return dataset.query_texts(rows, bundle.info.text)


def _fetch(version: ModelVersion) -> Path:
    return fetch_bundle(f"models:/{version.name}/{version.version}")


def _purge(in_use: set[str]) -> None:
    """Remove local copies of bundles, except for the newest ones and those in use; the registry has
    all of them.
    """
    folders = [path for path in paths.BUNDLES.glob("[!.]*") if path.is_dir()]
    for path in sorted(folders, key=os.path.getmtime, reverse=True)[_KEPT_COPIES:]:
        if path.name not in in_use:
            remove_folder(path)
