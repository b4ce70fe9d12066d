"""Stage `gate`: may the challenger take the champion's place? Every reason is written down, pass or fail; promotion.

Both bundles are fetched from the registry, hashes checked, served in a fresh process, and rank the test split as it is
now from its texts by the same code, each with its own tokenizer; labels are mapped by uid.

Legend: N test queries, K places, B labels of a bundle.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unidec.config import Params
from unidec.data.dataset import XMCDataset
from unidec.data.storage import files_sha256, remove_folder, write_json
from unidec.errors import ArtifactError
from unidec.evaluation.metrics import filtered_truth, moved_up
from unidec.evaluation.page import render, write_page
from unidec.evaluation.significance import Check, challenge
from unidec.pipeline import paths
from unidec.pipeline.ranking import K, headline
from unidec.progress import progress
from unidec.retrieval.bundle import Bundle
from unidec.retrieval.probe import Probe, probe_bundle
from unidec.retrieval.query_encoder import Runtime
from unidec.sections import Gate
from unidec.tracking import promotion
from unidec.tracking.fetch import fetch_bundle
from unidec.tracking.promotion import CHALLENGER, CHAMPION, ROLLED_BACK, known_version, rolled_back_words, version_of
from unidec.tracking.provenance import CHANGED_TAG, COMMIT_TAG, DIRTY_TAG, git, uncommitted
from unidec.tracking.registry import HASH_TAG
from unidec.tracking.store import open_client, tracking_uri
from unidec.training.precision import choose_device

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

GATE_JSON = Path("outputs/gate.json")
GATE_PAGE = Path("outputs/gate.html")
_ENOUGH = 10  # copies of bundles kept
_AT_ONCE = 1024  # queries between two steps of the progress line
_MOST_REMOVED = 3 * K  # labels that the data set has no more: so many places are searched beyond K at most
PROBE_K = 10
RUNTIME: Runtime = "auto"  # as `unidec serve` encodes queries
_AGAIN = 3  # times both are measured, in turn, while a time speaks against the challenger
_PATIENCE = 600.0  # seconds until a fresh process counts as hung
_TIMES = ("load_seconds", "load_cpu_seconds", "p50_ms", "p95_ms", "p95_cpu_ms")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verdict:
    """Whether a challenger may become champion (`already`: it is), and why. Both versions; the headline metrics of
    "challenger" and "champion" in percent, empty without a comparison; the challenger's MLflow run."""

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
    """Compare a version with the champion, see whether it can be served, and say so in files and tags.

    A first model has no champion to be compared with: it must be servable. One that is champion already passes unseen.

    Args:
        version: number or alias.

    Raises:
        ConfigError: no such version. DataError, ArtifactError: no data set, or the champion's bundle is damaged. A
            challenger that is worse, damaged or does not load raises nothing: it does not pass.
    """
    name, client = params.tracking.model_name, open_client(tracking_uri())
    challenger = _with_commit(client, known_version(client, name, version))
    champion = version_of(client, name, CHAMPION)
    already = champion is not None and champion.version == challenger.version
    about: dict[str, Any] = {}
    checks = [Check("champion", True, None, None, "it is the champion already")]
    if not already:
        dataset = paths.open_dataset()
        checks, about = _judged(params, challenger, champion, dataset)
    passed = all(check.passed for check in checks)
    if not already:
        about |= {
            "model": name, "passed": passed, "reasons": checks, "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "challenger": _about(challenger), "champion": champion and _about(champion),
            "data": {"name": dataset.name, "sha256": dataset.sha256, "test queries": len(dataset.rows("test"))},
            "settings": params.gate.model_dump(),
        }  # fmt: skip
        write_json(GATE_JSON, about)
        write_page(GATE_PAGE, render("gate", verdict=about))
        question = _question(params, challenger, champion)
        promotion.record_verdict(client, challenger, about, question)
        _purge({version.tags.get(HASH_TAG, "")[:16] for version in (challenger, champion) if version is not None})
    for check in checks:
        log.log(logging.INFO if check.passed else logging.WARNING, "gate: %s: %s", check.check, check.words)
    return Verdict(
        passed, already, name, checks, str(challenger.version), str(champion.version) if champion else None,
        {who: headline(values) for who, values in about.get("metrics", {}).items()},
        str(GATE_PAGE), challenger.run_id or None,
    )  # fmt: skip


def needs_gate(params: Params, version: str | int) -> bool:
    """Whether the gate has something to decide: not for the champion, nor while the reasons of a refusal hold.

    Without a champion a version is always judged. A refusal depends on the champion, the data set, the settings and
    what is committed; one that was rolled back stays refused."""
    name, client = params.tracking.model_name, open_client(tracking_uri())
    challenger, champion = known_version(client, name, version), version_of(client, name, CHAMPION)
    if champion is None:
        return True
    if champion.version == challenger.version or ROLLED_BACK[0] in challenger.tags:
        return False
    refused = challenger.tags.get("gate.passed") == "false"
    return not refused or challenger.tags.get("gate.settings") != _question(params, challenger, champion)


def promote(
    params: Params, version: str | int = CHALLENGER, *, force: bool = False, reason: str = ""
) -> promotion.Promotion:  # fmt: skip
    """A version becomes champion, the champion previous: `unidec.tracking.promotion.promote`."""
    return promotion.promote(params.tracking.model_name, version, force=force, reason=reason)


def _question(params: Params, challenger: ModelVersion, champion: ModelVersion | None) -> str:
    """What a verdict depends on beside the model, as a hash."""
    facts = {
        "champion": champion and str(champion.version), "data": paths.open_dataset().sha256,
        "settings": params.gate.model_dump(), "uncommitted": bool(uncommitted(challenger.tags)),
    }  # fmt: skip
    return files_sha256({key: json.dumps(value) for key, value in facts.items()})[:16]


def _about(version: ModelVersion) -> dict[str, Any]:
    shown = (HASH_TAG, "dataset.sha256", COMMIT_TAG, DIRTY_TAG, "start.kind")
    return {"version": str(version.version), "run": version.run_id} | {key: version.tags.get(key) for key in shown}


def _provenance(version: ModelVersion, champion: ModelVersion | None, rules: Gate) -> list[Check]:
    """Whether the code and parameters that made it are in git, and whether it was rolled back.

    A first champion replaces nothing, so it has no such requirements."""
    tags = version.tags
    commit = tags.get(COMMIT_TAG, "")[:12]
    checks = [Check("code", True, commit or None, None, f"commit {commit or 'unknown'}")]
    if left := uncommitted(tags):
        words = f"made with uncommitted changes ({', '.join(left[:5])}{', ...' if len(left) > 5 else ''})"
        fix = f": commit them and run `make train`, or run `unidec models promote {version.version} --force`"
        if champion is None:
            fix = ", accepted for a first champion; commit them, or later models are refused"
            log.warning("gate: version %s was %s%s", version.version, words, fix)
        elif rules.allow_dirty:
            fix = ", which gate.allow_dirty accepts"
        checks = [Check("code", champion is None or rules.allow_dirty, "dirty", "clean", words + fix)]
    if ROLLED_BACK[0] in tags:
        words = f"{rolled_back_words(tags)}; `unidec models promote {version.version} --force` overrules that"
        checks.append(Check("rolled back", False, tags[ROLLED_BACK[0]], None, words))
    return checks


def _with_commit(client: MlflowClient, version: ModelVersion) -> ModelVersion:
    """A version whose uncommitted changes were committed since gets the commit that has them."""
    if version.tags.get(DIRTY_TAG) != "true" or uncommitted(version.tags):
        return version
    number = str(version.version)
    client.set_model_version_tag(version.name, number, COMMIT_TAG, git(".", "rev-parse", "HEAD") or "")
    client.set_model_version_tag(version.name, number, DIRTY_TAG, "false")
    client.delete_model_version_tag(version.name, number, CHANGED_TAG)
    return known_version(client, version.name, number)


def _judged(
    params: Params, challenger: ModelVersion, champion: ModelVersion | None, dataset: XMCDataset
) -> tuple[list[Check], dict[str, Any]]:
    """Every check, and what the page shows beside them: "probes", "labels", "metrics", "comparison"."""
    rules = params.gate
    if challenger.tags.get("start.kind") == "refresh":  # its labels alone changed: not worse is enough
        rules = rules.model_copy(update={"margin": min(rules.margin, -rules.tolerance)})
    checks, sha256, name = _provenance(challenger, champion, rules), challenger.tags.get(HASH_TAG, ""), "hash"
    others = {} if champion is None else {"champion": _fetch(champion)}
    rows = dataset.rows("test")
    asked = rows if len(rows) else dataset.rows("train")
    asked = asked[:: max(len(asked) // rules.probes, 1)][: rules.probes]  # evenly spaced
    try:
        folders = {"challenger": _fetch(challenger)} | others
        checks.append(Check("hash", True, sha256, sha256, f"sha256 {sha256[:16]}, as registered"))
        name = "loads"
        texts = own_texts(Bundle.load(folders["challenger"], lazy=True, verify=False), dataset, asked) or ["a query"]
    except ArtifactError as error:
        return [*checks, Check(name, False, None, None, str(error).replace("\n", " "))], {}
    found, probes = servability(folders, texts, rules)
    about: dict[str, Any] = {"probes": {who: asdict(probe) for who, probe in probes.items()}}
    checks += found
    if not probes or champion is None:
        return checks, about
    if not len(rows):
        words = "the data set has no test queries on which it could be compared with the champion"
        return [*checks, Check(rules.metric, False, None, None, words)], about
    place, ranked, about["labels"] = choose_device(params.device).type, {}, {}
    for who, folder in folders.items():  # hashes were checked by fetching
        ranked[who], about["labels"][who] = rank_test_split(Bundle.load(folder, verify=False, device=place), dataset)
    propensity, truth = paths.open_propensity(), filtered_truth(dataset.relevance[rows], dataset.filter_pairs[rows])
    found, facts = challenge(
        ranked["challenger"], ranked["champion"], truth, propensity.inverse_L, propensity.group_L, rules
    )
    return checks + found, about | facts


def servability(folders: Mapping[str, Path], texts: Sequence[str], rules: Gate) -> tuple[list[Check], dict[str, Probe]]:
    """The checks, and what fresh processes report of the bundles, where they answered.

    Args:
        folders: of the bundles "challenger" and, where there is one, "champion".
        texts: probe queries.
    """
    probes: dict[str, Probe] = {}
    timeout = max(_PATIENCE, 2 * rules.max_load_seconds) + len(texts)
    for _ in range(_AGAIN):
        for name, folder in folders.items():
            try:
                probe = probe_bundle(folder, texts, PROBE_K, timeout, runtime=RUNTIME, threads=1)
            except ArtifactError as error:
                if "challenger" not in probes:
                    return [Check("loads", False, None, None, str(error).replace("\n", " "))], {}
                continue  # a champion that cannot be served: nothing to be slower or larger than
            if name in probes:  # the better time of two: what else runs on a machine only adds
                better = {time: min(getattr(probe, time), getattr(probes[name], time)) for time in _TIMES}
                probe = replace(probe, **better)
            probes[name] = probe
        checks = figures(probes, rules)
        if all(check.passed or check.check.startswith("size") for check in checks):
            break
    words = f"a fresh process loads it, every hash agrees, and answers {len(texts)} probe queries"
    return [Check("loads", True, None, None, words), *checks], probes


def figures(probes: Mapping[str, Probe], rules: Gate) -> list[Check]:
    """Processor time and size as multiples of the champion's; wall clock and size against limits where some are set."""
    probe, champion, checks = probes["challenger"], probes.get("champion"), []
    for name, key, limit, unit in (
        ("load time", "load_seconds", rules.max_load_seconds, "s from start to the first answer"),
        ("latency", "p95_ms", rules.max_latency_ms, "ms, p95 of single queries"),
        ("size", "megabytes", rules.max_megabytes, "MB on disk"),
        ("load ratio", "load_cpu_seconds", rules.max_load_ratio, "s of processor time to the first answer"),
        ("latency ratio", "p95_cpu_ms", rules.max_latency_ratio, "ms of processor time, p95 of a query"),
        ("size ratio", "megabytes", rules.max_size_ratio, "MB"),
    ):
        got, words = getattr(probe, key), f"{getattr(probe, key):.3g} {unit}, at most {limit:g}"
        if name.endswith("ratio"):
            its = getattr(champion, key) if champion else 0.0
            if not its:
                continue
            words = f"{got:.3g} against {its:.3g} {unit}: {got / its:.2f} times the champion's, at most {limit:g}"
            got /= its
        if limit:
            checks.append(Check(name, got <= limit, got, limit, words))
    return checks


def rank_test_split(bundle: Bundle, dataset: XMCDataset) -> tuple[np.ndarray, dict[str, int]]:
    """The bundle's first `K` labels for each test query without filtered pairs: int32 [N, K], rows of the data set's
    labels, best first, -1 = none; and {"unknown": labels of the data set that the bundle does not know, "removed":
    labels of the bundle that the data set lacks}."""
    row_of, rows = {uid: row for row, uid in enumerate(dataset.label_uids())}, dataset.rows("test")
    row_of_B = np.array([row_of.get(uid, -1) for uid in bundle.uids.to_pylist()], dtype=np.int64)
    removed = int((row_of_B < 0).sum())
    texts, filtered, uids = own_texts(bundle, dataset, rows), dataset.filter_pairs[rows], dataset.labels["uid"]
    parts = [np.zeros((0, K), dtype=np.int32)]
    with progress(total=len(texts), desc=f"queries by {bundle.sha256[:8]}", unit="query") as bar:
        for start in range(0, len(texts), _AT_ONCE):
            some = texts[start : start + _AT_ONCE]
            exclude = [uids.take(filtered[i].indices).to_pylist() for i in range(start, start + len(some))]
            found = bundle.predict_arrays(some, K + min(removed, _MOST_REMOVED), exclude).rows
            mapped_NK = np.where(found >= 0, row_of_B[np.maximum(found, 0)], -1)
            parts.append(moved_up(mapped_NK, K).astype(np.int32))
            bar.update(len(some))
    unknown = dataset.num_labels - (len(row_of_B) - removed)
    return np.concatenate(parts), {"unknown": unknown, "removed": removed}


def own_texts(bundle: Bundle, dataset: XMCDataset, rows: np.ndarray) -> list[str]:
    """Queries as the bundle's model was trained to read them."""
    return dataset.query_texts(rows, "title+content" if bundle.info.text == "title+content" else "title")


def _fetch(version: ModelVersion) -> Path:
    return fetch_bundle(f"models:/{version.name}/{version.version}", paths.BUNDLES)


def _purge(kept: set[str]) -> None:
    """The newest copies of bundles stay, and those that were compared just now; the registry has the others."""
    folders = [path for path in paths.BUNDLES.glob("[!.]*") if path.is_dir()]
    for path in sorted(folders, key=lambda path: -path.stat().st_mtime)[_ENOUGH:]:
        if path.name not in kept:
            remove_folder(path)
