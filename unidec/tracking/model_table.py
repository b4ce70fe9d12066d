"""The versions of a registered model as a table: what each is, what it was made of, the result of its gate."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unidec.tracking.promotion import ROLLED_BACK, aliases, all_versions
from unidec.tracking.registry import HASH_TAG
from unidec.tracking.store import open_client, tracking_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

METRICS = ("nDCG@5", "PSP@5")
COLUMNS = ("version", "aliases", *METRICS, "data", "start", "code", "gate", "age")


def list_versions(model_name: str, *, uri: str | None = None, root: Path | str = ".") -> list[dict[str, Any]]:
    """Every version, newest first; [] where there is no such model.

    Returns:
        {"version", "aliases": [...], "metrics": {"nDCG@5": ..., "PSP@5": ...}, "data": {"name", "sha256"}, "start",
        "code": {"commit", "dirty"}, "gate": "passed" | "refused" | "", "failed": [...], "rolled_back": bool,
        "bundle_sha256", "run", "created" (ISO)} each. Metrics are the gate's where it measured them, else those of
        the MLflow run.
    """
    client = open_client(uri or tracking_uri(root))
    named: dict[str, list[str]] = {}
    for alias, number in aliases(client, model_name).items():
        named.setdefault(number, []).append(alias)
    versions = all_versions(client, model_name)
    versions.sort(key=lambda version: -int(version.version))
    return [_row(client, version, sorted(named.get(str(version.version), []))) for version in versions]


def rows_of(versions: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows for people."""
    return list(COLUMNS), [_shown(version) for version in versions]


def _row(client: MlflowClient, version: ModelVersion, named: list[str]) -> dict[str, Any]:
    tags = version.tags
    return {
        "version": str(version.version),
        "aliases": named,
        "metrics": _metrics(client, version),
        "data": {"name": tags.get("dataset.name", ""), "sha256": tags.get("dataset.sha256", "")},
        "start": " ".join(filter(None, (tags.get("start.kind"), tags.get("start.version")))),
        "code": {"commit": tags.get("mlflow.source.git.commit", ""), "dirty": tags.get("git.dirty") == "true"},
        "gate": {"true": "passed", "false": "refused"}.get(tags.get("gate.passed", ""), ""),
        "failed": [name for name in tags.get("gate.failed", "").split(", ") if name],
        "rolled_back": ROLLED_BACK[0] in tags,
        "bundle_sha256": tags.get(HASH_TAG, ""),
        "run": version.run_id or "",
        "created": datetime.fromtimestamp(version.creation_timestamp / 1000, UTC).isoformat(timespec="seconds"),
    }


def _metrics(client: MlflowClient, version: ModelVersion) -> dict[str, float]:
    from mlflow.exceptions import MlflowException

    with contextlib.suppress(ValueError):
        found = json.loads(version.tags.get("gate.metrics", "{}"))
        if found:
            return {name: found[name] for name in METRICS if name in found}
    if not version.run_id:
        return {}
    try:
        logged = client.get_run(version.run_id).data.metrics
    except MlflowException:  # it was deleted
        return {}
    keys = {name: f"test/{name.replace('@', '_at_')}" for name in METRICS}
    return {name: logged[key] for name, key in keys.items() if key in logged}


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
