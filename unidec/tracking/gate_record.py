"""A gate's verdict in the registry and in the MLflow run: tags, a line of the version's card, page, a few figures."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

HEADING = "## Gate"
_TAGGED = ("P@1", "nDCG@5", "PSP@5", "R@10", "tail/R@10", "coverage@5")

log = logging.getLogger(__name__)


def record(
    client: MlflowClient, version: ModelVersion, verdict: Mapping[str, Any], settings: str, files: Sequence[Path]
) -> None:
    """Writes the verdict to the version, and to the run that it belongs to where that is still there.

    The tag `gate.passed` is written last: where it is set, all others are.
    """
    from mlflow.exceptions import MlflowException

    reasons = verdict["reasons"]
    lines = [f"{'pass' if r['passed'] else 'FAIL'} {r['check']}: {r['words']}" for r in reasons]
    own = verdict.get("metrics", {}).get("challenger", {})
    champion = verdict["champion"]["version"] if verdict["champion"] else ""
    tags = {
        "gate.failed": ", ".join(r["check"] for r in reasons if not r["passed"]),
        "gate.champion": champion,
        "gate.reasons": "\n".join(lines),
        "gate.at": verdict["at"],
        "gate.dataset.sha256": verdict["data"]["sha256"],
        "gate.settings": settings,
        "gate.metrics": json.dumps({name: round(own[name], 4) for name in _TAGGED if name in own}),
        "gate.passed": "true" if verdict["passed"] else "false",
    }
    number, outcome = str(version.version), "passed" if verdict["passed"] else "refused"
    if "gate.passed" in version.tags:  # of an earlier verdict
        client.delete_model_version_tag(version.name, number, "gate.passed")
    about = [f"**{outcome}** against {f'version {champion}' if champion else 'no champion'}, {verdict['at']}; page:"]
    about += ["`gate.html` among the run's artifacts", "", *(f"- {line}" for line in lines)]
    card = (version.description or "").partition(HEADING)[0].rstrip()
    client.update_model_version(version.name, number, "\n".join([card, "", HEADING, "", *about]).lstrip())
    for key, value in tags.items():
        client.set_model_version_tag(version.name, number, key, value)
    if not version.run_id:
        return
    try:
        for path in files:
            client.log_artifact(version.run_id, str(path))
        for key, value in _figures(verdict).items():
            client.log_metric(version.run_id, f"gate/{key}", value)
        client.set_tag(version.run_id, "gate.passed", tags["gate.passed"])
    except MlflowException as error:  # a deleted run is no reason to hold a model back
        log.warning("the gate's page did not reach run %s: %s", version.run_id, error)


def _figures(verdict: Mapping[str, Any]) -> dict[str, float]:
    compared, probe = verdict.get("comparison", {}), verdict.get("probes", {}).get("challenger", {})
    found = {"passed": float(verdict["passed"])}
    found |= {name: compared[name] for name in ("difference", "confidence") if compared.get(name) is not None}
    names = ("load_seconds", "load_cpu_seconds", "p50_ms", "p95_ms", "p95_cpu_ms", "megabytes")
    return found | {name: probe[name] for name in names if name in probe}
