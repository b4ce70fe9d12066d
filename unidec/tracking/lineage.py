"""From a model back to what made it, and from data to the models it went into: all read from the registry's tags.

A version's tags (written at registration) hold its commit, the hash of dvc.lock, DVC's hash of each artifact and the
version it started from, so the registry alone answers.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unidec.data.storage import MANIFEST, folder_sha256
from unidec.errors import ConfigError
from unidec.tracking.promotion import ROLLED_BACK, aliases, all_versions, known_version
from unidec.tracking.provenance import COMMIT_TAG, DIFFERS_TAG, DIRTY_TAG, DVC_TAG
from unidec.tracking.registry import HASH_TAG
from unidec.tracking.run import metric_name
from unidec.tracking.store import UnlessMissing, open_client, tracking_uri, ui_url

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

SHORTEST = 6  # hexadecimal digits that a hash may be cut to
DATASET_TAG = "dataset.sha256"
LOCK_COMMIT_TAG = "git.lock_commit"  # set by the flow: the commit that has this version's dvc.lock
_MODEL = re.compile(r"models:/(?P<name>[^/@]+)[@/](?P<which>[^/@]+)")
_HASH = re.compile(rf"[0-9a-f]{{{SHORTEST},64}}(\.dir)?")


def lineage(source: str | os.PathLike[str], *, model_name: str = "unidec") -> dict[str, Any]:
    """What a model was made of, back to the model that started from nothing.

    Args:
        source: models:/name@alias, models:/name/version, "bundle:" and the first digits of a bundle's hash (a served
            answer names it), or a bundle's folder.
        model_name: where a hash or a folder is looked for.

    Returns:
        {"model", "version", "aliases", "registered" (ISO), "bundle_sha256", "dataset": {"name", "sha256"},
        "code": {"commit", "dirty", "lock_commit"}, "lock_sha256", "artifacts": {path: DVC's hash}, "differs": [path],
        "run": {"id", "name", "url"}, "prefect": {...}, "gate": {...}, "promoted": {...}, "start": {"kind", ...},
        "restore": [commands that check out its project], "parent": the same of the version it started from, or None}.
        A parent that was deleted is {"version", "bundle_sha256", "missing": True}. What no tag has is None or empty.

    Raises:
        ConfigError: no such address, model, version or bundle; or a hash that several versions begin with.
    """
    uri = tracking_uri()
    client = open_client(uri)
    version = _version(client, os.fspath(source), model_name)
    versions = {item.tags.get(HASH_TAG, ""): item for item in all_versions(client, version.name)[::-1]}
    named = aliases(client, version.name)

    def about(item: ModelVersion, below: set[str]) -> dict[str, Any]:
        sha256, parent = item.tags.get("start.bundle.sha256"), None
        origin = versions.get(sha256 or "")
        if origin is not None and origin.version not in below:
            parent = about(origin, {*below, origin.version})
        elif sha256:
            parent = {"version": item.tags.get("start.version"), "bundle_sha256": sha256, "missing": True}
        return _about(client, uri, item, named) | {"parent": parent}

    return about(version, {version.version})


def models_of_data(prefix: str, *, model_name: str = "unidec") -> list[dict[str, Any]]:
    """The versions that data went into, newest first.

    Args:
        prefix: of DVC's hash of an artifact or of raw data, of a data set's sha256, or of a bundle's: at least
            `SHORTEST` digits.

    Returns:
        {"version", "aliases", "what": [names of what has this hash], "through": version} each; `through` is None for a
        version that was made of the data itself, else the one it started from.

    Raises:
        ConfigError: no hash.
    """
    _check_hash(prefix, "data")
    client = open_client(tracking_uri())
    named = aliases(client, model_name)
    rows: list[dict[str, Any]] = []
    made_by: dict[str, str] = {}  # bundle hash -> version, of those that have it in them
    for item in all_versions(client, model_name)[::-1]:
        number, hashes = str(item.version), {name: value for name, value in item.tags.items() if _is_hash(name)}
        what = sorted(name.removeprefix(DVC_TAG) for name, value in hashes.items() if value.startswith(prefix))
        through = None if what else made_by.get(item.tags.get("start.bundle.sha256", ""))
        if what or through:
            made_by[item.tags.get(HASH_TAG, "")] = number
            rows.append({"version": number, "aliases": _named(named, number), "what": what, "through": through})
    return rows[::-1]


def _is_hash(name: str) -> bool:
    return name in (DATASET_TAG, HASH_TAG) or _is_artifact(name)


def _is_artifact(name: str) -> bool:
    return name.startswith(DVC_TAG) and name not in (DIFFERS_TAG, "dvc.lock.sha256")


def _check_hash(prefix: str, where: str) -> None:
    if not _HASH.fullmatch(prefix):
        raise ConfigError(
            "not a hash", where=where, got=prefix, expected=f"{SHORTEST} to 64 hexadecimal digits",
            fix="dvc.lock and `unidec models lineage` have them",
        )  # fmt: skip


def _about(client: MlflowClient, uri: str, version: ModelVersion, named: Mapping[str, str]) -> dict[str, Any]:
    tags = version.tags
    commit = tags.get(LOCK_COMMIT_TAG) or tags.get(COMMIT_TAG)
    folder = f"../{version.name}-{version.version}"
    run: dict[str, str | None] | None = {"id": version.run_id} if version.run_id else None
    with UnlessMissing():  # a run that was deleted: its id alone
        if run is not None:
            info = client.get_run(version.run_id).info
            run |= {"name": info.run_name or "", "url": ui_url(uri, info.experiment_id, version.run_id)}
    return {
        "model": version.name,
        "version": str(version.version),
        "aliases": _named(named, str(version.version)),
        "registered": registered_at(version),
        "bundle_sha256": tags.get(HASH_TAG),
        "dataset": {"name": tags.get("dataset.name"), "sha256": tags.get(DATASET_TAG)},
        "code": {
            "commit": tags.get(COMMIT_TAG),
            "dirty": tags.get(DIRTY_TAG) == "true",
            "lock_commit": tags.get(LOCK_COMMIT_TAG),
        },
        "lock_sha256": tags.get("dvc.lock.sha256"),
        "artifacts": {name.removeprefix(DVC_TAG): tags[name] for name in sorted(tags) if _is_artifact(name)},
        "differs": [path for path in tags.get(DIFFERS_TAG, "").split(", ") if path],
        "run": run,
        "start": {"kind": "cold"} | _part(tags, "start."),
        "restore": [f"git worktree add {folder} {commit}", f"cd {folder} && dvc pull"] if commit else [],
        **{part: _part(tags, f"{part}.") for part in ("prefect", "gate", "promoted", "rolled_back")},
    }


def registered_at(version: ModelVersion) -> str:
    """When a version was registered, ISO."""
    return datetime.fromtimestamp(version.creation_timestamp / 1000, UTC).isoformat(timespec="seconds")


def _part(tags: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {name.removeprefix(prefix): value for name, value in sorted(tags.items()) if name.startswith(prefix)}


def _named(named: Mapping[str, str], version: str) -> list[str]:
    return sorted(alias for alias, number in named.items() if number == version)


def _version(client: MlflowClient, source: str, model_name: str) -> ModelVersion:
    if found := _MODEL.fullmatch(source):
        return known_version(client, found["name"], found["which"])
    if source.startswith("bundle:"):
        prefix = source.removeprefix("bundle:")
        _check_hash(prefix, "bundle")
    elif source and (Path(source) / MANIFEST).is_file():
        prefix = folder_sha256(source)
    else:
        expected = f"models:/{model_name}@champion, models:/{model_name}/3, bundle:<hash>, or a bundle's folder"
        raise ConfigError("not an address of a model", where="lineage", got=source, expected=expected)
    held = [item for item in all_versions(client, model_name) if item.tags.get(HASH_TAG, "").startswith(prefix)]
    if len({item.tags[HASH_TAG] for item in held}) != 1:
        several = ", ".join(f"version {item.version}" for item in held)
        what = f"several versions of {model_name} begin so" if held else f"no version of {model_name} holds this bundle"
        fix = "give more digits" if held else "`unidec models list` lists what is registered"
        raise ConfigError(what, where=source, got=several or prefix, fix=fix)
    return min(held, key=lambda item: int(item.version))


# -- for people -------------------------------------------------------------------------------------------------------


def as_lines(found: Mapping[str, Any]) -> list[str]:
    """A lineage as a tree of lines, each parent below what started from it."""
    if found.get("missing"):
        return [f"version {found['version']} (bundle {found['bundle_sha256'][:12]}): deleted from the registry"]
    lines, parent = _lines(found), found["parent"]
    if parent:
        how = "the labels are new, the model is that of" if found["start"]["kind"] == "refresh" else "started from"
        lines += [f"└─ {how}", *(f"   {line}" for line in as_lines(parent))]
    return lines


def _lines(item: Mapping[str, Any]) -> list[str]:
    named = f" ({', '.join(item['aliases'])})" if item["aliases"] else ""
    code, run, prefect, data = item["code"], item["run"] or {}, item["prefect"], item["dataset"]
    changes = " + uncommitted changes" if code["dirty"] else ""
    committed = f", in commit {code['lock_commit']}" if code["lock_commit"] else ""
    facts = {
        "bundle": item["bundle_sha256"],
        "code": code["commit"] and code["commit"] + changes,
        "dvc.lock": item["lock_sha256"] and item["lock_sha256"] + committed,
        "data set": data["sha256"] and f"{data['name'] or ''} {data['sha256']}".strip(),
        **item["artifacts"],
        "not as in dvc.lock": ", ".join(item["differs"]),
        "MLflow run": run.get("url") or run.get("id"),
        "Prefect run": prefect.get("flow_run_url") or prefect.get("flow_run_id"),
        "start": item["start"]["kind"],
        "gate": _verdict(item["gate"]),
        "promoted": _words(item["promoted"]),
        "rolled back": _words(item["rolled_back"]),
        "restore with": "; ".join(item["restore"]),
    }
    width = max(len(name) for name, value in facts.items() if value)
    head = f"{item['model']} version {item['version']}{named}, registered {item['registered']}"
    return [head, *(f"   {name:<{width}}  {value}" for name, value in facts.items() if value)]


def _verdict(gate: Mapping[str, str]) -> str:
    if "passed" not in gate:
        return ""
    against = f"version {gate['champion']}" if gate.get("champion") else "no champion"
    outcome = "passed" if gate["passed"] == "true" else f"refused ({gate.get('failed', '')})"
    return f"{outcome} against {against}"


def _words(part: Mapping[str, str]) -> str:
    by = f"by {part['by']}" if part.get("by") else ""
    more = [key for key in ("dirty", "forced") if part.get(key) == "true"]
    return " ".join(word for word in (part.get("at", ""), by, part.get("reason", ""), *more) if word)


# -- the table of versions -------------------------------------------------------------------------------------------

METRICS = ("nDCG@5", "PSP@5")
COLUMNS = ("version", "aliases", *METRICS, "data", "start", "code", "gate", "age")


def list_versions(model_name: str) -> list[dict[str, Any]]:
    """Every version, newest first; [] where there is no such model.

    Returns:
        {"version", "aliases": [...], "metrics": {"nDCG@5": ..., "PSP@5": ...}, "data": {"name", "sha256"}, "start",
        "code": {"commit", "dirty"}, "gate": "passed" | "refused" | "", "failed": [...], "rolled_back": bool,
        "bundle_sha256", "run", "created" (ISO)} each. Metrics are the gate's where it measured them, else those of
        the MLflow run.
    """
    client = open_client(tracking_uri())
    named = aliases(client, model_name)
    return [_row(client, version, named) for version in all_versions(client, model_name)]


def rows_of(versions: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows for people."""
    return list(COLUMNS), [_shown(version) for version in versions]


def _row(client: MlflowClient, version: ModelVersion, named: dict[str, str]) -> dict[str, Any]:
    tags = version.tags
    return {
        "version": str(version.version),
        "aliases": _named(named, str(version.version)),
        "metrics": _metrics(client, version),
        "data": {"name": tags.get("dataset.name", ""), "sha256": tags.get("dataset.sha256", "")},
        "start": " ".join(filter(None, (tags.get("start.kind"), tags.get("start.version")))),
        "code": {"commit": tags.get("mlflow.source.git.commit", ""), "dirty": tags.get("git.dirty") == "true"},
        "gate": {"true": "passed", "false": "refused"}.get(tags.get("gate.passed", ""), ""),
        "failed": [name for name in tags.get("gate.failed", "").split(", ") if name],
        "rolled_back": ROLLED_BACK[0] in tags,
        "bundle_sha256": tags.get(HASH_TAG, ""),
        "run": version.run_id or "",
        "created": registered_at(version),
    }


def _metrics(client: MlflowClient, version: ModelVersion) -> dict[str, float]:
    found = json.loads(version.tags.get("gate.metrics") or "{}")
    with UnlessMissing():  # the run may have been deleted
        if not found and version.run_id:
            logged = client.get_run(version.run_id).data.metrics
            found = {name: logged.get(f"test/{metric_name(name)}") for name in METRICS}
    return {name: found[name] for name in METRICS if found.get(name) is not None}


def _shown(row: dict[str, Any]) -> list[str]:
    metrics = [f"{row['metrics'][name]:.2f}" if name in row["metrics"] else "" for name in METRICS]
    data = f"{row['data']['name']} {row['data']['sha256'][:8]}".strip()
    code = row["code"]["commit"][:8] + (" + changes" if row["code"]["dirty"] else "")
    gate = f"refused: {', '.join(row['failed'])}" if row["failed"] else row["gate"]
    if row["rolled_back"]:
        gate = "rolled back"
    age = _age((datetime.now(UTC) - datetime.fromisoformat(row["created"])).total_seconds())
    return [row["version"], " ".join(row["aliases"]), *metrics, data, row["start"], code, gate, age]


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return "now"
