"""Lineage: from a model back to its inputs, and from data to the models made from it; reads only
the registry's tags.

A version's tags, written at registration, hold its commit, the hash of dvc.lock, DVC's hash of each
artifact and the version it started from."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from unidec.data.storage import MANIFEST, folder_sha256
from unidec.errors import ConfigError
from unidec.metric_names import shown
from unidec.tracking.fetch import parse_address
from unidec.tracking.promotion import aliases, all_versions, known_version
from unidec.tracking.provenance import (
    COMMIT_TAG,
    DIFFERS_TAG,
    DIRTY_TAG,
    DVC_TAG,
    LOCK_COMMIT_TAG,
    LOCK_TAG,
    unknown_code,
)
from unidec.tracking.registry import HASH_TAG
from unidec.tracking.restore import restore_point
from unidec.tracking.run import metric_name
from unidec.tracking.store import UnlessMissing, open_client, tracking_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

SHORTEST = 6  # minimum hexadecimal digits of an abbreviated hash
DATASET_TAG = "dataset.sha256"
_HASH = re.compile(rf"[0-9a-f]{{{SHORTEST},64}}(\.dir)?")


@dataclass(frozen=True)
class Version:
    """A registered version and its inputs. Missing facts are None or empty.

    Attributes:
        registered: ISO time. dataset: "name", "sha256". code: "commit", "dirty", "lock_commit",
            and "unknown" if git did not answer: why. run: MLflow's id.
        artifacts: DVC's hashes by path. differs: paths whose content differs from dvc.lock.
        restore: commands that check out its project.
        prefect, gate, promoted, rolled_back, start: tags with these prefixes.
        metrics: only from `list_versions`: the gate's, else the MLflow run's.
        missing: only from `lineage`: what the commit in `restore` lacks, in words.
    """

    model: str
    version: str
    aliases: list[str]
    registered: str
    bundle_sha256: str | None
    dataset: dict[str, str | None]
    code: dict[str, str | bool | None]
    lock_sha256: str | None
    artifacts: dict[str, str]
    differs: list[str]
    run: str | None
    restore: list[str]
    prefect: dict[str, str]
    gate: dict[str, str]
    promoted: dict[str, str]
    rolled_back: dict[str, str]
    start: dict[str, str]
    metrics: dict[str, float] | None = None
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class DataUse:
    """A version made from some data: directly (`what` names the artifacts) or `through` the version
    it started from.
    """

    version: str
    aliases: list[str]
    what: list[str]
    through: str | None


def lineage(source: str | os.PathLike[str], *, model_name: str = "unidec") -> list[Version]:
    """A model, the version it started from, and so on, back to one trained from scratch or from a
    deleted version.

    Args:
        source: models:/name@alias, models:/name/version, "bundle:" and the first digits of a
            bundle's hash (every served answer has it), or a bundle's folder.
        model_name: the model in which a hash or a folder is looked up.

    Raises:
        ConfigError: no such address, model, version or bundle; or several versions match the hash.
    """
    client = open_client(tracking_uri())
    version = _version(client, os.fspath(source), model_name)
    versions = {
        item.tags.get(HASH_TAG, ""): item for item in all_versions(client, version.name)[::-1]
    }
    versions.pop(version.tags.get(HASH_TAG, ""), None)
    named = aliases(client, version.name)

    found = [_restorable(version, named)]
    # each version once, so that circular references end
    while (sha256 := found[-1].start.get("bundle.sha256")) and sha256 in versions:
        found.append(_restorable(versions.pop(sha256), named))
    return found


def models_of_data(prefix: str, *, model_name: str = "unidec") -> list[DataUse]:
    """The versions that were made from some data, newest first.

    Args:
        prefix: at least `SHORTEST` digits of DVC's hash of an artifact or of raw data, of a data
            set's sha256, or of a bundle's.

    Raises:
        ConfigError: not a hash.
    """
    _check_hash(prefix, "data")
    client = open_client(tracking_uri())
    named = aliases(client, model_name)
    rows: list[DataUse] = []
    made_by: dict[str, str] = {}  # bundle hash -> version, for the versions made from the data
    for item in all_versions(client, model_name)[::-1]:
        number = str(item.version)
        tags = item.tags
        hashes = _artifacts(tags) | {
            name: tags[name] for name in (DATASET_TAG, HASH_TAG) if name in tags
        }
        what = sorted(name for name, value in hashes.items() if value.startswith(prefix))
        through = None if what else made_by.get(tags.get("start.bundle.sha256", ""))
        if what or through:
            made_by[tags.get(HASH_TAG, "")] = number
            rows.append(DataUse(number, _named(named, number), what, through))
    return rows[::-1]


def list_versions(model_name: str) -> list[Version]:
    """Every version, newest first; [] if there is no such model."""
    client = open_client(tracking_uri())
    named = aliases(client, model_name)
    versions = all_versions(client, model_name)
    return [
        replace(_about(version, named), metrics=_metrics(client, version)) for version in versions
    ]


def _restorable(version: ModelVersion, named: Mapping[str, str]) -> Version:
    """A version with the commit of this repository that restores it best."""
    about = _about(version, named)
    point = restore_point(version.tags, about.run)
    return replace(about, restore=_restore(version, point.commit), missing=point.missing)


def _restore(version: ModelVersion, commit: str | None) -> list[str]:
    folder = f"../{version.name}-{version.version}".replace(" ", "-")
    return [f"git worktree add {folder} {commit}", f"cd {folder} && dvc pull"] if commit else []


def _about(version: ModelVersion, named: Mapping[str, str]) -> Version:
    tags = version.tags
    registered = datetime.fromtimestamp(version.creation_timestamp / 1000, UTC)
    dirty = tags.get(DIRTY_TAG) == "true"
    unknown = unknown_code(tags)

    def part(of: str) -> dict[str, str]:
        return {
            name.removeprefix(f"{of}."): tags[name]
            for name in sorted(tags)
            if name.startswith(f"{of}.")
        }

    return Version(
        model=version.name,
        version=str(version.version),
        aliases=_named(named, str(version.version)),
        registered=registered.isoformat(timespec="seconds"),
        bundle_sha256=tags.get(HASH_TAG),
        dataset={"name": tags.get("dataset.name"), "sha256": tags.get(DATASET_TAG)},
        code={
            "commit": tags.get(COMMIT_TAG),
            "dirty": dirty,
            "lock_commit": tags.get(LOCK_COMMIT_TAG),
        }
        | ({"unknown": unknown} if unknown else {}),
        lock_sha256=tags.get(LOCK_TAG),
        artifacts=_artifacts(tags),
        differs=[path for path in tags.get(DIFFERS_TAG, "").split(", ") if path],
        run=version.run_id or None,
        restore=_restore(version, tags.get(LOCK_COMMIT_TAG) or tags.get(COMMIT_TAG)),
        prefect=part("prefect"),
        gate=part("gate"),
        promoted=part("promoted"),
        rolled_back=part("rolled_back"),
        start={"kind": "cold"} | part("start"),
    )


def _artifacts(tags: Mapping[str, str]) -> dict[str, str]:
    found = {name: tags[name] for name in sorted(tags) if name.startswith(DVC_TAG)}
    return {
        name.removeprefix(DVC_TAG): value
        for name, value in found.items()
        if name not in (DIFFERS_TAG, LOCK_TAG)
    }


def _named(named: Mapping[str, str], version: str) -> list[str]:
    return sorted(alias for alias, number in named.items() if number == version)


def _check_hash(prefix: str, where: str) -> None:
    if not _HASH.fullmatch(prefix):
        expected = (
            f"{SHORTEST} to 64 hexadecimal digits, as in dvc.lock and `unidec models lineage`"
        )
        raise ConfigError("not a hash", where=where, got=prefix, expected=expected)


def _version(client: MlflowClient, source: str, model_name: str) -> ModelVersion:
    if source.startswith("bundle:"):
        prefix = source.removeprefix("bundle:")
        _check_hash(prefix, "bundle")
    elif address := parse_address(source):
        return known_version(client, address.name, address.which)
    elif source and (Path(source) / MANIFEST).is_file():
        prefix = folder_sha256(source)
    else:
        expected = (
            f"models:/{model_name}@champion, models:/{model_name}/3, bundle:<hash>, or a "
            "bundle's folder"
        )
        raise ConfigError(
            "not an address of a model", where="lineage", got=source, expected=expected
        )
    held = [
        item
        for item in all_versions(client, model_name)
        if item.tags.get(HASH_TAG, "").startswith(prefix)
    ]
    if len({item.tags[HASH_TAG] for item in held}) != 1:
        what = (
            f"several versions of {model_name} match"
            if held
            else f"no version of {model_name} holds this bundle"
        )
        fix = "give more digits" if held else "`unidec models list` lists the registered versions"
        raise ConfigError(what, where=source, got=prefix, fix=fix)
    return min(held, key=lambda item: int(item.version))


def _metrics(client: MlflowClient, version: ModelVersion) -> dict[str, float]:
    found = json.loads(version.tags.get("gate.metrics") or "{}")
    with UnlessMissing():  # the run may have been deleted
        if not found and version.run_id:
            logged = client.get_run(version.run_id).data.metrics
            found = {name: logged.get(f"test/{metric_name(name)}") for name in shown("list")}
    return {name: found[name] for name in shown("list") if found.get(name) is not None}


def as_lines(found: Sequence[Version]) -> list[str]:
    """A lineage as a tree of lines, each parent below the version that started from it."""
    own, *parents = found
    origin = own.start.get("bundle.sha256")
    code = own.code
    data = own.dataset
    changes = " + uncommitted changes" if code["dirty"] else ""
    code_words = f"{code['commit'] or 'no commit'}{changes}" if code["commit"] or changes else None
    code_words = f"unknown: {code['unknown']}" if "unknown" in code else code_words
    committed = f", in commit {code['lock_commit']}" if code["lock_commit"] else ""
    facts = {
        "bundle": own.bundle_sha256,
        "code": code_words,
        "dvc.lock": own.lock_sha256 and own.lock_sha256 + committed,
        "data set": data["sha256"] and f"{data['name'] or ''} {data['sha256']}".strip(),
        **own.artifacts,
        "differs from dvc.lock": ", ".join(own.differs),
        "MLflow run": own.run,
        "Prefect run": own.prefect.get("flow_run_url") or own.prefect.get("flow_run_id"),
        "start": own.start["kind"],
        "gate": _verdict(own.gate, f"against version {own.gate.get('champion') or 'none'}"),
        "promoted": _words(own.promoted),
        "rolled back": _words(own.rolled_back),
        "restore with": "; ".join(own.restore),
        "but it lacks": "; ".join(own.missing),
    }
    named = f" ({', '.join(own.aliases)})" if own.aliases else ""
    width = max(len(name) for name, value in facts.items() if value)
    lines = [f"{own.model} version {own.version}{named}, registered {own.registered}"]
    lines += [f"   {name:<{width}}  {value}" for name, value in facts.items() if value]
    if origin:
        how = "same model with other labels:" if own.start["kind"] == "refresh" else "started from"
        gone = (
            f"version {own.start.get('version')} (bundle {origin[:12]}): deleted from the registry"
        )
        lines += [
            f"└─ {how}",
            *(f"   {line}" for line in (as_lines(parents) if parents else [gone])),
        ]
    return lines


def columns() -> list[str]:
    """The heads of `rows_of`."""
    metrics = shown("list")
    return ["version", "aliases", *metrics, "data", "start", "code", "gate", "registered"]


def rows_of(versions: Sequence[Version]) -> list[list[str]]:
    """Rows of `columns` for the versions of `list_versions`."""
    rows = []
    for found in versions:
        measured = found.metrics or {}
        metrics = [f"{measured[name]:.2f}" if name in measured else "" for name in shown("list")]
        data = found.dataset
        code = found.code
        start = found.start
        rows.append(
            [
                found.version,
                " ".join(found.aliases),
                *metrics,
                f"{data['name'] or ''} {(data['sha256'] or '')[:8]}".strip(),
                f"{start['kind']} {start.get('version', '')}".strip(),
                "unknown"
                if "unknown" in code
                else str(code["commit"] or "")[:8] + (" + changes" if code["dirty"] else ""),
                "rolled back" if found.rolled_back else _verdict(found.gate),
                found.registered[:16],
            ]
        )
    return rows


def _verdict(gate: Mapping[str, str], against: str = "") -> str:
    refused = f"refused: {gate.get('failed', '')}"
    outcome = {"true": "passed", "false": refused}.get(gate.get("passed", ""), "")
    return f"{outcome} {against}".strip() if outcome else ""


def _words(part: Mapping[str, str]) -> str:
    by = f"by {part['by']}" if part.get("by") else ""
    more = [key for key in ("dirty", "forced") if part.get(key) == "true"]
    return " ".join(
        word for word in (part.get("at", ""), by, part.get("reason", ""), *more) if word
    )
