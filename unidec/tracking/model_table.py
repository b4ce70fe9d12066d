"""The versions of a registered model as a table: what each is, what it was made of, the result of its gate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from unidec.tracking.lineage import registered_at
from unidec.tracking.promotion import ROLLED_BACK, aliases, all_versions
from unidec.tracking.registry import HASH_TAG
from unidec.tracking.run import metric_name
from unidec.tracking.store import UnlessMissing, open_client, tracking_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

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
        "aliases": sorted(alias for alias, number in named.items() if number == str(version.version)),
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
