"""Stage `register`: the bundle becomes a version of the registered model."""

from __future__ import annotations

import json
from typing import Any

from unidec.config import Params
from unidec.data.storage import read_manifest
from unidec.ops.provenance import code_tags
from unidec.ops.registry import register as register_bundle
from unidec.ops.tracking import Tracker
from unidec.stages import paths
from unidec.stages.ranking import headline


def register(params: Params) -> dict[str, Any]:
    """Register outputs/bundle under the alias `challenger`; the same bundle again keeps its version."""
    run = read_manifest(paths.MODEL, "model", 1, verify=False)["meta"]["run"]
    tracker = Tracker.resume(paths.RUNS / run)
    dataset = paths.open_dataset()
    metrics = json.loads(paths.METRICS.read_text(encoding="utf-8")) if paths.METRICS.is_file() else {}
    shown = {"test": headline(metrics.get("test", {}))}
    card = {"data set": dataset.name, "labels": dataset.num_labels, "metrics": shown}
    tags = code_tags() | {"dataset.sha256": dataset.sha256}
    version = register_bundle(paths.BUNDLE, tracker.run_id, params.tracking.model_name, card=card, tags=tags)
    return {"model": params.tracking.model_name, "version": version, "alias": "challenger", "run": tracker.url}
