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
from unidec.metric_names import shown, without_at
from unidec.text_page import render_text
from unidec.tracking.fetch import parse_address
from unidec.tracking.promotion import aliases, all_versions, known_version
from unidec.tracking.provenance import (
    COMMIT_TAG,
    DIFFERS_TAG,
    DIRTY_TAG,
    DVC_TAG,
    LOCK_COMMIT_TAG,
    LOCK_TAG,
    UNKNOWN_TAG,
)
from unidec.tracking.registry import HASH_TAG, bundle_hash
from unidec.tracking.restore import RestorePoint, own_commit, restore_point
from unidec.tracking.store import UnlessMissing, open_client

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
            and, if git did not answer, "unknown": the reason. run: MLflow's id.
        artifacts: DVC's hashes by path. differs: paths whose content differs from dvc.lock.
        restore: commands that check out its project.
        prefect, gate, promoted, rolled_back, start: tags with these prefixes.
        metrics: set by `list_versions` only: from the gate, else from the MLflow run.
        missing: set by `lineage` only: what the commit in `restore` lacks, in words.
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


def lineage(source: str | os.PathLike[str], *, model_name: str) -> list[Version]:
    """A model, the version it started from, and so on, back to one trained from scratch or from a
    deleted version.

    Args:
        source: models:/name@alias, models:/name/version, "bundle:" and the first digits of a
            bundle's hash (every served answer has it), or a bundle's folder.
        model_name: the model in which a hash or a folder is looked up.

    Raises:
        ConfigError: no such address, model, version or bundle; or several versions match the hash.
    """
    client = open_client()
    version = _version(client, os.fspath(source), model_name)
    named = aliases(client, version.name)
    oldest_first = all_versions(client, version.name)[::-1]
    by_hash = {bundle_hash(item): item for item in oldest_first}
    found = []
    held: ModelVersion | None = version
    while held is not None:
        # each version once, so that circular references end
        by_hash.pop(bundle_hash(held), None)
        point = restore_point(held.tags, held.run_id or None)
        found.append(_about(held, named, point))
        held = by_hash.get(held.tags.get("start.bundle.sha256", ""))
    return found


def models_of_data(prefix: str, *, model_name: str) -> list[DataUse]:
    """The versions that were made from some data, newest first.

    Args:
        prefix: at least `SHORTEST` digits of DVC's hash of an artifact or of raw data, of a data
            set's sha256, or of a bundle's.

    Raises:
        ConfigError: not a hash.
    """
    _check_hash(prefix, "data")
    client = open_client()
    named = aliases(client, model_name)
    rows: list[DataUse] = []
    made_by: dict[str, str] = {}  # bundle hash -> version, for the versions made from the data
    for item in all_versions(client, model_name)[::-1]:
        number = str(item.version)
        hashes = _artifacts(item.tags)
        hashes |= {name: item.tags.get(name, "") for name in (DATASET_TAG, HASH_TAG)}
        what = sorted(name for name, value in hashes.items() if value.startswith(prefix))
        through = None if what else made_by.get(item.tags.get("start.bundle.sha256", ""))
        if what or through:
            made_by[hashes[HASH_TAG]] = number
            rows.append(DataUse(number, _named(named, number), what, through))
    return rows[::-1]


def list_versions(model_name: str) -> list[Version]:
    """Every version, newest first; [] if there is no such model."""
    client = open_client()
    named = aliases(client, model_name)
    return [
        replace(
            _about(version, named, RestorePoint(own_commit(version.tags), [])),
            metrics=_metrics(client, version),
        )
        for version in all_versions(client, model_name)
    ]


def _about(version: ModelVersion, named: Mapping[str, str], point: RestorePoint) -> Version:
    tags = version.tags
    number = str(version.version)
    registered = datetime.fromtimestamp(version.creation_timestamp / 1000, UTC)
    code: dict[str, str | bool | None] = {
        "commit": tags.get(COMMIT_TAG),
        "dirty": tags.get(DIRTY_TAG) == "true",
        "lock_commit": tags.get(LOCK_COMMIT_TAG),
    }
    if UNKNOWN_TAG in tags:
        code["unknown"] = tags[UNKNOWN_TAG]
    restore = []
    if point.commit:
        folder = f"../{version.name}-{number}".replace(" ", "-")
        restore = [f"git worktree add {folder} {point.commit}", f"cd {folder} && dvc pull"]
    return Version(
        model=version.name,
        version=number,
        aliases=_named(named, number),
        registered=registered.isoformat(timespec="seconds"),
        bundle_sha256=tags.get(HASH_TAG),
        dataset={"name": tags.get("dataset.name"), "sha256": tags.get(DATASET_TAG)},
        code=code,
        lock_sha256=tags.get(LOCK_TAG),
        artifacts=_artifacts(tags),
        differs=list(filter(None, tags.get(DIFFERS_TAG, "").split(", "))),
        run=version.run_id or None,
        restore=restore,
        missing=point.missing,
        prefect=_below(tags, "prefect."),
        gate=_below(tags, "gate."),
        promoted=_below(tags, "promoted."),
        rolled_back=_below(tags, "rolled_back."),
        start={"kind": "cold"} | _below(tags, "start."),
    )


def _below(tags: Mapping[str, str], prefix: str) -> dict[str, str]:
    """The tags with this prefix, which is removed from their names."""
    found = sorted(tags.items())
    return {name.removeprefix(prefix): tag for name, tag in found if name.startswith(prefix)}


def _artifacts(tags: Mapping[str, str]) -> dict[str, str]:
    hashes = {name: tag for name, tag in tags.items() if name not in (DIFFERS_TAG, LOCK_TAG)}
    return _below(hashes, DVC_TAG)


def _named(named: Mapping[str, str], version: str) -> list[str]:
    return sorted(alias for alias, number in named.items() if number == version)


def _check_hash(prefix: str, where: str) -> None:
    if not _HASH.fullmatch(prefix):
        digits = f"{SHORTEST} to 64 hexadecimal digits, as in `unidec models lineage`"
        raise ConfigError("not a hash", where=where, got=prefix, expected=digits)


def _version(client: MlflowClient, source: str, model_name: str) -> ModelVersion:
    if source.startswith("bundle:"):
        prefix = source.removeprefix("bundle:")
        _check_hash(prefix, "bundle")
    elif address := parse_address(source):
        return known_version(client, address.name, address.which)
    elif source and (Path(source) / MANIFEST).is_file():
        prefix = folder_sha256(source)
    else:
        raise ConfigError(
            "not an address of a model",
            where="lineage",
            got=source,
            expected=f"models:/{model_name}@champion, models:/{model_name}/3, bundle:<hash>, or a "
            "bundle's folder",
        )
    by_hash = {bundle_hash(item): item for item in all_versions(client, model_name)}
    found = [item for sha256, item in by_hash.items() if sha256.startswith(prefix)]
    if len(found) != 1:
        which = "several versions" if found else "no version"
        raise ConfigError(
            f"{which} of {model_name} with this bundle",
            where=source,
            got=prefix,
            fix="`unidec models list` lists the registered versions; give more digits",
        )
    return found[0]


def _metrics(client: MlflowClient, version: ModelVersion) -> dict[str, float]:
    found = json.loads(version.tags.get("gate.metrics") or "{}")
    with UnlessMissing():  # the run may have been deleted
        if not found and version.run_id:
            logged = client.get_run(version.run_id).data.metrics
            found = {name: logged.get(f"test/{without_at(name)}") for name in shown("list")}
    return {name: found[name] for name in shown("list") if found.get(name) is not None}


def as_lines(found: Sequence[Version]) -> list[str]:
    """A lineage as a tree of lines, each parent below the version that started from it."""
    return render_text(
        "lineage.txt", versions=found, code_words=_code_words, verdict=_verdict
    ).splitlines()


def rows_of(versions: Sequence[Version]) -> list[dict[str, str]]:
    """Table rows by column, one per version of `list_versions`."""
    rows = []
    for found in versions:
        metrics = dict.fromkeys(shown("list"), "")
        metrics |= {name: f"{value:.2f}" for name, value in (found.metrics or {}).items()}
        data = f"{found.dataset['name'] or ''} {(found.dataset['sha256'] or '')[:8]}"
        start = f"{found.start['kind']} {found.start.get('version', '')}"
        row = {
            "version": found.version,
            "aliases": " ".join(found.aliases),
            **metrics,
            "data": data.strip(),
            "start": start.strip(),
            "code": _code_words(found.code, digits=8),
            "gate": "rolled back" if found.rolled_back else _verdict(found.gate),
            "registered": found.registered[:16],
        }
        rows.append(row)
    return rows


def _code_words(code: Mapping[str, str | bool | None], digits: int | None = None) -> str:
    """The commit in words; shorter in a table (if `digits` is given)."""
    if "unknown" in code:
        return "unknown" if digits else f"unknown: {code['unknown']}"
    commit = str(code["commit"] or "")[:digits]
    if not code["dirty"]:
        return commit
    changes = "changes" if digits else "uncommitted changes"
    return f"{commit or 'no commit'} + {changes}"


def _verdict(gate: Mapping[str, str], against: str = "") -> str:
    if "passed" not in gate:
        return ""
    outcome = "passed" if gate["passed"] == "true" else f"refused: {gate.get('failed', '')}"
    return f"{outcome} {against}".strip()
