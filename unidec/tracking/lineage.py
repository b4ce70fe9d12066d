"""From a model back to what made it, and from data to the models it went into: all read from the registry's tags.

A version's tags (written at registration) hold its commit, the hash of dvc.lock, DVC's hash of each artifact and the
version it started from, so the registry alone answers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unidec.data.storage import MANIFEST, folder_sha256
from unidec.errors import ConfigError
from unidec.tracking.promotion import aliases, all_versions, known_version
from unidec.tracking.provenance import COMMIT_TAG, DIFFERS_TAG, DIRTY_TAG, DVC_TAG
from unidec.tracking.registry import HASH_TAG
from unidec.tracking.store import open_client, tracking_uri, ui_url

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

SHORTEST = 6  # hexadecimal digits that a hash may be cut to
DATASET_TAG = "dataset.sha256"
LOCK_COMMIT_TAG = "git.lock_commit"  # set by the flow: the commit that has this version's dvc.lock
_MODEL = re.compile(r"models:/(?P<name>[^/@]+)[@/](?P<which>[^/@]+)")
_HASH = re.compile(rf"[0-9a-f]{{{SHORTEST},64}}(\.dir)?")


def lineage(
    source: str | os.PathLike[str], *, model_name: str = "unidec", uri: str | None = None, root: Path | str = "."
) -> dict[str, Any]:
    """What a model was made of, back to the model that started from nothing.

    Args:
        source: models:/name@alias, models:/name/version, "bundle:" and the first digits of a bundle's hash (a served
            answer names it), or a bundle's folder.
        model_name: where a hash or a folder is looked for.
        uri, root: registry; default: see `store.tracking_uri`.

    Returns:
        {"model", "version", "aliases", "registered" (ISO), "bundle_sha256", "dataset": {"name", "sha256"},
        "code": {"commit", "dirty", "lock_commit"}, "lock_sha256", "artifacts": {path: DVC's hash}, "differs": [path],
        "run": {"id", "name", "url"}, "prefect": {...}, "gate": {...}, "promoted": {...}, "start": {"kind", ...},
        "restore": [commands that check out its project], "parent": the same of the version it started from, or None}.
        A parent that was deleted is {"version", "bundle_sha256", "missing": True}. What no tag has is None or empty.

    Raises:
        ConfigError: no such address, model, version or bundle; or a hash that several versions begin with.
    """
    uri = uri or tracking_uri(root)
    client = open_client(uri)
    version = _version(client, os.fspath(source), model_name)
    versions = {item.tags.get(HASH_TAG, ""): item for item in all_versions(client, version.name)[::-1]}
    named = aliases(client, version.name)
    chain, seen = [version], {str(version.version)}
    while (parent := versions.get(chain[-1].tags.get("start.bundle.sha256", ""))) and str(parent.version) not in seen:
        chain.append(parent)
        seen.add(str(parent.version))
    found: dict[str, Any] | None = None
    for item in reversed(chain):
        about = _about(client, uri, item, named)
        if found is None and about["start"].get("bundle.sha256"):
            found = {"version": about["start"].get("version"), "bundle_sha256": about["start"]["bundle.sha256"]}
            found["missing"] = True
        found = about | {"parent": found}
    assert found is not None
    return found


def models_of_data(
    prefix: str, *, model_name: str = "unidec", uri: str | None = None, root: Path | str = "."
) -> list[dict[str, Any]]:
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
    if not _HASH.fullmatch(prefix):
        expected = f"{SHORTEST} to 64 hexadecimal digits"
        raise ConfigError(
            "not a hash",
            where="data",
            got=prefix,
            expected=expected,
            fix="dvc.lock and `unidec models lineage` have them",
        )
    client = open_client(uri or tracking_uri(root))
    named = aliases(client, model_name)
    rows: dict[str, dict[str, Any]] = {}
    made_by: dict[str, str] = {}  # bundle hash -> version, of those that have it in them
    for item in sorted(all_versions(client, model_name), key=lambda version: int(version.version)):
        what = [
            name.removeprefix(DVC_TAG)
            for name, value in item.tags.items()
            if _is_hash(name) and value.startswith(prefix)
        ]
        through = None if what else made_by.get(item.tags.get("start.bundle.sha256", ""))
        if what or through:
            number = str(item.version)
            made_by[item.tags.get(HASH_TAG, "")] = number
            rows[number] = {
                "version": number,
                "aliases": _named(named, number),
                "what": sorted(what),
                "through": through,
            }
    return list(rows.values())[::-1]


def _is_hash(name: str) -> bool:
    return name in (DATASET_TAG, HASH_TAG) or (
        name.startswith(DVC_TAG) and name not in (DIFFERS_TAG, "dvc.lock.sha256")
    )


def _about(client: MlflowClient, uri: str, version: ModelVersion, named: Mapping[str, str]) -> dict[str, Any]:
    tags = version.tags
    made = {name: value for name, value in tags.items() if _is_hash(name) and name.startswith(DVC_TAG)}
    commit = tags.get(LOCK_COMMIT_TAG) or tags.get(COMMIT_TAG)
    folder = f"../{version.name}-{version.version}"
    return {
        "model": version.name,
        "version": str(version.version),
        "aliases": _named(named, str(version.version)),
        "registered": datetime.fromtimestamp(version.creation_timestamp / 1000, UTC).isoformat(timespec="seconds"),
        "bundle_sha256": tags.get(HASH_TAG),
        "dataset": {"name": tags.get("dataset.name"), "sha256": tags.get(DATASET_TAG)},
        "code": {
            "commit": tags.get(COMMIT_TAG),
            "dirty": tags.get(DIRTY_TAG) == "true",
            "lock_commit": tags.get(LOCK_COMMIT_TAG),
        },
        "lock_sha256": tags.get("dvc.lock.sha256"),
        "artifacts": {name.removeprefix(DVC_TAG): value for name, value in sorted(made.items())},
        "differs": [path for path in tags.get(DIFFERS_TAG, "").split(", ") if path],
        "run": _run(client, uri, version.run_id),
        "start": {"kind": "cold"} | _part(tags, "start."),
        "restore": [f"git worktree add {folder} {commit}", f"cd {folder} && dvc pull"] if commit else [],
        **{part: _part(tags, f"{part}.") for part in ("prefect", "gate", "promoted", "rolled_back")},
    }


def _run(client: MlflowClient, uri: str, run_id: str | None) -> dict[str, str | None] | None:
    """The MLflow run, "url" None while no server shows it; where it was deleted, its id alone."""
    from mlflow.exceptions import MlflowException

    if not run_id:
        return None
    try:
        info = client.get_run(run_id).info
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return {"id": run_id}
    return {"id": run_id, "name": info.run_name or "", "url": ui_url(uri, info.experiment_id, run_id)}


def _part(tags: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {name.removeprefix(prefix): value for name, value in sorted(tags.items()) if name.startswith(prefix)}


def _named(named: Mapping[str, str], version: str) -> list[str]:
    return sorted(alias for alias, number in named.items() if number == version)


def _version(client: MlflowClient, source: str, model_name: str) -> ModelVersion:
    if found := _MODEL.fullmatch(source):
        return known_version(client, found["name"], found["which"])
    if source.startswith("bundle:"):
        prefix = source.removeprefix("bundle:")
        if not _HASH.fullmatch(prefix):
            raise ConfigError("not a hash", where="bundle", got=prefix, expected=f"{SHORTEST} to 64 hexadecimal digits")
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
    code, run, gate, data = item["code"], item["run"] or {}, item["gate"], item["dataset"]
    facts: list[tuple[str, Any]] = [
        ("bundle", item["bundle_sha256"]),
        ("code", code["commit"] and f"{code['commit']}{' + uncommitted changes' if code['dirty'] else ''}"),
        (
            "dvc.lock",
            item["lock_sha256"]
            and item["lock_sha256"] + (f", in commit {code['lock_commit']}" if code["lock_commit"] else ""),
        ),
        ("data set", data["sha256"] and f"{data['name'] or ''} {data['sha256']}".strip()),
        *item["artifacts"].items(),
        ("not as in dvc.lock", ", ".join(item["differs"])),
        ("MLflow run", run.get("url") or run.get("id")),
        ("Prefect run", item["prefect"].get("flow_run_url") or item["prefect"].get("flow_run_id")),
        ("start", item["start"]["kind"]),
        ("gate", _verdict(gate)),
        ("promoted", _words(item["promoted"])),
        ("rolled back", _words(item["rolled_back"])),
        ("restore with", "; ".join(item["restore"])),
    ]
    width = max(len(name) for name, value in facts if value)
    head = f"{item['model']} version {item['version']}{named}, registered {item['registered']}"
    return [head, *(f"   {name:<{width}}  {value}" for name, value in facts if value)]


def _verdict(gate: Mapping[str, str]) -> str:
    if "passed" not in gate:
        return ""
    against = f"version {gate['champion']}" if gate.get("champion") else "no champion"
    refused = f"refused ({gate.get('failed', '')})"
    return f"{'passed' if gate['passed'] == 'true' else refused} against {against}"


def _words(part: Mapping[str, str]) -> str:
    more = [key for key in ("dirty", "forced") if part.get(key) == "true"]
    by = f"by {part['by']}" if part.get("by") else ""
    return " ".join(word for word in (part.get("at", ""), by, part.get("reason", ""), *more) if word)
